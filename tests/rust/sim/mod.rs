//! The simulated CUDA driver as the tests see it: [`Sim`] is one test's turn
//! with it, [`Cuda`] its driver calls with Rust's types, and [`gpu::Gpu`] what
//! PyTorch would hold while it asks fst for tensors.
//!
//! ```ignore
//! let sim = Sim::start(1);
//! // ... calls of the driver, or of code that opens libcuda ...
//! sim.finish().assert_clean();
//! ```

#![allow(dead_code, reason = "each test program uses its own part of this")]
#![allow(clippy::expect_used, clippy::panic, reason = "a harness that cannot go on ends the test")]

#[path = "../../simcuda/src/abi.rs"]
pub mod abi;
mod cuda;
pub mod cufile;
pub mod gpu;
mod library;
#[path = "../../simcuda/src/random.rs"]
pub mod random;

pub use cuda::Cuda;

use abi::{Counters, Fault, Kind, Schedule, Status};
use library::LIBRARY;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One test's turn. There is one simulator in a process, so tests take turns.
pub struct Sim {
    pub cuda: Cuda,
    _turn: MutexGuard<'static, ()>,
}

impl Sim {
    /// Waits for its turn and begins anew; the seed decides the delays.
    pub fn start(seed: u64) -> Sim {
        static TURN: Mutex<()> = Mutex::new(());
        // A test that failed in its turn leaves nothing behind that the reset does not clear.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: takes any number.
        unsafe { (LIBRARY.sim_reset)(seed) };
        let cuda = Cuda(&LIBRARY);
        cuda.init().expect("cuInit");
        Sim { cuda, _turn: turn }
    }

    /// As [`Sim::start`], with work that runs as late as it can: only when somebody waits.
    pub fn start_lazy(seed: u64) -> Sim {
        let sim = Sim::start(seed);
        // SAFETY: takes any schedule.
        unsafe { (LIBRARY.sim_schedule)(Schedule::Lazy) };
        sim
    }

    /// Makes the `at`-th call of a sort fail, counted from 1 and from now.
    pub fn inject(&self, fault: Fault, at: u64) {
        // SAFETY: takes any fault and number.
        unsafe { (LIBRARY.sim_inject)(fault, at) };
    }

    /// What has happened since the start.
    pub fn counters(&self) -> Counters {
        // SAFETY: only asks.
        unsafe { (LIBRARY.sim_counters)() }
    }

    /// Queues a kernel that fills `bytes` bytes, as if somebody still used them.
    pub fn launch_write(&self, stream: usize, address: u64, bytes: usize, value: u8) -> Result<(), Status> {
        // SAFETY: the simulator checks everything.
        unsafe { (LIBRARY.sim_launch_write)(stream, address, bytes, value) }.check()
    }

    /// Queues a kernel that reads, as the caller of a load would.
    pub fn launch_read(&self, stream: usize, address: u64, bytes: usize) -> Result<(), Status> {
        // SAFETY: the simulator checks everything.
        unsafe { (LIBRARY.sim_launch_read)(stream, address, bytes) }.check()
    }

    /// Says that a graph captures the stream from now on, or that none does.
    pub fn capture(&self, stream: usize, capturing: bool) -> Result<(), Status> {
        // SAFETY: takes any handle.
        unsafe { (LIBRARY.sim_capture)(stream, capturing) }.check()
    }

    /// Device memory as the host would see it now.
    pub fn read(&self, address: u64, bytes: usize) -> Result<Vec<u8>, Status> {
        let mut found = vec![0; bytes];
        // SAFETY: `found` is that long.
        unsafe { (LIBRARY.sim_read)(address, found.as_mut_ptr(), bytes) }.check()?;
        Ok(found)
    }

    /// Changes device memory from the host.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Status> {
        // SAFETY: the slice is that long.
        unsafe { (LIBRARY.sim_write)(address, bytes.as_ptr(), bytes.len()) }.check()
    }

    /// Lets all work run and ends the turn with what was found.
    pub fn finish(self) -> Report {
        // SAFETY: only asks.
        unsafe { (LIBRARY.sim_finish)() };
        // SAFETY: without room, nothing is written.
        let bytes = unsafe { (LIBRARY.sim_violations)(std::ptr::null_mut(), 0) };
        let mut text = vec![0; bytes];
        // SAFETY: `text` is that long.
        unsafe { (LIBRARY.sim_violations)(text.as_mut_ptr(), bytes) };
        let text = String::from_utf8(text).expect("violations are text");
        Report { violations: text.lines().map(str::to_owned).collect() }
    }
}

/// Runs the scatter kernel's code on host memory.
///
/// # Safety
/// `tasks` is a table of the kernel whose addresses are the host's, of memory of the lengths that they say.
pub unsafe fn scatter_on_host(tasks: &[u8], task_count: u32, tile_count: u32, grid: [u32; 2]) {
    // SAFETY: the caller promises it.
    unsafe { (LIBRARY.sim_scatter)(tasks.as_ptr(), task_count, tile_count, grid[0], grid[1]) };
}

/// What the simulator has found.
#[derive(Debug)]
pub struct Report {
    pub violations: Vec<String>,
}

impl Report {
    /// The kind of each violation.
    pub fn kinds(&self) -> Vec<Kind> {
        let kind_of = |text: &String| {
            let tag = text.split(':').next().unwrap_or_default();
            Kind::ALL.iter().copied().find(|kind| kind.tag() == tag).unwrap_or_else(|| panic!("no kind: {text}"))
        };
        self.violations.iter().map(kind_of).collect()
    }

    /// Fails the test if there is any.
    pub fn assert_clean(&self) {
        assert!(self.violations.is_empty(), "the driver found:\n{}", self.violations.join("\n"));
    }
}

impl Status {
    /// As Rust has it.
    pub fn check(self) -> Result<(), Status> {
        if self == Status::Success { Ok(()) } else { Err(self) }
    }
}
