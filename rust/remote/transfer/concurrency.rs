//! Requests that hosts get at once.
//!
//! Their number grows while more requests bring more bytes a second, and is halved when the host asks for fewer. A range
//! that takes much longer than others may be requested a second time, if the host could get more requests.

use super::adaptive_limit::AdaptiveLimit;
use crate::error::Result;
use crate::os::mutex::{Condvar, Mutex};
use crate::os::per_process::PerProcess;
use crate::os::retry::Check;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a request after which they are counted, so that threads seldom wait for each other's counts.
const COUNT_BYTES: u64 = 1 << 20;
/// Time of a range after which it may be requested a second time, as a multiple of the usual time.
const HEDGE_FACTOR: u32 = 4;
/// Shortest time of a range after which it may be requested a second time.
const HEDGE_AFTER_MIN: Duration = Duration::from_millis(500);
/// Number of ranges of a host that are requested a second time at once. Each of them takes memory for its bytes, and a
/// host that is slow as a whole does not get twice the requests.
const HEDGES_MAX: usize = 4;
/// Interval at which a thread that waits for a permit looks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

type Hosts = HashMap<String, Arc<Host>>;

static HOSTS: PerProcess<Mutex<Hosts>> = PerProcess::new(Mutex::default);
/// Hosts of uploads, whose rates differ from the rates of loads.
static UPLOAD_HOSTS: PerProcess<Mutex<Hosts>> = PerProcess::new(Mutex::default);

/// Requests to one host.
#[derive(Debug, Default)]
pub struct Host {
    state: Mutex<State>,
    free: Condvar,
}

#[derive(Debug, Default)]
struct State {
    adaptive_limit: AdaptiveLimit,
    active: usize,
    /// Smoothed size and time of ranges that arrived. `None` before the first one.
    usual: Option<Usual>,
    /// Number of ranges that are being requested a second time.
    hedges: usize,
}

#[derive(Clone, Copy, Debug)]
struct Usual {
    bytes: u64,
    time: Duration,
}

/// Permit of one request. It ends when it is dropped.
pub struct Permit<'a> {
    host: &'a Host,
    /// Bytes that have arrived and are not counted.
    bytes: AtomicU64,
    has_begun: AtomicBool,
    is_hedge: bool,
}

impl Host {
    /// Returns the host of this name, which all loads of the process share.
    pub fn of(name: &str) -> Arc<Host> {
        let mut hosts = HOSTS.get().lock();
        Arc::clone(hosts.entry(name.to_owned()).or_default())
    }

    /// Returns the host of this name for uploads, which all saves of the process share.
    pub fn of_uploads(name: &str) -> Arc<Host> {
        let mut hosts = UPLOAD_HOSTS.get().lock();
        let state = || Mutex::new(State { adaptive_limit: AdaptiveLimit::of_uploads(), ..State::default() });
        Arc::clone(hosts.entry(name.to_owned()).or_insert_with(|| Arc::new(Host { state: state(), ..Host::default() })))
    }

    /// Waits until the host may get another request.
    pub fn wait(&self, check: Check<'_>) -> Result<Permit<'_>> {
        let mut state = self.state.lock();
        while state.active >= state.adaptive_limit.limit() {
            state = self.free.wait_timeout(state, POLL_INTERVAL);
            check()?;
        }
        state.active += 1;
        state.adaptive_limit.sent(Instant::now());
        Ok(Permit::new(self, false))
    }

    /// Records the time in which the first answer for an object began.
    pub fn opened(&self, time: Duration) {
        self.state.lock().adaptive_limit.opened(time);
        self.free.notify_all();
    }

    /// Records the time in which a range arrived.
    pub fn arrived(&self, bytes: u64, time: Duration) {
        let mut state = self.state.lock();
        state.usual = Some(match state.usual {
            None => Usual { bytes, time },
            Some(usual) => {
                Usual { bytes: (usual.bytes * 7).saturating_add(bytes) / 8, time: (usual.time * 7 + time) / 8 }
            }
        });
    }

    /// Returns a permit to request a range of `bytes` bytes a second time, which was first requested `elapsed` ago. `None`
    /// if that is not much longer than usual, or if no permit is free.
    pub fn hedge(&self, bytes: u64, elapsed: Duration) -> Option<Permit<'_>> {
        let mut state = self.state.lock();
        let late = state.usual?.time_of(bytes).saturating_mul(HEDGE_FACTOR).max(HEDGE_AFTER_MIN);
        if elapsed < late || state.active >= state.adaptive_limit.limit() || state.hedges >= HEDGES_MAX {
            return None;
        }
        state.active += 1;
        state.hedges += 1;
        Some(Permit::new(self, true))
    }

    /// Halves the number of requests, because the host asked for fewer.
    pub fn halve(&self) {
        self.state.lock().adaptive_limit.halve(Instant::now());
    }

    /// Returns how many requests the host gets at once at the beginning.
    pub fn start(&self) -> usize {
        self.state.lock().adaptive_limit.start()
    }

    /// Returns how many requests the host gets at once.
    pub fn limit(&self) -> usize {
        self.state.lock().adaptive_limit.limit()
    }
}

impl Usual {
    /// Returns the usual time of a range of `bytes` bytes. A shorter one than usual takes as long: most of its time may be
    /// the first byte's.
    fn time_of(&self, bytes: u64) -> Duration {
        let multiple = bytes.div_ceil(self.bytes.max(1)).max(1);
        self.time.saturating_mul(u32::try_from(multiple).unwrap_or(u32::MAX))
    }
}

impl<'a> Permit<'a> {
    fn new(host: &'a Host, is_hedge: bool) -> Permit<'a> {
        Permit { host, bytes: AtomicU64::new(0), has_begun: AtomicBool::new(false), is_hedge }
    }

    /// Returns the host.
    pub fn host(&self) -> &'a Host {
        self.host
    }

    /// Records that bytes arrived, or were sent.
    pub fn received(&self, bytes: u64) {
        let all = self.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let is_first = !self.has_begun.swap(true, Ordering::Relaxed);
        if is_first || all >= COUNT_BYTES {
            self.count(&mut self.host.state.lock(), is_first);
        }
    }

    fn count(&self, state: &mut State, is_first: bool) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        let limit = state.adaptive_limit.limit();
        state.adaptive_limit.received(bytes, is_first, state.active, Instant::now());
        if state.adaptive_limit.limit() > limit {
            self.host.free.notify_all();
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.host.state.lock();
        self.count(&mut state, false);
        state.active -= 1;
        state.hedges -= usize::from(self.is_hedge);
        if state.active == 0 {
            state.adaptive_limit.paused();
        }
        drop(state);
        self.host.free.notify_one();
    }
}
