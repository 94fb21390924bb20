//! Reads a mapped file ahead of whoever uses the tensors.
//!
//! Page faults alone keep one small request at the disk. Here threads ask for
//! the wanted ranges in large steps, in the order of the file, while the load
//! has long returned. When the last tensor is gone the threads end.

use super::mmap::Mapping;
use super::page_cache::{self, Advice};
use crate::profile::{self, Stage};
use crate::source::Source;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

/// One request to the kernel.
const STEP_BYTES: u64 = 4 << 20;
/// The kernel answers a request once it is queued, so several threads keep the disk busy.
const THREADS: usize = 4;

/// Starts to read `ranges` of a file, which are in its order, into the page cache, unless they are too small to gain
/// anything, or so large that the first bytes would be evicted before the last arrive.
pub fn start(source: &Arc<Source>, mapping: &Arc<Mapping>, ranges: impl Iterator<Item = Range<u64>>) {
    let ranges = joined(ranges);
    let total_bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    if total_bytes < STEP_BYTES || total_bytes > host_bytes() / 2 {
        return;
    }
    // A thread for nothing would cost a tensor more than all else. So would to ask for every page: the ends stand for a
    // step.
    let is_cached = |at: u64| page_cache::is_all_cached(source, &(at..at + 1));
    let is_cold = |step: &Range<u64>| !is_cached(step.start) || !is_cached(step.end - 1);
    let steps: Vec<Range<u64>> = ranges.iter().flat_map(steps_of).filter(is_cold).collect();
    let (users, threads) = (Arc::downgrade(mapping), THREADS.min(steps.len()));
    Arc::new(Work { source: Arc::clone(source), users, steps, next: AtomicUsize::new(0) }).spawn(threads);
}

struct Work {
    source: Arc<Source>,
    users: Weak<Mapping>,
    steps: Vec<Range<u64>>,
    next: AtomicUsize,
}

impl Work {
    /// Starts a thread, which starts the next one: the load does not wait for more than the first.
    fn spawn(self: Arc<Self>, threads: usize) {
        let Some(others) = threads.checked_sub(1) else { return };
        let run = move || {
            Arc::clone(&self).spawn(others);
            self.run();
        };
        if let Err(error) = thread::Builder::new().name("fst read-ahead".into()).spawn(run) {
            // The pages come all the same, one fault at a time.
            tracing::debug!(%error, "no read-ahead");
        }
    }

    fn run(&self) {
        while let Some(step) = self.steps.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.users.strong_count() == 0 {
                return;
            }
            let _span = profile::span(Stage::ReadAhead).bytes(step.end - step.start);
            page_cache::advise(&self.source, step, Advice::WillNeed);
        }
    }
}

/// Ranges with those that touch, as neighbouring tensors do, made one.
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
    (range.start..end)
        .step_by(usize::try_from(STEP_BYTES).unwrap_or(usize::MAX))
        .map(move |begin| begin..end.min(begin.saturating_add(STEP_BYTES)))
}

/// The memory of this machine.
fn host_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into())
}
