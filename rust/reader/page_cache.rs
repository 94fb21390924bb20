//! What the kernel holds of a file in memory: asked before a read, given up
//! after one.

use crate::source::Source;
use rustix::fs::fadvise;
use rustix::io::{ReadWriteFlags, preadv2};
use rustix::param::page_size;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::slice;

/// A part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// From the start of the file.
    pub range: Range<u64>,
    /// Whether all of it is in memory.
    pub is_cached: bool,
}

/// Which parts of a range of the file are in memory, in order. Parts meet at multiples of `unit` bytes, and one of
/// which anything is missing counts as missing.
pub fn runs(source: &Source, range: Range<u64>, unit: u64) -> Vec<Run> {
    let mut runs = Vec::new();
    if !range.is_empty() {
        split(source, range, unit.max(1), &mut runs);
    }
    runs
}

/// Asks of halves, and halves of those, until each is all there or all missing: one question where a file is one or
/// the other, which is nearly always.
fn split(source: &Source, range: Range<u64>, unit: u64, runs: &mut Vec<Run>) {
    let is_cached = match held(source, &range) {
        Held::All => true,
        Held::None => false,
        Held::Part => {
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
enum Held {
    All,
    Part,
    None,
}

/// A kernel before 6.5 does not know cachestat(2), and a newer one answers it only to those who may write the file.
/// Then the first and the last byte stand for the range.
fn held(source: &Source, range: &Range<u64>) -> Held {
    match cached_pages(source, range) {
        Ok(0) => Held::None,
        Ok(count) if count >= pages_in(range) => Held::All,
        Ok(_) => Held::Part,
        Err(_) => match (is_cached(source, range.start), is_cached(source, range.end - 1)) {
            (true, true) => Held::All,
            (false, false) => Held::None,
            _ => Held::Part,
        },
    }
}

/// Whether all of a range that is not empty is in memory. Where the kernel cannot say, it is not.
pub fn is_all_cached(source: &Source, range: &Range<u64>) -> bool {
    cached_pages(source, range).is_ok_and(|count| count >= pages_in(range))
}

fn pages_in(range: &Range<u64>) -> u64 {
    let page_bytes = page_bytes();
    (range.end - 1) / page_bytes - range.start / page_bytes + 1
}

/// How many pages of a range that is not empty are in memory.
fn cached_pages(source: &Source, range: &Range<u64>) -> io::Result<u64> {
    // Neither rustix nor libc wraps cachestat(2).
    const SYS_CACHESTAT: libc::c_long = 451;
    #[repr(C)]
    struct Asked {
        offset: u64,
        length: u64,
    }
    #[repr(C)]
    #[derive(Default)]
    struct Answer {
        cached: u64,
        dirty: u64,
        written_back: u64,
        evicted: u64,
        evicted_recently: u64,
    }
    let asked = Asked { offset: range.start, length: range.end - range.start };
    let mut answer = Answer::default();
    let flags: libc::c_uint = 0;
    // SAFETY: the kernel reads `asked` and writes `answer`, which have the layout of its `cachestat_range` and
    // `cachestat`.
    let code =
        unsafe { libc::syscall(SYS_CACHESTAT, source.file.as_raw_fd(), &raw const asked, &raw mut answer, flags) };
    if code == 0 { Ok(answer.cached) } else { Err(io::Error::last_os_error()) }
}

/// Whether a read of one byte would be answered from memory.
pub fn is_cached(source: &Source, offset: u64) -> bool {
    let mut byte = 0_u8;
    // A file system that does not support `RWF_NOWAIT` refuses the read.
    let buffers = &mut [IoSliceMut::new(slice::from_mut(&mut byte))];
    preadv2(&source.file, buffers, offset, ReadWriteFlags::NOWAIT) == Ok(1)
}

/// Advises the kernel on a range.
pub fn advise(source: &Source, range: &Range<u64>, advice: Advice) {
    let kernel_advice = match advice {
        Advice::WillNeed => rustix::fs::Advice::WillNeed,
        Advice::DontNeed => rustix::fs::Advice::DontNeed,
    };
    let length = NonZeroU64::new(range.end - range.start);
    if let Err(error) = fadvise(&source.file, range.start, length, kernel_advice) {
        tracing::debug!(path = %source.path.display(), ?advice, %error, "fadvise failed");
    }
}

/// What the kernel should do with pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Begin to read them.
    WillNeed,
    /// Drop those that hold nothing unwritten and that nobody has mapped.
    DontNeed,
}

/// The range made longer, to whole pages.
pub fn pages_of(range: &Range<u64>) -> Range<u64> {
    let page_bytes = page_bytes();
    range.start / page_bytes * page_bytes..range.end.next_multiple_of(page_bytes)
}

/// The unit in which the kernel holds files.
pub fn page_bytes() -> u64 {
    u64::try_from(page_size()).unwrap_or(4 << 10)
}
