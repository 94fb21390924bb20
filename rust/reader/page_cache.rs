//! The kernel's page cache: which bytes of a file it holds, and advice to it.

use crate::num::to_u64;
use crate::os::local_file::LocalFile;
pub use rustix::fs::Advice;
use rustix::fs::fadvise;
use rustix::io::{ReadWriteFlags, preadv2};
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Range of a file whose pages are all cached, or treated as uncached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Bytes of the file.
    pub range: Range<u64>,
    /// Whether all bytes of the range are in the page cache.
    pub is_cached: bool,
}

/// Splits a range of a file into cached and uncached runs, in order.
///
/// Runs meet at multiples of `unit` bytes. A unit that is partly cached counts as uncached.
pub fn runs(source: &LocalFile, range: Range<u64>, unit: u64) -> Vec<Run> {
    let mut runs = Vec::new();
    if !range.is_empty() {
        split(source, range, unit.max(1), &mut runs);
    }
    runs
}

/// Bisects a range until each part is cached or uncached as a whole.
///
/// One system call suffices for a range that is one or the other, which is the usual case.
fn split(source: &LocalFile, range: Range<u64>, unit: u64, runs: &mut Vec<Run>) {
    let is_cached = match residency(source, &range) {
        Residency::All => true,
        Residency::None => false,
        Residency::Part => {
            let middle = range.start.midpoint(range.end).next_multiple_of(unit);
            let last = (range.end - 1) / unit * unit;
            let middle = middle.min(last);
            if middle > range.start {
                split(source, range.start..middle, unit, runs);
                return split(source, middle..range.end, unit, runs);
            }
            false
        }
    };
    match runs.last_mut() {
        Some(last) if last.is_cached == is_cached => last.range.end = range.end,
        _ => runs.push(Run { range, is_cached }),
    }
}

#[derive(Clone, Copy)]
enum Residency {
    All,
    Part,
    None,
}

/// Returns how much of a range that is not empty is cached.
///
/// cachestat(2) needs Linux 6.5, and newer kernels answer it only if the caller may write the file. Without it, the
/// first and the last byte stand for the range.
fn residency(source: &LocalFile, range: &Range<u64>) -> Residency {
    match cached_pages(source, range) {
        Ok(0) => Residency::None,
        Ok(count) if count >= pages_in(range) => Residency::All,
        Ok(_) => Residency::Part,
        Err(_) => match (is_cached(source, range.start), is_cached(source, range.end - 1)) {
            (true, true) => Residency::All,
            (false, false) => Residency::None,
            _ => Residency::Part,
        },
    }
}

/// Returns whether all of a range that is not empty is cached; false if the kernel does not say.
pub fn is_all_cached(source: &LocalFile, range: &Range<u64>) -> bool {
    cached_pages(source, range).is_ok_and(|count| count >= pages_in(range))
}

/// Returns whether a file appears to be cached, from a sample of its bytes.
pub fn is_mostly_cached(source: &LocalFile) -> bool {
    const SAMPLES: u64 = 8;
    let part_bytes = (source.length / SAMPLES).max(1);
    let is_cached = |at: u64| matches!(residency(source, &(at..at + 1)), Residency::All);
    (0..source.length / part_bytes).all(|part| is_cached(part * part_bytes + part_bytes / 2))
}

fn pages_in(range: &Range<u64>) -> u64 {
    let page_bytes = page_bytes();
    (range.end - 1) / page_bytes - range.start / page_bytes + 1
}

/// Returns how many pages of a range that is not empty are cached.
fn cached_pages(source: &LocalFile, range: &Range<u64>) -> io::Result<u64> {
    // Neither rustix nor libc has this call. Its number is the same on all architectures.
    const SYS_CACHESTAT: libc::c_long = 451;
    #[repr(C)]
    struct CachestatRange {
        offset: u64,
        length: u64,
    }
    #[repr(C)]
    #[derive(Default)]
    struct Cachestat {
        cached: u64,
        dirty: u64,
        written_back: u64,
        evicted: u64,
        evicted_recently: u64,
    }
    let input = CachestatRange { offset: range.start, length: range.end - range.start };
    let mut output = Cachestat::default();
    let flags: libc::c_uint = 0;
    // SAFETY: the kernel reads `input` and writes `output`, which have the layouts of its `cachestat_range` and
    // `cachestat`.
    let code =
        unsafe { libc::syscall(SYS_CACHESTAT, source.file.as_raw_fd(), &raw const input, &raw mut output, flags) };
    if code == 0 { Ok(output.cached) } else { Err(io::Error::last_os_error()) }
}

/// Returns whether one byte is cached; false if the file system does not say.
pub fn is_cached(source: &LocalFile, offset: u64) -> bool {
    let mut byte = [0];
    preadv2(&source.file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT) == Ok(1)
}

/// Gives the kernel advice about a range.
pub fn advise(source: &LocalFile, range: &Range<u64>, advice: Advice) {
    // Without a length the advice would be for the whole rest of the file.
    let Some(length) = NonZeroU64::new(range.end - range.start) else { return };
    if let Err(error) = fadvise(&source.file, range.start, Some(length), advice) {
        tracing::debug!(path = %source.path.display(), ?advice, %error, "the kernel refuses advice about this file");
    }
}

/// Widens a range to whole pages.
pub fn pages_of(range: &Range<u64>) -> Range<u64> {
    let page_bytes = page_bytes();
    range.start / page_bytes * page_bytes..range.end.next_multiple_of(page_bytes)
}

/// Returns the page size of this machine, in bytes.
pub fn page_bytes() -> u64 {
    to_u64(rustix::param::page_size())
}
