//! System calls that are repeated after a signal, or while the kernel is busy.
//!
//! A call may fail like this for ever, for example on a file system in user space. Every repetition therefore asks the
//! caller whether to go on.

use crate::error::{Error, Result};
use crate::num::to_u64;
use std::io;
use std::thread;
use std::time::Duration;

/// Decides whether to go on. Fails after Ctrl-C, for example, or when the result is no longer needed.
pub type Check<'a> = &'a dyn Fn() -> Result<()>;

/// [`Check`] that several threads call.
pub type SharedCheck<'a> = &'a (dyn Fn() -> Result<()> + Sync);

/// Pause before a call that failed with `EAGAIN` or `EBUSY` is repeated.
pub const BUSY_WAIT: Duration = Duration::from_millis(1);

/// Prepares to repeat a call: pauses if the kernel was busy. Returns false if the same call would fail again.
pub fn prepare(error: &io::Error, check: Check<'_>) -> Result<bool> {
    match error.kind() {
        io::ErrorKind::Interrupted => {}
        io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy => thread::sleep(BUSY_WAIT),
        _ => return Ok(false),
    }
    check().map(|()| true)
}

/// Repeats a call until its result is final.
pub fn repeat<T>(check: Check<'_>, mut call: impl FnMut() -> io::Result<T>) -> Result<io::Result<T>> {
    loop {
        match call() {
            Err(error) if prepare(&error, check)? => {}
            result => return Ok(result),
        }
    }
}

/// Fills `into` with the bytes of a file from `offset`, and resumes after short reads. Returns the number of bytes,
/// which is smaller at the end of the file. Fails with the error of `check`, or the result of `failed` for an error of
/// `read_at` and the offset of the first missing byte.
pub fn read_full(
    read_at: impl Fn(&mut [u8], u64) -> io::Result<usize>,
    offset: u64,
    into: &mut [u8],
    check: Check<'_>,
    failed: impl Fn(io::Error, u64) -> Error,
) -> Result<usize> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = offset.saturating_add(to_u64(done));
        match repeat(check, || read_at(rest, at))?.map_err(|error| failed(error, at))? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}
