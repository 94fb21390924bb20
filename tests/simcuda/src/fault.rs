//! Failures that a test asked for.

use crate::abi::{Fault, Status};

/// What becomes of a copy or a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It runs.
    Runs,
    /// It is refused when it is queued.
    Refused,
    /// It fails when it runs.
    FailsLater,
}

/// Which calls are still to fail.
#[derive(Debug, Default)]
pub struct Faults {
    out_of_memory: Countdown,
    copy_enqueue: Countdown,
    copy_async: Countdown,
    module_load: Countdown,
    launch_enqueue: Countdown,
    launch_async: Countdown,
    refuse_pinning: bool,
    unpinned_allowed: bool,
    struck: u64,
}

impl Faults {
    /// Plans `fault` for the `at`-th such call from now, counted from 1.
    pub fn plan(&mut self, fault: Fault, at: u64) {
        match fault {
            Fault::OutOfMemory => self.out_of_memory = Countdown(at),
            Fault::CopyEnqueue => self.copy_enqueue = Countdown(at),
            Fault::CopyAsync => self.copy_async = Countdown(at),
            Fault::RefusePinning => self.refuse_pinning = true,
            Fault::ModuleLoad => self.module_load = Countdown(at),
            Fault::LaunchEnqueue => self.launch_enqueue = Countdown(at),
            Fault::LaunchAsync => self.launch_async = Countdown(at),
        }
    }

    /// Every call that creates something passes here.
    pub fn allocation(&mut self) -> Result<(), Status> {
        if self.out_of_memory.strikes() {
            self.struck += 1;
            return Err(Status::OutOfMemory);
        }
        Ok(())
    }

    /// A registration is also a thing created. Once one was refused, the
    /// program has no choice but to copy from memory that is not pinned.
    pub fn pinning(&mut self) -> Result<(), Status> {
        let mut verdict = self.allocation();
        if verdict.is_ok() && self.refuse_pinning {
            self.struck += 1;
            verdict = Err(Status::NotSupported);
        }
        self.unpinned_allowed |= verdict.is_err();
        verdict
    }

    /// Every copy passes here.
    pub fn copy(&mut self) -> Fate {
        let (refused, fails) = (self.copy_enqueue.strikes(), self.copy_async.strikes());
        self.fate(refused, fails)
    }

    /// Every launch passes here.
    pub fn launch(&mut self) -> Fate {
        let (refused, fails) = (self.launch_enqueue.strikes(), self.launch_async.strikes());
        self.fate(refused, fails)
    }

    fn fate(&mut self, refused: bool, fails: bool) -> Fate {
        self.struck += u64::from(refused) + u64::from(fails);
        match (refused, fails) {
            (true, _) => Fate::Refused,
            (false, true) => Fate::FailsLater,
            (false, false) => Fate::Runs,
        }
    }

    /// A module is also a thing created.
    pub fn module(&mut self) -> Result<(), Status> {
        self.allocation()?;
        if self.module_load.strikes() {
            self.struck += 1;
            return Err(Status::NoBinaryForGpu);
        }
        Ok(())
    }

    /// Whether a copy may come from memory that is not pinned.
    pub fn unpinned_allowed(&self) -> bool {
        self.unpinned_allowed
    }

    /// How many planned failures have happened.
    pub fn struck(&self) -> u64 {
        self.struck
    }
}

/// Calls left until the one that fails; 0 when none is to fail.
#[derive(Debug, Default)]
struct Countdown(u64);

impl Countdown {
    fn strikes(&mut self) -> bool {
        let strikes = self.0 == 1;
        self.0 = self.0.saturating_sub(1);
        strikes
    }
}
