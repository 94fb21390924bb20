//! Pool of compute threads that persists between calls: starting the threads costs as much as converting a megabyte.
//!
//! A forked child has only the forking thread, so a pool belongs to the process that created it, and a child creates
//! its own. No function here blocks on a lock: at the time of the fork a thread may have held it that does not exist in
//! the child.

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::process;
use std::sync::{Arc, RwLock, TryLockError};

/// Pool and the process that owns its threads.
struct OwnedPool {
    process: u32,
    pool: Arc<ThreadPool>,
}

static POOL: RwLock<Option<OwnedPool>> = RwLock::new(None);

/// Applies `work` to every item on `threads` threads, or on the calling thread if no pool is available.
pub fn for_each<T: Sync>(threads: usize, items: &[T], work: impl Fn(&T) + Sync + Send) {
    let pool = if threads > 1 { existing(threads).or_else(|| start(threads)) } else { None };
    match pool {
        Some(pool) => pool.install(|| items.par_iter().for_each(work)),
        None => items.iter().for_each(work),
    }
}

fn existing(threads: usize) -> Option<Arc<ThreadPool>> {
    let owned = match POOL.try_read() {
        Ok(owned) => owned,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    let is_ours = |owned: &&OwnedPool| owned.process == process::id() && owned.pool.current_num_threads() == threads;
    owned.as_ref().filter(is_ours).map(|owned| Arc::clone(&owned.pool))
}

fn start(threads: usize) -> Option<Arc<ThreadPool>> {
    let mut owned = match POOL.try_write() {
        Ok(owned) => owned,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    let built = ThreadPoolBuilder::new().num_threads(threads).thread_name(|_| "fst convert".into()).build();
    let pool = match built {
        Ok(pool) => Arc::new(pool),
        Err(error) => {
            // A container may refuse more threads. The calling thread then does the work.
            tracing::debug!(%error, threads, "cannot start compute threads");
            return None;
        }
    };
    let previous = owned.replace(OwnedPool { process: process::id(), pool: Arc::clone(&pool) });
    if let Some(previous) = previous
        && previous.process != process::id()
    {
        // The threads belong to the parent process. Dropping the pool would wait for them.
        std::mem::forget(previous);
    }
    Some(pool)
}
