//! Failures requested by a test.

use crate::abi::{Fault, Status};
use crate::stream::Work;
use std::collections::BTreeMap;

/// Outcome of a copy or a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The work runs.
    Runs,
    /// The work is rejected when it is queued.
    Rejected,
    /// The work fails when it runs.
    FailsLater,
}

impl Outcome {
    /// Returns the work to queue: `work`, or its failure.
    pub fn of(self, work: Work) -> Work {
        if self == Outcome::FailsLater { Work::Fail } else { work }
    }
}

/// Requested failures, and the number of those that have occurred.
#[derive(Debug, Default)]
pub struct Faults {
    /// Numbers of the requests, from which counted calls are subtracted.
    planned: BTreeMap<Fault, u64>,
    unpinned_allowed: bool,
    occurred: u64,
}

impl Faults {
    /// Requests `fault` for the `at`-th later call of its kind, counted from 1.
    pub fn plan(&mut self, fault: Fault, at: u64) {
        self.planned.insert(fault, at);
    }

    /// Counts a call that creates an object, and returns a requested failure.
    pub fn allocation(&mut self) -> Result<(), Status> {
        self.check(Fault::OutOfMemory, Status::OutOfMemory)
    }

    /// Counts a registration, which is also a call that creates an object. After a
    /// failed registration the program may copy from memory that is not pinned.
    pub fn pinning(&mut self) -> Result<(), Status> {
        let result = self.allocation().and_then(|()| self.check(Fault::RefusePinning, Status::NotSupported));
        self.unpinned_allowed |= result.is_err();
        result
    }

    /// Counts a copy and returns its outcome.
    pub fn copy(&mut self) -> Outcome {
        self.outcome(Fault::CopyEnqueue, Fault::CopyAsync)
    }

    /// Counts a launch and returns its outcome.
    pub fn launch(&mut self) -> Outcome {
        self.outcome(Fault::LaunchEnqueue, Fault::LaunchAsync)
    }

    fn outcome(&mut self, rejection: Fault, failure: Fault) -> Outcome {
        match (self.occurs(rejection), self.occurs(failure)) {
            (true, _) => Outcome::Rejected,
            (false, true) => Outcome::FailsLater,
            (false, false) => Outcome::Runs,
        }
    }

    /// Counts a load of a module, which is also a call that creates an object.
    pub fn module(&mut self, is_fatbin: bool) -> Result<(), Status> {
        self.allocation()?;
        if is_fatbin {
            self.check(Fault::RefuseFatbins, Status::InvalidImage)?;
        }
        self.check(Fault::RefuseModules, Status::NoBinaryForGpu)?;
        self.check(Fault::ModulesPass, Status::Unknown)
    }

    /// Returns whether a copy may use memory that is not pinned.
    pub fn unpinned_allowed(&self) -> bool {
        self.unpinned_allowed
    }

    /// Returns the number of requested failures that have occurred.
    pub fn occurred(&self) -> u64 {
        self.occurred
    }

    fn check(&mut self, fault: Fault, error: Status) -> Result<(), Status> {
        if self.occurs(fault) { Err(error) } else { Ok(()) }
    }

    /// Counts a call and returns whether the fault occurs.
    fn occurs(&mut self, fault: Fault) -> bool {
        let Some(left) = self.planned.get_mut(&fault) else {
            return false;
        };
        let occurs = match fault {
            Fault::RefusePinning | Fault::RefuseModules | Fault::RefuseFatbins => true,
            Fault::ModulesPass => *left > 0,
            _ => *left == 1,
        };
        *left = left.saturating_sub(1);
        self.occurred += u64::from(occurs);
        occurs
    }
}
