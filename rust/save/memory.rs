//! Where the bytes of a new file come from: memory of the host or of a GPU,
//! as tensors of one file may lie on both.

use crate::device::{Device, Fetch, Pinned, Scratch};
use crate::error::Result;
use crate::os::numa::{self, Node};

/// Memory of one device.
pub trait SourceMemory: Send + Sync {
    /// Lets the device write host memory by itself, where that is needed and can be had.
    fn pin(&self, memory: &mut [u8]) -> Option<Pinned>;

    /// The node of the machine that is near to the device, where it has several.
    fn node(&self) -> Option<Node>;

    /// How large slots should be, if not more than this.
    fn slot_bytes(&self, most: usize) -> usize;

    /// What is fetched from now on is what the caller's work on this stream, as far as it is queued, leaves.
    ///
    /// # Errors
    /// `invalid-argument` where the stream cannot be used, `device` from the driver.
    fn begin(&self, stream: u64) -> Result<()>;

    /// Brings bytes to a slot, and returns when they are there.
    ///
    /// # Errors
    /// `device`, from the driver; nothing writes to the slot any more.
    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<()>;
}

impl<D: Device> SourceMemory for D {
    fn pin(&self, memory: &mut [u8]) -> Option<Pinned> {
        Device::pin(self, memory)
    }

    fn node(&self) -> Option<Node> {
        self.pci_id().and_then(|id| numa::of_pci_device(&id))
    }

    fn slot_bytes(&self, most: usize) -> usize {
        self.chunk_limits(most).slot_bytes
    }

    fn begin(&self, stream: u64) -> Result<()> {
        self.set_stream(stream)?;
        let queued = self.record_caller()?;
        Device::begin(self, &queued, Scratch::default())
    }

    fn fetch(&self, slot: &mut [u8], fetches: &[Fetch]) -> Result<()> {
        let copy = Device::fetch(self, slot, fetches)?;
        self.wait(copy)
    }
}
