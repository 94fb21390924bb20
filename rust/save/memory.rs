//! Memory that a save reads: of the host, of mapped files or of a GPU. Tensors of one file may be in several.

use crate::device::{CopyInFlight, Device, Fetch, Pinned, Scratch};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::os::memory;
use crate::os::numa::Node;
use crate::os::retry::Check;
use crate::profile::{self, Stage};
use crate::staging::Block;

/// Memory of one device, from which a save copies bytes to slots.
pub trait SourceMemory: Send + Sync {
    /// Pins host memory for the device, or returns `None` if the device does not need or cannot have pinned memory.
    fn pin(&self, _: &mut [u8]) -> Option<Pinned> {
        None
    }

    /// Returns the NUMA node of the device, or `None` if the machine has only one node.
    fn node(&self) -> Option<Node> {
        None
    }

    /// Returns the best slot size in bytes, at most `slot_bytes_max`.
    fn slot_bytes(&self, slot_bytes_max: usize) -> usize {
        slot_bytes_max
    }

    /// Returns how much device memory fetches of `count` pieces through slots of `slot_bytes` bytes can use, in bytes.
    fn gather_bytes(&self, _slot_bytes: usize, _count: usize) -> usize {
        0
    }

    /// Orders later fetches after the work that is queued on the caller's `stream`. They may use the scratch memory.
    ///
    /// # Errors
    /// `invalid-argument` if the stream cannot be used; `device` from the driver.
    fn begin(&self, stream: u64, scratch: Scratch) -> Result<()>;

    /// Copies bytes to a slot, and returns when the copy is complete. If `check` ends the wait, the slot holds the copy, and
    /// later work of the caller's stream waits for it.
    ///
    /// # Errors
    /// `device` from the driver; the error of `check`. `io` with the byte of the slot if memory is gone.
    fn fetch(&self, slot: &mut Block, fetches: &[Fetch], check: Check<'_>) -> Result<()>;
}

impl<D: Device> SourceMemory for D {
    fn pin(&self, memory: &mut [u8]) -> Option<Pinned> {
        Device::pin(self, memory)
    }

    fn node(&self) -> Option<Node> {
        Device::node(self)
    }

    fn slot_bytes(&self, slot_bytes_max: usize) -> usize {
        self.limits(slot_bytes_max).slot_bytes
    }

    fn gather_bytes(&self, slot_bytes: usize, count: usize) -> usize {
        Device::gather_bytes(self, slot_bytes, count)
    }

    fn begin(&self, stream: u64, scratch: Scratch) -> Result<()> {
        self.set_stream(stream)?;
        let event = self.record_caller()?;
        Device::begin(self, Some(&event), scratch)
    }

    fn fetch(&self, slot: &mut Block, fetches: &[Fetch], check: Check<'_>) -> Result<()> {
        let mut copy = Device::fetch(self, slot.bytes_mut(), fetches)?;
        let failure = copy.take_failure();
        slot.hold(copy);
        let waited = slot.settle(check).inspect_err(|_| self.leave_copies());
        failure.and(waited)
    }
}

/// Memory of files that this process has mapped. If a file becomes shorter, an access to the missing pages ends the
/// process with SIGBUS, but a system call that reads them fails.
#[derive(Debug)]
pub struct Mapped;

impl Mapped {
    /// Returns the error for bytes that cannot be read.
    pub fn gone() -> Error {
        let message =
            "the tensor is a view of a mapped file, which has become shorter or cannot be read; load it again";
        Error::new(Kind::Io, message)
    }
}

impl SourceMemory for Mapped {
    fn begin(&self, _: u64, _: Scratch) -> Result<()> {
        Ok(())
    }

    fn fetch(&self, slot: &mut Block, fetches: &[Fetch], _: Check<'_>) -> Result<()> {
        let slot = slot.bytes_mut();
        let _span = profile::span(Stage::Gather).bytes(fetches.iter().map(|fetch| fetch.length).sum::<usize>());
        fetches.iter().try_for_each(|fetch| {
            let misfit = || Error::new(Kind::Internal, format!("{fetch:?} does not fit its slot"));
            let end = fetch.slot_begin.saturating_add(fetch.length);
            let into = slot.get_mut(fetch.slot_begin..end).ok_or_else(misfit)?;
            // SAFETY: the caller of the save promised that this memory may be read, except for pages that are gone.
            let read = unsafe { memory::read(fetch.address, into) };
            read.map_err(|done| Mapped::gone().offset(to_u64(fetch.slot_begin + done)))
        })
    }
}
