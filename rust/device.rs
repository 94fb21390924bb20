//! Where bytes end up. A device copies bytes from staging to addresses of its
//! own and tells when a copy has ended; it knows nothing of files.

pub mod cuda;
pub mod host;

use crate::error::Result;
use crate::plan::Placement;

/// Memory that a load fills.
pub trait Device: Send + Sync {
    /// A copy that runs.
    type Ticket: Send;
    /// Keeps host memory known to the device, until it is dropped.
    type Pinned: Send + Sync;

    /// Lets the device read host memory by itself. `None` where that is not needed or was refused;
    /// copies work all the same.
    fn pin(&self, address: *mut u8, length: usize) -> Option<Self::Pinned>;

    /// Whether host code may write the device's memory.
    fn is_host(&self) -> bool;

    /// Orders the copies that follow behind what the caller has queued for the device.
    ///
    /// # Errors
    /// `device`, from the driver.
    fn begin(&self) -> Result<()>;

    /// Starts copies from `bytes`, which stay as they are until the ticket has been waited for.
    ///
    /// # Errors
    /// `device`, from the driver; no copy from `bytes` runs then.
    fn copy(&self, bytes: &[u8], placements: &[Placement]) -> Result<Self::Ticket>;

    /// Waits for the end of a copy.
    ///
    /// # Errors
    /// `device` when the copy failed.
    fn wait(&self, ticket: Self::Ticket) -> Result<()>;

    /// Orders what the caller queues from now on behind the copies.
    ///
    /// # Errors
    /// `device`, from the driver.
    fn end(&self) -> Result<()>;
}
