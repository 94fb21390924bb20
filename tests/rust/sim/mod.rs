//! Test harness of the simulated CUDA driver. [`Sim`] is exclusive access to the
//! simulator, [`Cuda`] has the calls of the driver with Rust types, and
//! [`gpu::Gpu`] is the GPU state that PyTorch holds during a load.
//!
//! ```ignore
//! let sim = Sim::start(1);
//! // ... calls of the driver, or of code that opens libcuda ...
//! // The end of `sim` fails the test if a violation was reported or a resource is left.
//! ```

#[macro_use]
mod library;
mod cuda;
pub mod cufile;
pub mod gpu;

pub use cuda::Cuda;
pub use fst_simcuda::launch::run_on_host;
pub use fst_simcuda::{abi, random, region};

use abi::{Counters, Fault, Kind, Schedule, Status};
use fst::device;
use fst::error::{self, Result};
use fst::options::{Options, ReaderChoice};
use fst::staging::pool;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// First bytes of a fatbin, which the simulator accepts as the image of the kernels.
pub const FATBIN: [u8; 4] = [0x50, 0xED, 0x55, 0xBA];

/// Options with little staging memory and small chunks, so that small tensors keep every slot busy and become ready one
/// after the other.
pub const TIGHT: Options = Options {
    reader: ReaderChoice::Auto,
    chunk_bytes: 4 << 10,
    request_bytes: 4 << 10,
    staging_bytes: 16 << 10,
    threads: 3,
    queue_depth: 8,
    drop_cache: false,
    leaves_gaps: false,
    shares_disk: false,
};

/// Runs a test with a lazy schedule and with random delays, and asserts that
/// exactly these violations are reported.
pub fn assert_reported(kinds: &[Kind], test: impl Fn(&Sim)) {
    let random: fn(u64) -> Sim = Sim::start;
    for (seed, start) in (0..).zip([Sim::start_lazy, random, random, random]) {
        let sim = start(seed);
        test(&sim);
        let report = sim.finish();
        assert_eq!(report.kinds(), kinds, "seed {seed}: {:#?}", report.violations);
    }
}

/// Runs attempts with a fault at the first such call, at the second, and so on until no call is left to fail, with lazy
/// schedules and with random delays. An attempt calls its second argument when its set-up is complete.
///
/// Asserts that at least `least` calls fail with each schedule, that the error is the fault's, and that only a lack
/// of memory may be no error. Returns the results of the attempts in which a call failed.
pub fn with_fault_at_every_call(
    fault: Fault,
    least: u64,
    attempt: impl Fn(&Sim, &dyn Fn()) -> Result<()>,
) -> Vec<Result<()>> {
    let kind = if fault == Fault::OutOfMemory { error::Kind::OutOfMemory } else { error::Kind::Device };
    let mut results = Vec::new();
    for start in [Sim::start, Sim::start_lazy] {
        for at in 1.. {
            let sim = start(at);
            let result = attempt(&sim, &|| sim.inject(fault, at));
            if sim.counters().faults == 0 {
                assert!(at > least, "only {at} calls");
                result.unwrap();
                break;
            }
            match &result {
                Ok(()) => assert_eq!(fault, Fault::OutOfMemory),
                Err(error) => assert_eq!(error.kind(), kind, "{fault:?}: {error}"),
            }
            results.push(result);
        }
    }
    results
}

/// Waits for exclusive access to the state of the process: the simulator, what fst keeps between loads, the profile and
/// the action of SIGINT.
pub fn exclusive() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    // Ignore poisoning: every test begins with a reset of the state that it uses.
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Exclusive access of one test to the simulator. A process has one simulator.
///
/// Dropping the `Sim` releases what the process keeps between loads, runs all work, and fails the test if a resource is
/// left or a violation was reported.
pub struct Sim {
    pub cuda: Cuda,
    is_finished: bool,
    _lock: MutexGuard<'static, ()>,
}

impl Drop for Sim {
    fn drop(&mut self) {
        if !self.is_finished && !std::thread::panicking() {
            release();
            Report::read().assert_clean();
        }
    }
}

impl Sim {
    /// Waits for exclusive access and resets the simulator. The seed determines the delays.
    pub fn start(seed: u64) -> Sim {
        let lock = exclusive();
        // A test that has failed may have left handles that the reset makes invalid.
        release();
        call!(fst_simcuda::control::sim_reset(seed));
        Cuda.init().expect("cuInit");
        Sim { cuda: Cuda, is_finished: false, _lock: lock }
    }

    /// Like [`Sim::start`], with [`Schedule::Lazy`].
    pub fn start_lazy(seed: u64) -> Sim {
        let sim = Sim::start(seed);
        call!(fst_simcuda::control::sim_schedule(Schedule::Lazy));
        sim
    }

