//! Loads and saves by the ranks of a process group: layouts of tensors on ranks, and the plans.

pub mod layout;
pub mod load;
pub mod mesh;
pub mod save;

use crate::error::{Error, Kind, Result};

/// Largest number of windows of a plan. Each is a collective of all ranks, and takes memory of the plan. With the default
/// of 512 MiB, 16 TiB have fewer.
const WINDOWS_MAX: u64 = 1 << 16;

/// Returns the largest number up to `limit` that fits, or 0.
fn most(limit: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut fitting, mut above) = (0, limit.saturating_add(1));
    while above - fitting > 1 {
        let middle = fitting + (above - fitting) / 2;
        if fits(middle) {
            fitting = middle;
        } else {
            above = middle;
        }
    }
    fitting
}

/// Fails with `invalid-argument` if a plan has too many windows. `divided` names what `window_bytes` divides.
fn check_windows(windows: u64, window_bytes: u64, divided: &str) -> Result<()> {
    let message = || {
        format!(
            "window_bytes is {window_bytes}, which divides {divided} into more than {WINDOWS_MAX} windows; pass a larger one"
        )
    };
    if windows <= WINDOWS_MAX { Ok(()) } else { Err(Error::new(Kind::InvalidArgument, message())) }
}
