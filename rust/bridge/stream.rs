//! Streams to the host or to a GPU.

use super::destinations::{cast, decode_destinations};
use super::ffi;
use super::guard::guard;
use crate::cast::elements::Cast;
use crate::checkpoint::region::TensorRegion;
use crate::device::{Device, Scratch};
use crate::error::{Error, Kind, Result};
use crate::load::stream::Stream;
use crate::load::transfer::Batch;
use crate::num::to_u64;
use crate::plan::Destination;
use std::sync::Arc;

/// Stream to the host or to a GPU, and its prepared batch.
pub(super) struct AnyStream {
    stream: Box<dyn StreamToDevice>,
    regions: Arc<[TensorRegion]>,
    prepared: Option<(Vec<usize>, Batch)>,
}

/// Operations of a [`Stream`], whatever its device.
trait StreamToDevice {
    fn set_stream(&self, stream: u64) -> Result<()>;
    fn can_cast(&self, cast: Cast) -> bool;
    fn prepare(&self, destinations: &[Destination]) -> Result<Batch>;
    /// # Safety
    /// The caller meets the conditions of [`Stream::set_scratch`].
    unsafe fn set_scratch(&self, scratch: Scratch);
    /// # Safety
    /// The caller meets the conditions of [`Stream::submit`].
    unsafe fn submit(&self, tensors: &[usize], batch: Batch) -> Result<()>;
    fn take(&self) -> Result<usize>;
    fn finish(self: Box<Self>) -> Result<()>;
}

impl<D: Device> StreamToDevice for Stream<D> {
    fn set_stream(&self, stream: u64) -> Result<()> {
        Stream::set_stream(self, stream)
    }

    fn can_cast(&self, cast: Cast) -> bool {
        self.planner().can_cast(cast)
    }

    fn prepare(&self, destinations: &[Destination]) -> Result<Batch> {
        self.planner().prepare(destinations)
    }

    unsafe fn set_scratch(&self, scratch: Scratch) {
        // SAFETY: the caller's promise.
        unsafe { Stream::set_scratch(self, scratch) }
    }

    unsafe fn submit(&self, tensors: &[usize], batch: Batch) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { Stream::submit(self, tensors, batch) }
    }

    fn take(&self) -> Result<usize> {
        Stream::take(self)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Stream::finish(*self)
    }
}

impl AnyStream {
    pub(super) fn new<D: Device>(stream: Stream<D>, regions: Arc<[TensorRegion]>) -> AnyStream {
        AnyStream { stream: Box::new(stream), regions, prepared: None }
    }

    /// Sets the caller's current stream.
    pub(super) fn set_stream(&self, stream: u64) -> Result<()> {
        guard(|| self.stream.set_stream(stream))
    }

    pub(super) fn can_cast(&self, from: i8, to: i8) -> bool {
        cast(from, to).is_some_and(|cast| self.stream.can_cast(cast))
    }

    /// Plans a batch, and returns how much scratch memory it needs, in bytes.
    pub(super) fn prepare(&mut self, destinations: &[ffi::Destination]) -> Result<u64> {
        guard(|| {
            let destinations = decode_destinations(&self.regions, destinations)?;
            let batch = self.stream.prepare(&destinations)?;
            let tensors = destinations.iter().map(|destination| destination.tensor).collect();
            let (_, batch) = self.prepared.insert((tensors, batch));
            Ok(to_u64(batch.scratch_bytes()))
        })
    }

    /// Sets the block of scratch memory that the batches submitted from now on share.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Stream::set_scratch`].
    pub(super) unsafe fn set_scratch(&self, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            // SAFETY: the caller's promise.
            unsafe { self.stream.set_scratch(Scratch { address, bytes }) };
            Ok(())
        })
    }

    /// Submits the planned batch.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Stream::submit`].
    pub(super) unsafe fn submit(&mut self) -> Result<()> {
        guard(|| {
            let missing = || Error::new(Kind::Internal, "no batch was prepared");
            let (tensors, batch) = self.prepared.take().ok_or_else(missing)?;
            // SAFETY: the caller's promise.
            unsafe { self.stream.submit(&tensors, batch) }
        })
    }

    pub(super) fn take(&self) -> Result<usize> {
        guard(|| self.stream.take())
    }
}

pub(super) fn finish_stream(stream: Box<AnyStream>) -> Result<()> {
    guard(|| stream.stream.finish())
}
