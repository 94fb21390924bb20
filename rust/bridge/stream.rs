//! Streams to the host or to a GPU.

use super::destinations::{cast, decode_destinations};
use super::ffi;
use super::guard::guard;
use super::transfer::{OnDevice, on_device};
use crate::checkpoint::region::TensorRegion;
use crate::device::Scratch;
use crate::device::cuda::Cuda;
use crate::device::host::Host;
use crate::error::{Error, Kind, Result};
use crate::load::stream::Stream;
use crate::load::transfer::Batch;
use crate::num::to_u64;
use std::sync::Arc;

/// Stream to the host or to a GPU, and its prepared batch.
pub(super) struct AnyStream {
    stream: OnDevice<Stream<Host>, Stream<Cuda>>,
    regions: Arc<[TensorRegion]>,
    prepared: Option<(Vec<usize>, Batch)>,
}

impl AnyStream {
    pub(super) fn new(stream: OnDevice<Stream<Host>, Stream<Cuda>>, regions: Arc<[TensorRegion]>) -> AnyStream {
        AnyStream { stream, regions, prepared: None }
    }

    pub(super) fn can_cast(&self, from: i8, to: i8) -> bool {
        cast(from, to).is_some_and(|cast| on_device!(&self.stream, stream => stream.planner().can_cast(cast)))
    }

    /// Plans a batch, and returns how much scratch memory it needs, in bytes.
    pub(super) fn prepare(&mut self, destinations: &[ffi::Destination], scratch_bytes_max: u64) -> Result<u64> {
        guard(|| {
            let destinations = decode_destinations(&self.regions, destinations)?;
            let batch =
                on_device!(&self.stream, stream => stream.planner().prepare_within(&destinations, scratch_bytes_max))?;
            let tensors = destinations.iter().map(|destination| destination.tensor).collect();
            let (_, batch) = self.prepared.insert((tensors, batch));
            Ok(to_u64(batch.scratch_bytes()))
        })
    }

    /// Submits the planned batch, which uses a block of scratch memory. `stream` is the caller's current stream.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Stream::set_scratch`] and [`Stream::submit`].
    pub(super) unsafe fn submit(&mut self, address: u64, bytes: u64, stream: u64) -> Result<()> {
        guard(|| {
            let missing = || Error::new(Kind::Internal, "no batch was prepared");
            let (tensors, batch) = self.prepared.take().ok_or_else(missing)?;
            on_device!(&self.stream, own => {
                own.set_stream(stream)?;
                // SAFETY: the caller's promise.
                unsafe {
                    own.set_scratch(Scratch { address, bytes });
                    own.submit(&tensors, batch)
                }
            })
        })
    }

    /// Returns the index of the next tensor, which is ready on the caller's current stream.
    pub(super) fn take(&self, stream: u64) -> Result<usize> {
        guard(|| {
            on_device!(&self.stream, own => {
                own.set_stream(stream)?;
                own.take()
            })
        })
    }
}

pub(super) fn finish_stream(stream: Box<AnyStream>) -> Result<()> {
    guard(|| on_device!(stream.stream, stream => stream.finish()))
}
