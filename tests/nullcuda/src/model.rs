//! Model of the time that a driver and its GPU take, in real time that is stretched by a factor.
//!
//! A resource that one user has at a time is the moment from which it is free: the lock of the driver, the copy engine,
//! and that of the kernel's memory management, under which pages are made and registered. A call reserves the resource from the later of this moment and
//! now, and its thread then sleeps until its reservation ends. A thread that wakes up late counts as on time for the
//! next call, so that a busy machine does not add its delays up.
//!
//! Copies are served in the order in which they are queued.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

/// Unit in which the model knows whether pages exist, in bytes.
const PAGES_BYTES: usize = 64 << 10;
const PAGE_BYTES: f64 = 4096.0;
/// Longest delay of a thread that the model forgives, in nanoseconds.
const LATE_MAX: u64 = 3_000_000;

macro_rules! costs {
    ($($name:ident)*) => {
        /// Parameters of the model, which `benches/h100.toml` describes. Times are the machine's, not stretched.
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        #[allow(missing_docs, reason = "described in the file")]
        pub struct Costs {
            /// Factor by which all times are stretched.
            pub scale: f64,
            $(pub $name: f64,)*
        }

        impl Costs {
            /// Returns the parameter with this name.
            pub fn by_name(&mut self, name: &str) -> Option<&mut f64> {
                match name { $(stringify!($name) => Some(&mut self.$name),)* _ => None }
            }
        }
    };
}

costs! {
    link_gbps dead_same_us dead_other_us dead_event_us
    copy_us record_us query_us stream_wait_us launch_us
    pin_us pin_page_us page_us malloc_us module_us stream_us event_us
    wake_us kernel_us kernel_gbps reader_gbps readers_gbps
    load_us empty_us result_us thread_us dram_gbps cache_mib near_us far_gbps
}

/// Use of a resource.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Kind {
    // Calls under the driver's lock.
    Copy,
    Record,
    Query,
    StreamWait,
    Launch,
    Pin,
    Malloc,
    Module,
    Create,
    // The thread waits for an event.
    Wait,
    // Work of the thread.
    Read,
    Host,
    // The copy engine.
    Dead,
    Transfer,
    // A copy is queued, but the stream has earlier work.
    Order,
}

impl Kind {
    /// Returns whether the driver's lock is held.
    pub fn is_call(self) -> bool {
        self as u32 <= Kind::Create as u32
    }
}

/// One use of a resource, in stretched nanoseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The use.
    pub kind: Kind,
    /// Number of the thread.
    pub thread: u32,
    /// Time of the call.
    pub asked: u64,
    /// Time from which the resource was used.
    pub begin: u64,
    /// Time until which it was used.
    pub end: u64,
    /// Bytes of a copy, of a read or of registered memory; the stream of dead time.
    pub bytes: usize,
}

#[derive(Default)]
struct State {
    costs: Costs,
    spans: Vec<Span>,
    memory_free: u64,
    engine_free: u64,
    engine_stream: usize,
    /// Whether an event with `BLOCKING_SYNC` was recorded since the last copy.
    is_after_event: bool,
    streams: HashMap<usize, Stream>,
    /// Time at which the work before an event is done.
    events: HashMap<usize, u64>,
    blocking_events: HashSet<usize>,
    /// Numbers of the units of memory whose pages exist.
    pages: HashSet<usize>,
    readers: usize,
    /// Numbers of the units of memory into which files were read.
    slots: HashSet<usize>,
}

#[derive(Clone, Copy, Default)]
struct Stream {
    /// Time at which all queued work is done.
    tail: u64,
    copied_bytes: usize,
}

static IS_ON: AtomicBool = AtomicBool::new(false);
/// Time from which the driver's lock is free, perhaps in memory that the processes of several ranks share.
static LOCK_FREE: AtomicPtr<AtomicU64> = AtomicPtr::new(&raw const OWN_LOCK_FREE as *mut AtomicU64);
static OWN_LOCK_FREE: AtomicU64 = AtomicU64::new(0);
/// Time until which the host's memory is busy, perhaps in memory that the processes of several ranks share. Reads pass bytes
/// twice (from the page cache to a slot), and copies and new pages once.
static DRAM_FREE: AtomicPtr<AtomicU64> = AtomicPtr::new(&raw const OWN_DRAM_FREE as *mut AtomicU64);
static OWN_DRAM_FREE: AtomicU64 = AtomicU64::new(0);
/// Value of [`LOCK_FREE`] or [`DRAM_FREE`] while a process changes it.
const CHANGING: u64 = u64::MAX;
static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

