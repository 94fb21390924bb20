//! Loads and saves by the ranks of a process group: layouts of tensors on ranks, and the plans.

pub mod layout;
pub mod load;
pub mod mesh;
pub mod save;

use crate::error::{Error, Kind, Result};

/// Largest number of windows of a plan. Each is a collective of all ranks, and takes memory of the plan. With the default
/// of 512 MiB, 16 TiB have fewer.
const WINDOWS_MAX: u64 = 1 << 16;

/// Fails with `invalid-argument` if a plan has too many windows. `divided` names what `window_bytes` divides.
fn check_windows(windows: u64, window_bytes: u64, divided: &str) -> Result<()> {
    let message = || {
        format!(
            "window_bytes is {window_bytes}, which divides {divided} into more than {WINDOWS_MAX} windows; pass a larger one"
        )
    };
    if windows <= WINDOWS_MAX { Ok(()) } else { Err(Error::new(Kind::InvalidArgument, message())) }
}
