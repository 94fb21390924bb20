//! Failures requested by a test.

use crate::abi::{Fault, Status};

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

/// Requested failures that have not occurred, and the number of those that have.
#[derive(Debug, Default)]
pub struct Faults {
    out_of_memory: Countdown,
    copy_enqueue: Countdown,
    copy_async: Countdown,
    module_load: Countdown,
    passing_modules: u64,
    refuse_modules: bool,
    refuse_fatbins: bool,
    launch_enqueue: Countdown,
    launch_async: Countdown,
    refuse_pinning: bool,
    unpinned_allowed: bool,
    occurred: u64,
}

impl Faults {
    /// Requests `fault` for the `at`-th later call of its kind, counted from 1.
    pub fn plan(&mut self, fault: Fault, at: u64) {
        match fault {
            Fault::OutOfMemory => self.out_of_memory = Countdown(at),
            Fault::CopyEnqueue => self.copy_enqueue = Countdown(at),
            Fault::CopyAsync => self.copy_async = Countdown(at),
            Fault::RefusePinning => self.refuse_pinning = true,
            Fault::ModuleLoad => self.module_load = Countdown(at),
            Fault::ModulesPass => self.passing_modules = at,
            Fault::RefuseModules => self.refuse_modules = true,
            Fault::RefuseFatbins => self.refuse_fatbins = true,
            Fault::LaunchEnqueue => self.launch_enqueue = Countdown(at),
            Fault::LaunchAsync => self.launch_async = Countdown(at),
        }
    }

    /// Counts a call that creates an object, and returns a requested failure.
    pub fn allocation(&mut self) -> Result<(), Status> {
        if self.out_of_memory.count_call() {
            self.occurred += 1;
            return Err(Status::OutOfMemory);
        }
        Ok(())
    }

    /// Counts a registration, which is also a call that creates an object. After a
    /// failed registration the program may copy from memory that is not pinned.
    pub fn pinning(&mut self) -> Result<(), Status> {
        let mut result = self.allocation();
        if result.is_ok() && self.refuse_pinning {
            self.occurred += 1;
            result = Err(Status::NotSupported);
        }
        self.unpinned_allowed |= result.is_err();
        result
    }

    /// Counts a copy and returns its outcome.
    pub fn copy(&mut self) -> Outcome {
        let (rejected, fails) = (self.copy_enqueue.count_call(), self.copy_async.count_call());
        self.outcome(rejected, fails)
    }

    /// Counts a launch and returns its outcome.
    pub fn launch(&mut self) -> Outcome {
        let (rejected, fails) = (self.launch_enqueue.count_call(), self.launch_async.count_call());
        self.outcome(rejected, fails)
    }

    fn outcome(&mut self, rejected: bool, fails: bool) -> Outcome {
        self.occurred += u64::from(rejected) + u64::from(fails);
        match (rejected, fails) {
            (true, _) => Outcome::Rejected,
            (false, true) => Outcome::FailsLater,
            (false, false) => Outcome::Runs,
        }
    }

    /// Counts a load of a module, which is also a call that creates an object.
    pub fn module(&mut self, is_fatbin: bool) -> Result<(), Status> {
        self.allocation()?;
        if self.refuse_fatbins && is_fatbin {
            self.occurred += 1;
            return Err(Status::InvalidImage);
        }
        if self.module_load.count_call() || self.refuse_modules {
            self.occurred += 1;
            return Err(Status::NoBinaryForGpu);
        }
        if self.passing_modules > 0 {
            self.passing_modules -= 1;
            self.occurred += 1;
            return Err(Status::Unknown);
        }
        Ok(())
    }

    /// Returns whether a copy may use memory that is not pinned.
    pub fn unpinned_allowed(&self) -> bool {
        self.unpinned_allowed
    }

    /// Returns the number of requested failures that have occurred.
    pub fn occurred(&self) -> u64 {
        self.occurred
    }
}

/// Number of calls up to and including the call that fails, or 0 without a requested failure.
#[derive(Debug, Default)]
struct Countdown(u64);

impl Countdown {
    /// Counts one call and returns whether the call fails.
    fn count_call(&mut self) -> bool {
        let fails = self.0 == 1;
        self.0 = self.0.saturating_sub(1);
        fails
    }
}