thread_local! {
    static LATE: Cell<u64> = const { Cell::new(0) };
    /// Whether the thread has moved near the GPU.
    static IS_NEAR: Cell<bool> = const { Cell::new(false) };
    static THREAD: u32 = {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// Time that all processes have in common.
fn clock() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Reserves the driver's lock from a time on. `hold` returns the end of the reservation that begins at its argument. Returns
/// both.
fn reserve_lock(asked: u64, hold: impl FnOnce(u64) -> u64) -> (u64, u64) {
    reserve(&LOCK_FREE, asked, hold)
}

/// Reserves a resource, which is free from a shared time on, as [`reserve_lock`] does.
fn reserve(free: &AtomicPtr<AtomicU64>, asked: u64, hold: impl FnOnce(u64) -> u64) -> (u64, u64) {
    // SAFETY: the pointer points to a static value, or to memory that stays mapped.
    let free = unsafe { &*free.load(Ordering::Relaxed) };
    let begin = loop {
        match free.swap(CHANGING, Ordering::Acquire) {
            CHANGING => thread::yield_now(),
            time => break asked.max(time),
        }
    };
    let end = hold(begin);
    free.store(end, Ordering::Release);
    (begin, end)
}

/// Time of this thread, had it never woken up late.
fn now() -> u64 {
    clock().saturating_sub(LATE.get())
}

/// Sleeps until a time.
fn sleep_until(end: u64) {
    // Not `sleep`, whose time the benchmark stretches.
    while let early @ 1.. = end.saturating_sub(clock()) {
        thread::park_timeout(Duration::from_nanos(early));
    }
    LATE.set(clock().saturating_sub(end).min(LATE_MAX));
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Returns the stretched nanoseconds of microseconds.
    fn time(&self, us: f64) -> u64 {
        (us * 1e3 * self.costs.scale) as u64
    }

    /// Returns the stretched nanoseconds of bytes at a rate in GB/s.
    fn time_of(&self, bytes: usize, gbps: f64) -> u64 {
        self.time(bytes as f64 / gbps / 1e3)
    }

    /// Takes memory bandwidth for bytes that pass `times` times, from a time on. Returns the time at which they have passed.
    fn pass(&self, from: u64, bytes: usize, times: f64) -> u64 {
        if self.costs.dram_gbps == 0.0 || times == 0.0 {
            return from;
        }
        let taken = self.time_of(bytes, self.costs.dram_gbps / times);
        reserve(&DRAM_FREE, from, |begin| begin + taken).1
    }

    /// Returns the share of the bytes in slots that leave the cache before a copy reads them, or `None` for a model without a
    /// cache. Slots take turns.
    fn missed_share(&self) -> Option<f64> {
        let slots_mib = (self.slots.len() * PAGES_BYTES) as f64 / f64::from(1 << 20);
        (self.costs.cache_mib > 0.0).then(|| (1.0 - self.costs.cache_mib / slots_mib).max(0.0))
    }

    fn push(&mut self, kind: Kind, asked: u64, begin: u64, end: u64, bytes: usize) {
        if end > begin {
            self.spans.push(Span { kind, thread: THREAD.with(|thread| *thread), asked, begin, end, bytes });
        }
    }

    /// Reserves the driver's lock. Returns the end of the call.
    fn call(&mut self, kind: Kind, us: f64) -> u64 {
        let asked = now();
        let (begin, end) = reserve_lock(asked, |begin| begin + self.time(us));
        self.push(kind, asked, begin, end, 0);
        end
    }

    /// Makes the pages of memory that do not exist, and spends `us` on each, all under the lock of the kernel's memory
    /// management, from a time on. Returns the end.
    fn visit_pages(&mut self, from: u64, address: usize, bytes: usize, us: f64) -> u64 {
        let units = address / PAGES_BYTES..(address + bytes).div_ceil(PAGES_BYTES);
        let absent_bytes = units.filter(|unit| self.pages.insert(*unit)).count() * PAGES_BYTES;
        let spent = (absent_bytes as f64 * self.costs.page_us + bytes as f64 * us) / PAGE_BYTES;
        if spent == 0.0 {
            return from;
        }
        let begin = from.max(self.memory_free);
        self.memory_free = (begin + self.time(spent)).max(self.pass(begin, absent_bytes, 1.0));
        self.memory_free
    }
}

/// Runs `reserve` if a model is in use, and sleeps until the time that it returns.
fn spend(reserve: impl FnOnce(&mut State) -> u64) {
    if IS_ON.load(Ordering::Relaxed) {
        let end = reserve(&mut state());
        sleep_until(end);
    }
}

/// Calls the driver without further effect.
pub(crate) fn call(kind: Kind, cost: impl FnOnce(&Costs) -> f64) {
    spend(|state| state.call(kind, cost(&state.costs)));
}

pub(crate) fn create_event(event: usize, flags: u32) {
    if flags & 1 != 0 {
        state().blocking_events.insert(event);
    }
    call(Kind::Create, |costs| costs.event_us);
}

pub(crate) fn copy(stream: usize, bytes: usize) {
    spend(|state| {
        let called = state.call(Kind::Copy, state.costs.copy_us);
        let ready = called.max(state.streams.entry(stream).or_default().tail);
        state.push(Kind::Order, called, called, ready, 0);
        let Costs { dead_same_us, dead_other_us, dead_event_us, .. } = state.costs;
        let dead_us = if state.engine_stream == stream { dead_same_us } else { dead_other_us };
        let dead_us = dead_us + if state.is_after_event { dead_event_us } else { 0.0 };
        let begin = ready.max(state.engine_free);
        let moves = begin + state.time(dead_us);
        let end = (moves + state.time_of(bytes, state.costs.link_gbps)).max(state.pass(
            moves,
            bytes,
            state.missed_share().unwrap_or(1.0),
        ));
        state.push(Kind::Dead, called, begin, moves, stream);
        state.push(Kind::Transfer, called, moves, end, bytes);
        (state.engine_free, state.engine_stream, state.is_after_event) = (end, stream, false);
        state.streams.insert(stream, Stream { tail: end, copied_bytes: bytes });
        called
    });
}

pub(crate) fn launch(stream: usize) {
    spend(|state| {
        let called = state.call(Kind::Launch, state.costs.launch_us);
        let Stream { tail, copied_bytes } = state.streams.get(&stream).copied().unwrap_or_default();
        let ran = state.time(state.costs.kernel_us) + state.time_of(copied_bytes, state.costs.kernel_gbps);
        state.streams.insert(stream, Stream { tail: called.max(tail) + ran, copied_bytes });
        called
    });
}

pub(crate) fn record(event: usize, stream: usize) {
    spend(|state| {
        let called = state.call(Kind::Record, state.costs.record_us);
        let done = state.streams.get(&stream).map_or(called, |stream| stream.tail.max(called));
        state.events.insert(event, done);
        state.is_after_event |= state.blocking_events.contains(&event);
        called
    });
}

pub(crate) fn stream_wait(stream: usize, event: usize) {
    spend(|state| {
        let done = state.events.get(&event).copied().unwrap_or(0);
        let entry = state.streams.entry(stream).or_default();
        entry.tail = entry.tail.max(done);
        state.call(Kind::StreamWait, state.costs.stream_wait_us)
    });
}

/// Returns whether the work before an event is done, or `None` without a model.
pub(crate) fn query(event: usize) -> Option<bool> {
    let mut is_done = None;
    spend(|state| {
        let called = state.call(Kind::Query, state.costs.query_us);
        is_done = Some(state.events.get(&event).is_none_or(|done| *done <= called));
        called
    });
    is_done
}

pub(crate) fn wait(event: usize) {
    spend(|state| {
        let (asked, done) = (now(), state.events.get(&event).copied().unwrap_or(0));
        if done <= asked {
            return asked;
        }
        let end = done + state.time(state.costs.wake_us);
        state.push(Kind::Wait, asked, asked, end, 0);
        end
    });
}

pub(crate) fn pin(address: usize, bytes: usize) {
    spend(|state| {
        let asked = now();
        let us = state.costs.pin_page_us;
        let (begin, end) =
            reserve_lock(asked, |begin| state.visit_pages(begin, address, bytes, us) + state.time(state.costs.pin_us));
        state.push(Kind::Pin, asked, begin, end, bytes);
        end
    });
}

/// Forgets the pages of memory that the process frees next.
pub(crate) fn unpin(address: usize) {
    // Registrations are at most a slot long, and slots lie apart.
    let mut state = state();
    let mut unit = address / PAGES_BYTES;
    while state.pages.remove(&unit) {
        unit += 1;
    }
}

/// Makes all processes that pass the same two values share the driver's lock and the host's memory.
///
/// # Safety
/// `shared` points to two values that stay valid, and are zero at first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn timed_share(shared: *mut AtomicU64) {
    LOCK_FREE.store(shared, Ordering::Relaxed);
    DRAM_FREE.store(shared.wrapping_add(1), Ordering::Relaxed);
}

/// Starts a recording, from now on with these costs.
///
/// # Safety
/// `costs` points to costs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn timed_start(costs: *const Costs) {
    let mut state = state();
    // SAFETY: the caller's promise.
    state.costs = unsafe { *costs };
    state.spans.clear();
    state.slots.clear();
    LATE.set(0);
    IS_ON.store(true, Ordering::Relaxed);
}

