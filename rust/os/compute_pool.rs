//! Pool of compute threads that persists between calls: starting the threads costs as much as converting a megabyte.
//!
//! A forked child has none of the threads of its parent's pool, and starts its own.

use crate::error::Result;
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use crate::os::retry::SharedCheck;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::Arc;

static POOL: PerProcess<Mutex<Option<Arc<ThreadPool>>>> = PerProcess::new(Mutex::default);

/// Applies `work` to every item on `threads` threads, or on the calling thread if no pool is available.
pub fn for_each<T: Sync>(threads: usize, items: &[T], work: impl Fn(&T) + Sync + Send) {
    match if threads > 1 { pool_of(threads) } else { None } {
        Some(pool) => pool.install(|| items.par_iter().for_each(work)),
        None => items.iter().for_each(work),
    }
}

/// As [`for_each`], but calls `check` before each item, and begins no further item after its first error.
pub fn try_for_each<T: Sync>(
    threads: usize,
    items: &[T],
    check: SharedCheck<'_>,
    work: impl Fn(&T) + Sync + Send,
) -> Result<()> {
    let work = |item: &T| check().map(|()| work(item));
    match if threads > 1 { pool_of(threads) } else { None } {
        Some(pool) => pool.install(|| items.par_iter().try_for_each(work)),
        None => items.iter().try_for_each(work),
    }
}

/// Returns the pool if it has this number of threads, or replaces it by one that has.
fn pool_of(threads: usize) -> Option<Arc<ThreadPool>> {
    let mut pool = POOL.get().lock();
    if let Some(pool) = pool.as_ref().filter(|pool| pool.current_num_threads() == threads) {
        return Some(Arc::clone(pool));
    }
    let built = ThreadPoolBuilder::new().num_threads(threads).thread_name(|_| "fst convert".into()).build();
    // A container may refuse more threads. The calling thread then does the work.
    let built = built.inspect_err(|error| tracing::debug!(%error, threads, "cannot start compute threads")).ok()?;
    Some(Arc::clone(pool.insert(Arc::new(built))))
}