    /// Lets no queued work run until the end of `body`.
    pub fn while_busy<T>(&self, body: impl FnOnce() -> T) -> T {
        call!(fst_simcuda::control::sim_schedule(Schedule::Busy));
        let result = body();
        call!(fst_simcuda::control::sim_schedule(Schedule::Random));
        result
    }

    /// Makes the `at`-th later call of a kind fail, counted from 1.
    pub fn inject(&self, fault: Fault, at: u64) {
        call!(fst_simcuda::control::sim_inject(fault, at));
    }

    /// Returns the counts since the start.
    pub fn counters(&self) -> Counters {
        call!(fst_simcuda::control::sim_counters())
    }

    /// Queues a kernel that fills `bytes` bytes with `value`.
    pub fn launch_write(
        &self,
        stream: usize,
        address: u64,
        bytes: usize,
        value: u8,
    ) -> std::result::Result<(), Status> {
        call!(fst_simcuda::control::sim_launch_write(stream, address, bytes, value)).check()
    }

    /// Queues a kernel that reads `bytes` bytes.
    pub fn launch_read(&self, stream: usize, address: u64, bytes: usize) -> std::result::Result<(), Status> {
        call!(fst_simcuda::control::sim_launch_read(stream, address, bytes)).check()
    }

    /// Returns a context of a device beside the primary one, such as a green context's.
    pub fn other_context(&self, ordinal: i32) -> usize {
        call!(fst_simcuda::control::sim_other_context(ordinal))
    }

    /// Captures a graph on this thread until the end of the test, as a program may do beside a load.
    pub fn capture(&self) {
        call!(fst_simcuda::control::sim_capture());
    }

    /// Copies device memory to the host immediately.
    pub fn read(&self, address: u64, bytes: usize) -> std::result::Result<Vec<u8>, Status> {
        let mut found = vec![0; bytes];
        // SAFETY: `found` has `bytes` bytes.
        unsafe { call!(unsafe fst_simcuda::control::sim_read(address, found.as_mut_ptr(), bytes)) }.check()?;
        Ok(found)
    }

    /// Copies host memory to the device immediately.
    pub fn write(&self, address: u64, bytes: &[u8]) -> std::result::Result<(), Status> {
        // SAFETY: the pointer and the length belong to one slice.
        unsafe { call!(unsafe fst_simcuda::control::sim_write(address, bytes.as_ptr(), bytes.len())) }.check()
    }

    /// Runs all work and returns the violations, without a release of what the process keeps between loads.
    pub fn finish(mut self) -> Report {
        self.is_finished = true;
        Report::read()
    }
}

/// Returns simulators, one at a time: the first runs work as late as possible, the others with random delays. The thread
/// captures a graph meanwhile, which no call of fst may end.
pub fn schedules() -> impl Iterator<Item = Sim> {
    (0..4).map(|seed| {
        let sim = if seed == 0 { Sim::start_lazy(0) } else { Sim::start(seed) };
        sim.capture();
        sim
    })
}

/// Does what `fst.release_memory` does.
pub fn release() {
    pool::release(&|| Ok(())).unwrap();
    device::release();
}

/// Violations that the simulator has reported.
#[derive(Debug)]
pub struct Report {
    pub violations: Vec<String>,
}

impl Report {
    /// Runs all work and returns the violations.
    fn read() -> Report {
        call!(fst_simcuda::control::sim_finish());
        // SAFETY: with a capacity of 0, the function writes nothing.
        let bytes = unsafe { call!(unsafe fst_simcuda::control::sim_violations(std::ptr::null_mut(), 0)) };
        let mut text = vec![0; bytes];
        // SAFETY: `text` has `bytes` bytes.
        unsafe { call!(unsafe fst_simcuda::control::sim_violations(text.as_mut_ptr(), bytes)) };
        let text = String::from_utf8(text).expect("violations are text");
        Report { violations: text.lines().map(str::to_owned).collect() }
    }

    /// Returns the kind of each violation.
    pub fn kinds(&self) -> Vec<Kind> {
        let kind_of = |text: &String| {
            let tag = text.split(':').next().unwrap_or_default();
            Kind::ALL.iter().copied().find(|kind| kind.tag() == tag).unwrap_or_else(|| panic!("unknown kind: {text}"))
        };
        self.violations.iter().map(kind_of).collect()
    }

    /// Asserts that there are no violations.
    pub fn assert_clean(&self) {
        assert!(self.violations.is_empty(), "violations:\n{}", self.violations.join("\n"));
    }
}
