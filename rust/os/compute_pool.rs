//! Threads that compute, kept between calls: to start them costs as much as to convert a megabyte.
//!
//! A process that forks has only the forking thread in the child, so a pool belongs to the process that made it, and a
//! child makes its own. No lock here is waited for, since it may have been taken when the process was forked, by a
//! thread that the child does not have.

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::process;
use std::sync::{Arc, RwLock, TryLockError};

/// A pool, and the process that has its threads.
struct Owned {
    process: u32,
    pool: Arc<ThreadPool>,
}

static POOL: RwLock<Option<Owned>> = RwLock::new(None);

/// Does `work` with every item, on `threads` threads, or on the calling thread where no others can be had.
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
    let is_ours = |owned: &&Owned| owned.process == process::id() && owned.pool.current_num_threads() == threads;
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
            // A container may refuse more threads; this one does the work.
            tracing::debug!(%error, threads, "no threads to compute with");
            return None;
        }
    };
    let before = owned.replace(Owned { process: process::id(), pool: Arc::clone(&pool) });
    if let Some(before) = before
        && before.process != process::id()
    {
        // Its threads are those of the parent; to end them from here would wait for them.
        std::mem::forget(before);
    }
    Some(pool)
}
