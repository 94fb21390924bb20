//! All state of the simulated driver, and the lock around it.

use crate::abi::{Counters, Kind, Schedule, Status};
use crate::clock::{Mark, Order};
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

/// The one driver of the process.
pub static DRIVER: LazyLock<SharedDriver> = LazyLock::new(SharedDriver::default);

/// A handle that was never used before, not even before a reset, so that an old
/// one can always be told from a new one. No address looks like it.
pub fn new_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x5100);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// The state between two resets.
#[derive(Debug)]
pub struct Driver {
    /// Counts resets. Threads that belong to an earlier one stop.
    pub epoch: u64,
    /// What the delays depend on.
    pub seed: u64,
    /// When work may run.
    pub schedule: Schedule,
    /// Host threads that wait for work.
    pub waiting: usize,
    /// Pieces of work that may run though no host thread waits.
    pub permits: u64,
    /// Whether `cuInit` was called.
    pub initialized: bool,
    /// The devices with their primary contexts.
    pub devices: Vec<Device>,
    /// Streams by handle, destroyed ones too.
    pub streams: BTreeMap<usize, Stream>,
    /// Events by handle.
    pub events: BTreeMap<usize, Event>,
    /// Loaded modules by handle.
    pub modules: BTreeMap<usize, Module>,
    /// Functions of modules by handle.
    pub functions: BTreeMap<usize, Function>,
    /// When work has run, by stream and number.
    pub finished_at: BTreeMap<(usize, u64), Instant>,
    /// Device memory.
    pub memory: DeviceMemory,
    /// Registered host memory.
    pub pinned: PinnedMemory,
    /// Failures still to come.
    pub faults: Faults,
    /// What is known to come before what.
    pub order: Order,
    /// Work whose stream or event was destroyed.
    pub orphans: Vec<Orphan>,
    /// The counts that are kept here; the rest is counted when asked for.
    pub counters: Counters,
    /// What was found, one text each.
    pub violations: Vec<String>,
    /// The streams' threads.
    pub threads: Vec<JoinHandle<()>>,
}

/// Work whose stream or event was destroyed. CUDA allows that while the work is
/// pending, but somebody must wait for it by other means in the end.
#[derive(Debug)]
pub struct Orphan {
    /// The last work of the stream, or before the event, that uses memory.
    pub mark: Mark,
    /// The context of both.
    pub context: usize,
    /// What happened, in words.
    pub what: &'static str,
}

impl Driver {
    fn new(epoch: u64, seed: u64, initialized: bool) -> Driver {
        Driver {
            epoch,
            seed,
            schedule: Schedule::Random,
            waiting: 0,
            permits: 0,
            initialized,
            devices: (0..DEVICES).map(|_| Device::new()).collect(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            finished_at: BTreeMap::new(),
            memory: DeviceMemory::default(),
            pinned: PinnedMemory::default(),
            faults: Faults::default(),
            order: Order::default(),
            orphans: Vec::new(),
            counters: Counters::default(),
            violations: Vec::new(),
            threads: Vec::new(),
        }
    }

    /// Writes a violation down.
    pub fn report(&mut self, kind: Kind, text: String) {
        self.violations.push(format!("{}: {text}", kind.tag()));
    }

    /// Counts a call that creates something; it may have been told to fail.
    pub fn count_allocation(&mut self) -> Result<(), Status> {
        self.counters.allocations += 1;
        self.faults.allocation()
    }

    /// Whether work may begin to run now.
    pub fn may_run(&self) -> bool {
        self.schedule == Schedule::Random || self.waiting > 0 || self.permits > 0
    }

    /// All counts.
    pub fn count(&self) -> Counters {
        let (registered_bytes, registered_bytes_peak) = self.pinned.bytes();
        Counters {
            faults: self.faults.struck(),
            registered_bytes,
            registered_bytes_peak,
            live_streams: self.created_streams().count() as u64,
            live_events: self.events.len() as u64,
            live_contexts: self.devices.iter().map(|device| device.retained).sum(),
            live_registrations: self.pinned.live() as u64,
            live_allocations: self.memory.live() as u64,
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
            if !self.order.awaited.covers(orphan.mark) && !self.is_lost(orphan.context) {
                let Mark { stream, number } = orphan.mark;
                let text = format!("{}; nobody waited for work {number} of stream {stream}", orphan.what);
                self.report(Kind::WorkLost, text);
            }
        }
    }
}

/// The state behind its lock, and the bell that rings when it changes.
#[derive(Debug)]
pub struct SharedDriver {
    state: Mutex<Driver>,
    changed: Condvar,
}

impl Default for SharedDriver {
    fn default() -> Self {
        SharedDriver { state: Mutex::new(Driver::new(0, 0, false)), changed: Condvar::new() }
    }
}

impl SharedDriver {
    /// The state. A thread that panicked with it has not made it unusable.
    pub fn lock(&self) -> MutexGuard<'_, Driver> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all who wait for a change.
    pub fn announce(&self) {
        self.changed.notify_all();
    }

    /// Sleeps until something may have changed.
    pub fn wait_for_change<'a>(&self, driver: MutexGuard<'a, Driver>) -> MutexGuard<'a, Driver> {
        self.changed.wait(driver).unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until `mark` has run, and lets lazy work run meanwhile.
    ///
    /// # Errors
    /// `Deinitialized` if a reset came first.
    pub fn wait_on_host<'a>(
        &self,
        mut driver: MutexGuard<'a, Driver>,
        mark: Mark,
    ) -> Result<MutexGuard<'a, Driver>, Status> {
        let epoch = driver.epoch;
        driver.waiting += 1;
        self.announce();
        while !driver.order.finished.covers(mark) {
            driver = self.wait_for_change(driver);
            if driver.epoch != epoch {
                return Err(Status::Deinitialized);
            }
        }
        driver.waiting -= 1;
        Ok(driver)
    }

    /// Forgets everything and stops all threads. `cuInit` stays done, as a
    /// program does it only once.
    pub fn reset(&self, seed: u64) {
        let mut driver = self.lock();
        let fresh = Driver::new(driver.epoch + 1, seed, driver.initialized);
        let old = std::mem::replace(&mut *driver, fresh);
        drop(driver);
        self.announce();
        for thread in old.threads {
            // A stream's thread that panicked has no result to lose.
            let _ = thread.join();
        }
    }

    /// Lets all work run, then looks for what is still alive and for work that
    /// nobody waited for. Returns how many violations there are in all.
    pub fn finish(&self) -> usize {
        let mut driver = self.lock();
        let epoch = driver.epoch;
        driver.schedule = Schedule::Random;
        self.announce();
        while driver.epoch == epoch && !driver.is_idle() {
            driver = self.wait_for_change(driver);
        }
        driver.report_leaks();
        driver.report_lost_work();
        driver.violations.len()
    }
}
