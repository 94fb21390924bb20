//! State of the simulated driver, and the lock that protects it.

use crate::abi::{Counters, Kind, Schedule, Status};
use crate::capture::Capture;
use crate::clock::{Order, WorkId};
use crate::context::{DEVICES, Device};
use crate::event::Event;
use crate::fault::Faults;
use crate::host::PinnedMemory;
use crate::memory::DeviceMemory;
use crate::module::{Function, Module};
use crate::stream::Stream;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Driver of the process.
pub static DRIVER: LazyLock<SharedDriver> = LazyLock::new(SharedDriver::default);

/// Returns a new handle. Handles are unique across resets, so that a stale handle
/// is always detected, and never equal an address.
pub fn new_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x5100);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// State of the driver between two resets.
#[derive(Debug, Default)]
pub struct Driver {
    /// Number of resets. Threads of an earlier epoch stop.
    pub epoch: u64,
    /// Seed of the random delays.
    pub seed: u64,
    /// Schedule of queued work.
    pub schedule: Schedule,
    /// Number of host threads that wait for work.
    pub waiting: usize,
    /// Number of work items that may run although no host thread waits.
    pub permits: u64,
    /// Whether `cuInit` was called.
    pub initialized: bool,
    /// Devices with their primary contexts.
    pub devices: [Device; DEVICES],
    /// Streams by handle, including destroyed streams.
    pub streams: BTreeMap<usize, Stream>,
    /// Captures that have not ended.
    pub captures: Vec<Capture>,
    /// Events by handle.
    pub events: BTreeMap<usize, Event>,
    /// Loaded modules by handle.
    pub modules: BTreeMap<usize, Module>,
    /// Functions of modules by handle.
    pub functions: BTreeMap<usize, Function>,
    /// Completion times of work, by stream and number.
    pub finished_at: BTreeMap<(usize, u64), Instant>,
    /// Device memory.
    pub memory: DeviceMemory,
    /// Registered host memory.
    pub pinned: PinnedMemory,
    /// Requested failures that have not occurred.
    pub faults: Faults,
    /// Happens-before state.
    pub order: Order,
    /// Work whose stream or event was destroyed.
    pub orphans: Vec<Orphan>,
    /// Counts that calls update. [`Driver::count`] adds the others.
    pub counters: Counters,
    /// Stream of the last copy.
    pub last_copy: Option<usize>,
    /// Texts of the violations.
    pub violations: Vec<String>,
    /// Threads of the streams.
    pub threads: Vec<JoinHandle<()>>,
}

/// Work whose stream or event was destroyed. CUDA allows the destruction while the
/// work is pending, but the program must wait for the work in another way.
#[derive(Debug)]
pub struct Orphan {
    /// Last work of the stream, or before the event, that uses memory.
    pub id: WorkId,
    /// Context of the stream or event.
    pub context: usize,
    /// Description of the destruction.
    pub cause: &'static str,
}

impl Driver {
    /// Records a violation.
    pub fn report(&mut self, kind: Kind, text: String) {
        self.violations.push(format!("{}: {text}", kind.tag()));
    }

    /// Counts a call that creates an object, and returns an injected failure.
    pub fn count_allocation(&mut self) -> Result<(), Status> {
        self.counters.allocations += 1;
        self.faults.allocation()
    }

    /// Returns whether work may start to run.
    pub fn may_run(&self) -> bool {
        match self.schedule {
            Schedule::Random => true,
            Schedule::Lazy => self.waiting > 0 || self.permits > 0,
            Schedule::Busy => false,
        }
    }

    /// Returns all counts.
    pub fn count(&self) -> Counters {
        let (registered_bytes, registered_bytes_peak) = self.pinned.bytes();
        Counters {
            faults: self.faults.occurred(),
            registered_bytes,
            registered_bytes_peak,
            live_streams: self.created_streams().count() as u64,
            live_events: self.events.len() as u64,
            live_contexts: self.devices.iter().map(|device| device.retained).sum(),
            live_registrations: self.pinned.live() as u64,
            live_modules: self.modules.len() as u64,
            ..self.counters
        }
    }

    fn report_leaks(&mut self) {
        let mut leaks = self.pinned.leaks();
        leaks.extend(self.created_streams().map(|handle| format!("stream {handle:#x} was not destroyed")));
        leaks.extend(self.events.keys().map(|handle| format!("event {handle:#x} was not destroyed")));
        let retained = self.devices.iter().enumerate().filter(|(_, device)| device.retained > 0);
        leaks.extend(
            retained
                .map(|(i, device)| format!("the context of device {i} is still retained {} times", device.retained)),
        );
        for text in leaks {
            self.report(Kind::Leak, text);
        }
    }

    fn report_lost_work(&mut self) {
        for orphan in std::mem::take(&mut self.orphans) {
            if !self.order.awaited.covers(orphan.id) && !self.is_lost(orphan.context) {
                let WorkId { stream, number } = orphan.id;
                let text = format!("{}; the program never waited for work {number} of stream {stream}", orphan.cause);
                self.report(Kind::WorkLost, text);
            }
        }
    }
}

/// Lock of the driver, and condition variable for changes of its state.
#[derive(Debug, Default)]
pub struct SharedDriver {
    state: Mutex<Driver>,
    changed: Condvar,
}

impl SharedDriver {
    /// Locks the driver. Ignores poisoning, because the state stays valid when a thread panics.
    pub fn lock(&self) -> MutexGuard<'_, Driver> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all threads that wait for a change.
    pub fn notify_all(&self) {
        self.changed.notify_all();
    }

    /// Blocks until the state may have changed.
    pub fn wait_for_change<'a>(&self, driver: MutexGuard<'a, Driver>) -> MutexGuard<'a, Driver> {
        self.changed.wait(driver).unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until `id` has run. Lazily scheduled work may run meanwhile.
    ///
    /// # Errors
    /// `Deinitialized` after a reset.
    pub fn wait_on_host<'a>(
        &self,
        mut driver: MutexGuard<'a, Driver>,
        id: WorkId,
    ) -> Result<MutexGuard<'a, Driver>, Status> {
        let epoch = driver.epoch;
        driver.waiting += 1;
        self.notify_all();
        while !driver.order.finished.covers(id) {
            driver = self.wait_for_change(driver);
            if driver.epoch != epoch {
                return Err(Status::Deinitialized);
            }
        }
        driver.waiting -= 1;
        Ok(driver)
    }

    /// Resets the state and stops all threads. The driver stays initialized,
    /// because a program calls `cuInit` only once.
    pub fn reset(&self, seed: u64) {
        let mut driver = self.lock();
        let (epoch, initialized) = (driver.epoch + 1, driver.initialized);
        let new = Driver { epoch, seed, initialized, ..Driver::default() };
        let old = std::mem::replace(&mut *driver, new);
        drop(driver);
        self.notify_all();
        for thread in old.threads {
            // The thread of a stream has no result, so a panic is ignored.
            let _ = thread.join();
        }
    }

    /// Runs all work, and reports leaks and work without a wait. Returns the total
    /// number of violations.
    pub fn finish(&self) -> usize {
        let mut driver = self.lock();
        let epoch = driver.epoch;
        driver.schedule = Schedule::Random;
        self.notify_all();
        while driver.epoch == epoch && !driver.is_idle() {
            driver = self.wait_for_change(driver);
        }
        driver.report_leaks();
        driver.report_lost_work();
        driver.violations.len()
    }
}
