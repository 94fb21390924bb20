//! Order of the threads that hash the pieces of sequential inputs.

use crate::error::{Error, Result};
use crate::os::mutex::{Condvar, Mutex};
use crate::os::retry::Check;
use crate::os::sigint::POLL_INTERVAL;

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
        self.state.lock().next = 0;
    }

    /// Runs `take` for a job after it has run for all jobs before.
    pub fn pass<T>(&self, job: usize, check: Check<'_>, take: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut state = self.state.lock();
        while state.next < job {
            drop(self.advanced.wait_timeout(state, POLL_INTERVAL));
            check()?;
            state = self.state.lock();
        }
        drop(state);
        let taken = take()?;
        self.state.lock().next = job.saturating_add(1);
        self.advanced.notify_all();
        Ok(taken)
    }

    /// Stores the first error of a job, which ends the waits of all others.
    pub fn fail(&self, error: Error) -> Error {
        self.state.lock().failure.get_or_insert(error).clone()
    }

    /// Fails after a job has failed.
    pub fn check(&self) -> Result<()> {
        self.state.lock().failure.clone().map_or(Ok(()), Err)
    }
}