/// Ends a recording. From now on, all calls take no time.
#[unsafe(no_mangle)]
pub extern "C" fn timed_stop() {
    IS_ON.store(false, Ordering::Relaxed);
}

/// Returns the spans of the last recording, which are valid until the next one.
///
/// # Safety
/// `count` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn timed_spans(count: *mut usize) -> *const Span {
    let state = state();
    // SAFETY: the caller's promise.
    unsafe { count.write(state.spans.len()) };
    state.spans.as_ptr()
}

/// Returns the time of this thread in stretched nanoseconds.
#[unsafe(no_mangle)]
pub extern "C" fn timed_now() -> u64 {
    now()
}

/// Spends time of the host.
#[unsafe(no_mangle)]
pub extern "C" fn timed_host(us: f64) {
    spend(|state| {
        let begin = now();
        let end = begin + state.time(us);
        state.push(Kind::Host, begin, begin, end, 0);
        end
    });
}

/// Sleeps.
#[unsafe(no_mangle)]
pub extern "C" fn timed_sleep(us: f64) {
    spend(|state| now() + state.time(us));
}

/// Spends the time of a `cudaMalloc`.
#[unsafe(no_mangle)]
pub extern "C" fn timed_malloc() {
    call(Kind::Malloc, |costs| costs.malloc_us);
}

