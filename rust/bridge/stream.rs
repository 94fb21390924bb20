//! Streams to the host or to a GPU.

use super::destinations::{cast, decode_destinations, scratch_bytes};
use super::ffi;
use super::guard::guard;
use crate::checkpoint::region::TensorRegion;
use crate::device::Scratch;
use crate::device::cuda::Cuda;
use crate::device::host::Host;
use crate::error::{Error, Kind, Result};
use crate::load::stream::Stream;
use crate::load::transfer::Batch;
use std::sync::Arc;

/// Stream to the host or to a GPU, and its prepared batch.
pub(super) struct AnyStream {
    to: StreamTo,
    regions: Arc<[TensorRegion]>,
    prepared: Option<(Vec<usize>, Batch)>,
}

pub(super) enum StreamTo {
    Host(Stream<Host>),
    Cuda(Stream<Cuda>),
}

impl AnyStream {
    pub(super) fn new(to: StreamTo, regions: Arc<[TensorRegion]>) -> AnyStream {
        AnyStream { to, regions, prepared: None }
    }

    /// Sets the caller's current CUDA stream.
    pub(super) fn set_stream(&self, stream: u64) -> Result<()> {
        guard(|| match &self.to {
            StreamTo::Host(to) => to.set_stream(stream),
            StreamTo::Cuda(to) => to.set_stream(stream),
        })
    }

    pub(super) fn can_cast(&self, from: i8, to: i8) -> bool {
        cast(from, to).is_some_and(|cast| match &self.to {
            StreamTo::Host(stream) => stream.planner().can_cast(cast),
            StreamTo::Cuda(stream) => stream.planner().can_cast(cast),
        })
    }

    /// Plans a batch, and returns the size of its scratch memory in bytes.
    pub(super) fn prepare(&mut self, destinations: &[ffi::Destination]) -> Result<u64> {
        guard(|| {
            let destinations = decode_destinations(&self.regions, destinations)?;
            let batch = match &self.to {
                StreamTo::Host(stream) => stream.planner().prepare(&destinations),
                StreamTo::Cuda(stream) => stream.planner().prepare(&destinations),
            }?;
            let tensors = destinations.iter().map(|destination| destination.tensor).collect();
            let (_, batch) = self.prepared.insert((tensors, batch));
            scratch_bytes(batch)
        })
    }

    /// Submits the prepared batch.
    ///
    /// # Safety
    /// That of [`Stream::submit`].
    pub(super) unsafe fn submit(&mut self, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let unprepared = || Error::new(Kind::Internal, "no batch was prepared");
            let (tensors, batch) = self.prepared.take().ok_or_else(unprepared)?;
            let scratch = Scratch { address, bytes };
            match &self.to {
                // SAFETY: the caller's promise is the same.
                StreamTo::Host(stream) => unsafe { stream.submit(&tensors, batch, scratch) },
                // SAFETY: as above.
                StreamTo::Cuda(stream) => unsafe { stream.submit(&tensors, batch, scratch) },
            }
        })
    }

    pub(super) fn take(&self) -> Result<usize> {
        guard(|| match &self.to {
            StreamTo::Host(stream) => stream.take(),
            StreamTo::Cuda(stream) => stream.take(),
        })
    }
}

pub(super) fn finish_stream(stream: Box<AnyStream>) -> Result<()> {
    guard(|| match stream.to {
        StreamTo::Host(stream) => stream.finish(),
        StreamTo::Cuda(stream) => stream.finish(),
    })
}
