//! Memory that a save reads: that of the host or of a GPU. Tensors of one file may be on several devices.

use crate::device::{CopyInFlight, Device, Fetch, Pinned, Scratch};
use crate::error::Result;
use crate::os::numa::Node;

/// Memory of one device, from which a save copies bytes to slots.
pub trait SourceMemory: Send + Sync {
    /// Pins host memory for the device, or returns `None` if the device does not need or cannot have pinned memory.
    fn pin(&self, memory: &mut [u8]) -> Option<Pinned>;

    /// Returns the NUMA node of the device, or `None` if the machine has only one node.
    fn node(&self) -> Option<Node>;

    /// Returns the best slot size in bytes, at most `slot_bytes_max`.
    fn slot_bytes(&self, slot_bytes_max: usize) -> usize;

    /// Returns how much device memory fetches of `count` pieces through slots of `slot_bytes` bytes can use, in bytes.
    fn gather_bytes(&self, slot_bytes: usize, count: usize) -> usize;

    /// Orders later fetches after the work that is queued on the caller's `stream`. They may use the scratch memory.
    ///
    /// # Errors
    /// `invalid-argument` if the stream cannot be used; `device` from the driver.
    fn begin(&self, stream: u64, scratch: Scratch) -> Result<()>;

    /// Copies bytes to a slot, and returns when the copy is complete.
    ///
    /// # Errors
    /// `device` from the driver. No copy to the slot is in flight then.
    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<()>;
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

    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<()> {
        Device::fetch(self, slot, fetches)?.wait()
    }
}