/// Spends the time of a start of a thread.
#[unsafe(no_mangle)]
pub extern "C" fn timed_thread() {
    spend(|state| now() + state.time(state.costs.thread_us));
}

/// Makes pages, as `MADV_POPULATE_WRITE` does.
#[unsafe(no_mangle)]
pub extern "C" fn timed_pages(address: usize, bytes: usize) {
    spend(|state| state.visit_pages(now(), address, bytes, 0.0));
}

/// Spends the time of a read from the page cache into memory.
#[unsafe(no_mangle)]
pub extern "C" fn timed_read(address: usize, bytes: usize) {
    spend(|state| {
        let asked = now();
        let Costs { reader_gbps, readers_gbps, near_us, far_gbps, .. } = state.costs;
        let moved = if near_us > 0.0 && !IS_NEAR.replace(true) { asked + state.time(near_us) } else { asked };
        let made = state.visit_pages(moved, address, bytes, 0.0);
        state.readers += 1;
        state.slots.extend(address / PAGES_BYTES..(address + bytes).div_ceil(PAGES_BYTES));
        // On two nodes, every second thread runs on the other one.
        let is_far = far_gbps > 0.0 && near_us == 0.0 && THREAD.with(|thread| thread % 2 == 1);
        let own_gbps = if is_far { far_gbps } else { reader_gbps };
        let read = made + state.time_of(bytes, own_gbps.min(readers_gbps / state.readers as f64));
        // The page cache, and slots that are read and written back.
        let passes = state.missed_share().map_or(2.0, |missed| 1.0 + 2.0 * missed);
        let end = read.max(state.pass(made, bytes, passes));
        state.push(Kind::Read, asked, asked, end, bytes);
        end
    });
    let mut state = state();
    state.readers = state.readers.saturating_sub(1);
}
