//! The CPU's own memory: copies end before they return.

use super::Device;
use crate::error::{Error, Kind, Result};
use crate::plan::Placement;

/// Memory of this process.
#[derive(Debug, Default)]
pub struct Host;

impl Device for Host {
    type Ticket = ();
    type Pinned = ();

    fn pin(&self, _: *mut u8, _: usize) -> Option<()> {
        None
    }

    fn is_host(&self) -> bool {
        true
    }

    fn begin(&self) -> Result<()> {
        Ok(())
    }

    fn copy(&self, bytes: &[u8], placements: &[Placement]) -> Result<()> {
        for placement in placements {
            let length = placement.row_bytes.saturating_mul(placement.rows);
            // SAFETY: the plan's addresses are the caller's, who gave this memory to the load.
            let destination = unsafe { slice_at(placement.address, length) };
            let outside = || Error::new(Kind::Internal, format!("{placement:?} does not fit its slot"));
            for (row, into) in destination.chunks_exact_mut(placement.row_bytes).enumerate() {
                let begin = placement.slot_begin + row * placement.slot_stride;
                into.copy_from_slice(bytes.get(begin..begin + placement.row_bytes).ok_or_else(outside)?);
            }
        }
        Ok(())
    }

    fn wait(&self, (): ()) -> Result<()> {
        Ok(())
    }

    fn end(&self) -> Result<()> {
        Ok(())
    }
}

/// The memory of this process at an address that crossed the border as a number.
///
/// # Safety
/// `length` bytes from `address` on must be memory that nobody else uses while the slice lives.
pub unsafe fn slice_at<'a>(address: u64, length: usize) -> &'a mut [u8] {
    let address = usize::try_from(address).unwrap_or(0);
    // SAFETY: the caller's promise; addresses of this process fit a `usize`.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), length) }
}
