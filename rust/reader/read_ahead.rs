//! Reads a mapped file ahead of whoever uses the tensors.
//!
//! Page faults alone keep one small request at the disk, and cost a trap each.
//! Here threads take the wanted ranges in large steps, in the order of the
//! file, while the load has long returned: what is not cached the kernel is
//! asked to read, what is cached gets its page table entries at once. When the
//! last tensor is gone the threads end.

use super::mmap::Mapping;
use super::page_cache::{self, Advice};
use crate::profile::{self, Stage};
use crate::source::Source;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once, Weak};
use std::thread;

/// One request to the kernel.
const STEP_BYTES: u64 = 4 << 20;
/// The kernel answers a request once it is queued, so several threads keep the disk busy. What is cached one makes
/// present faster than anyone can use it, and more would only take the user's cores.
const THREADS: usize = 4;

/// Starts to read `ranges` of a file, which are in its order, into the page cache, unless they are too small to gain
/// anything, or so large that the first bytes would be evicted before the last arrive.
pub fn start(source: &Arc<Source>, mapping: &Arc<Mapping>, ranges: impl Iterator<Item = Range<u64>>) {
    let steps: Vec<Range<u64>> = joined(ranges).iter().flat_map(steps_of).collect();
    let total_bytes: u64 = steps.iter().map(|step| step.end - step.start).sum();
    if total_bytes < STEP_BYTES || total_bytes > host_bytes() / 2 {
        return;
    }
    let users = Arc::downgrade(mapping);
    let work = Work { source: Arc::clone(source), users, steps, next: AtomicUsize::new(0), is_cold: Once::new() };
    Arc::new(work).spawn();
}

struct Work {
    source: Arc<Source>,
    users: Weak<Mapping>,
    steps: Vec<Range<u64>>,
    next: AtomicUsize,
    /// Happens when the first step is found that is not cached.
    is_cold: Once,
}

impl Work {
    fn spawn(self: Arc<Self>) {
        if let Err(error) = thread::Builder::new().name("fst read-ahead".into()).spawn(move || self.run()) {
            // The pages come all the same, one fault at a time.
            tracing::debug!(%error, "no read-ahead");
        }
    }

    fn run(self: Arc<Self>) {
        while let Some(step) = self.steps.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let Some(mapping) = self.users.upgrade() else { return };
            let _span = profile::span(Stage::ReadAhead).bytes(step.end - step.start);
            if page_cache::is_cached(&self.source, step.start) {
                mapping.populate(step);
            } else {
                self.is_cold.call_once(|| (1..THREADS).for_each(|_| Arc::clone(&self).spawn()));
                page_cache::advise(&self.source, step, Advice::WillNeed);
            }
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
    // SAFETY: only asks.
    let (pages, page_bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(page_bytes).unwrap_or(0))
}
