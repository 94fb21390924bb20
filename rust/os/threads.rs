//! Parallel loop over scoped threads. The threads end with the call, so none exists when the process forks or unloads
//! the library between calls.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;

/// Runs `job` for every index below `count`, in ascending order, on up to `threads` threads.
///
/// After an error no further job starts, and the first error is returned.
pub fn for_each(threads: usize, count: usize, job: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    for_each_after(|| {}, threads, count, job)
}

/// Runs jobs as [`for_each`] does. Each thread but the caller's calls `start` first.
pub fn for_each_after(
    start: impl Fn() + Sync,
    threads: usize,
    count: usize,
    job: impl Fn(usize) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            if let Err(error) = job(index) {
                stop.store(true, Ordering::Relaxed);
                failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            // A container may refuse more threads. The threads that have started do the work.
            let run = || {
                start();
                work();
            };
            if let Err(error) = thread::Builder::new().name("fst".into()).spawn_scoped(scope, run) {
                tracing::debug!(%error, "cannot start as many threads as requested");
                break;
            }
        }
        work();
    });
    failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).map_or(Ok(()), Err)
}

/// Returns the results of `job` for every index below `count`, in order. Runs the jobs as [`for_each`] does.
pub fn map<T: Send + Sync>(threads: usize, count: usize, job: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    let results: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    for_each(threads, count, |index| {
        let result = job(index)?;
        if let Some(slot) = results.get(index) {
            slot.get_or_init(|| result);
        }
        Ok(())
    })?;
    Ok(results.into_iter().filter_map(OnceLock::into_inner).collect())
}
