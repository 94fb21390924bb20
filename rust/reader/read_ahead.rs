//! Reads the pages of a file before its tensors are used or copied.
//!
//! Page faults, and reads of rows with gaps, keep one small request at the disk. Threads of this module request the ranges
//! in large steps, in the order of the file. They outlive a load of mapped tensors, and end when the ranges are read or the
//! last user is gone. A few small ranges are requested without threads: at a page fault, the kernel would read megabytes
//! around each.

use super::page_cache::{self, Advice};
use crate::num::to_usize;
use crate::os::local_file::LocalFile;
use crate::profile::{self, Stage};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

/// Bytes of one request to the kernel.
const STEP_BYTES: u64 = 4 << 20;
/// Number of threads. The kernel returns once it has queued a request, so several keep the disk busy.
const THREADS: usize = 4;

/// Starts to read ranges of a file into the page cache. The ranges are sorted. Ends early if nothing holds `user` any more.
///
/// Does nothing if they are so large that the first bytes would be evicted before the last arrive. If `is_sequential`,
/// the kernel reads small ranges ahead by itself.
pub fn start<U: ?Sized + Send + Sync + 'static>(
    source: &Arc<LocalFile>,
    user: &Arc<U>,
    ranges: impl Iterator<Item = Range<u64>>,
    is_sequential: bool,
) {
    let ranges = joined(ranges);
    let total_bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    if total_bytes < STEP_BYTES {
        if !is_sequential {
            ranges.iter().for_each(|range| page_cache::advise(source, range, Advice::WillNeed));
        }
        return;
    }
    let host = rustix::system::sysinfo();
    if total_bytes > host.totalram.saturating_mul(host.mem_unit.into()) / 2 {
        return;
    }
    // To start a thread for cached pages, or to check every page, would cost more than a small load. The first and the
    // last byte of a step stand for its pages.
    let is_cached = |at: u64| page_cache::is_all_cached(source, &(at..at + 1));
    let is_cold = |step: &Range<u64>| !is_cached(step.start) || !is_cached(step.end - 1);
    let steps: Vec<Range<u64>> = ranges.iter().flat_map(steps_of).filter(is_cold).collect();
    let (user, threads) = (Arc::downgrade(user), THREADS.min(steps.len()));
    Arc::new(ReadAhead { source: Arc::clone(source), user, steps, next: AtomicUsize::new(0) }).spawn(threads);
}

struct ReadAhead<U: ?Sized> {
    source: Arc<LocalFile>,
    /// Mapping whose views are tensors, or what a load holds.
    user: Weak<U>,
    steps: Vec<Range<u64>>,
    next: AtomicUsize,
}

impl<U: ?Sized + Send + Sync + 'static> ReadAhead<U> {
    /// Starts a thread that starts the next one, so that the load waits for the start of one thread only.
    fn spawn(self: Arc<Self>, threads: usize) {
        let Some(others) = threads.checked_sub(1) else { return };
        let run = move || {
            Arc::clone(&self).spawn(others);
            self.run();
        };
        if let Err(error) = thread::Builder::new().name("fst read-ahead".into()).spawn(run) {
            tracing::debug!(%error, "no read-ahead; pages are read when they are used");
        }
    }

    fn run(&self) {
        while let Some(step) = self.steps.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.user.strong_count() == 0 {
                return;
            }
            let _span = profile::span(Stage::ReadAhead).bytes(step.end - step.start);
            page_cache::advise(&self.source, step, Advice::WillNeed);
        }
    }
}

/// Joins ranges that touch, as ranges of neighbouring tensors do.
fn joined(ranges: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

fn steps_of(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    (range.start..end).step_by(to_usize(STEP_BYTES)).map(move |begin| begin..end.min(begin.saturating_add(STEP_BYTES)))
}
