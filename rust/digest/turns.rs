//! Order of the threads that hash the pieces of sequential inputs.

use crate::error::{Error, Result};
use crate::os::retry::Check;
use crate::os::sigint::POLL_INTERVAL;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Lets threads take memory in the order of their jobs.
///
/// A thread that waits in [`Hash::add`](super::Hash::add) keeps the memory of its piece. If jobs took memory in any
/// order, later ones could have all of it while they wait for an earlier one.
#[derive(Debug, Default)]
pub struct Turns {
    state: Mutex<State>,
    advanced: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: usize,
    failure: Option<Error>,
}

impl Turns {
    /// Begins with job 0 again.
    pub fn restart(&self) {
        self.lock().next = 0;
    }

    /// Runs `take` for a job after it has run for all jobs before.
    pub fn pass<T>(&self, job: usize, check: Check<'_>, take: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut state = self.lock();
        while state.next < job {
            let waited = self.advanced.wait_timeout(state, POLL_INTERVAL);
            drop(waited.map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state));
            check()?;
            state = self.lock();
        }
        drop(state);
        let taken = take()?;
        self.lock().next = job.saturating_add(1);
        self.advanced.notify_all();
        Ok(taken)
    }

    /// Stores the first error of a job, which ends the waits of all others.
    pub fn fail(&self, error: Error) -> Error {
        self.lock().failure.get_or_insert(error).clone()
    }

    /// Fails after a job has failed.
    pub fn check(&self) -> Result<()> {
        self.lock().failure.clone().map_or(Ok(()), Err)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
