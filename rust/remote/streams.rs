//! Number of requests that a host gets at once.
//!
//! The number grows while more requests bring more bytes a second, and is halved when the host asks for fewer. A range that
//! takes much longer than others may be requested a second time, if the host could get more requests.

use crate::error::Result;
use crate::num::to_u64;
use crate::os::per_process::PerProcess;
use crate::os::retry::Check;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of requests at once to a host of which nothing is known.
pub const STREAMS_START: usize = 16;
/// Largest number of requests at once to one host.
pub const STREAMS_MAX: usize = 256;
/// Requests that are added when the rate has grown.
const STEP: usize = 8;
/// Growth of the rate that shows that more requests help, in percent.
const GROWTH_PERCENT: u64 = 5;
/// Time in which the answers to requests that were sent together count as one sign of too many.
const HALVING_INTERVAL: Duration = Duration::from_secs(1);
/// Time of a range after which it may be requested a second time, as a multiple of the usual time.
const HEDGE_FACTOR: u32 = 4;
/// Shortest time of a range after which it may be requested a second time.
const HEDGE_AFTER_MIN: Duration = Duration::from_millis(500);
/// Number of ranges of a host that are requested a second time at once. Each of them takes memory for its bytes, and a
/// host that is slow as a whole does not get twice the requests.
const HEDGES_MAX: usize = 4;
/// Interval at which a thread that waits for its turn looks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

static HOSTS: PerProcess<Mutex<HashMap<String, Arc<Host>>>> = PerProcess::new(Mutex::default);

/// Requests to one host.
#[derive(Debug)]
pub struct Host {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    limit: usize,
    active: usize,
    /// Bytes, requests and beginning of the current measurement. `None` before the first request.
    window: Option<Window>,
    /// Rate of the last measurement, in bytes per second.
    rate: u64,
    halved: Option<Instant>,
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

#[derive(Debug)]
struct Window {
    begin: Instant,
    bytes: u64,
    requests: usize,
    /// Whether all requests that were allowed were in use.
    is_full: bool,
}

/// Turn of one request. It ends when it is dropped.
pub struct Turn<'a> {
    host: &'a Host,
    bytes: u64,
    is_hedge: bool,
}

impl Host {
    /// Returns the host of this name, which all loads of the process share.
    pub fn of(name: &str) -> Arc<Host> {
        let mut hosts = HOSTS.get().lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(hosts.entry(name.to_owned()).or_default())
    }

    /// Waits until the host may get another request.
    ///
    /// # Errors
    /// That of `check`, which is called from time to time.
    pub fn wait(&self, check: Check<'_>) -> Result<Turn<'_>> {
        let mut state = self.lock();
        while state.active >= state.limit {
            state = self
                .ended
                .wait_timeout(state, POLL_INTERVAL)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
            check()?;
        }
        state.active += 1;
        let is_full = state.active == state.limit;
        let window = state.window.get_or_insert_with(Window::new);
        window.is_full |= is_full;
        Ok(Turn { host: self, bytes: 0, is_hedge: false })
    }

    /// Records the time in which a range arrived.
    pub fn arrived(&self, bytes: u64, time: Duration) {
        let mut state = self.lock();
        state.usual = Some(match state.usual {
            None => Usual { bytes, time },
            Some(usual) => {
                Usual { bytes: (usual.bytes * 7).saturating_add(bytes) / 8, time: (usual.time * 7 + time) / 8 }
            }
        });
    }

    /// Returns a turn to request a range of `bytes` bytes a second time, which was first requested `elapsed` ago. `None`
    /// if that is not much longer than usual, or if the turn is not free.
    pub fn hedge(&self, bytes: u64, elapsed: Duration) -> Option<Turn<'_>> {
        let mut state = self.lock();
        let late = state.usual?.time_of(bytes).saturating_mul(HEDGE_FACTOR).max(HEDGE_AFTER_MIN);
        if elapsed < late || state.active >= state.limit || state.hedges >= HEDGES_MAX {
            return None;
        }
        state.active += 1;
        state.hedges += 1;
        Some(Turn { host: self, bytes: 0, is_hedge: true })
    }

    /// Halves the number of requests, because the host asked for fewer.
    pub fn halve(&self) {
        let mut state = self.lock();
        if state.halved.is_none_or(|halved| halved.elapsed() >= HALVING_INTERVAL) {
            state.limit = (state.limit / 2).max(1);
            state.halved = Some(Instant::now());
            tracing::info!(streams = state.limit, "the host asks for fewer requests");
        }
    }

    /// Returns how many requests the host gets at once.
    pub fn limit(&self) -> usize {
        self.lock().limit
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Usual {
    /// Returns the usual time of a range of `bytes` bytes. A shorter one than usual takes as long: most of its time may be
    /// that of the first byte.
    fn time_of(&self, bytes: u64) -> Duration {
        let multiple = bytes.div_ceil(self.bytes.max(1)).max(1);
        self.time.saturating_mul(u32::try_from(multiple).unwrap_or(u32::MAX))
    }
}

impl Default for Host {
    fn default() -> Self {
        let (limit, active, hedges) = (STREAMS_START, 0, 0);
        let state = State { limit, active, window: None, rate: 0, halved: None, usual: None, hedges };
        Host { state: Mutex::new(state), ended: Condvar::new() }
    }
}

impl Window {
    fn new() -> Window {
        Window { begin: Instant::now(), bytes: 0, requests: 0, is_full: false }
    }
}

impl State {
    /// Counts an ended request. After as many as are allowed at once, compares the rate with the last one.
    fn count(&mut self, bytes: u64) {
        let window = self.window.get_or_insert_with(Window::new);
        window.bytes = window.bytes.saturating_add(bytes);
        window.requests += 1;
        if window.requests < self.limit {
            return;
        }
        let micros = u64::try_from(window.begin.elapsed().as_micros()).unwrap_or(u64::MAX).max(1);
        let rate = window.bytes.saturating_mul(1_000_000) / micros;
        if window.is_full && rate > self.rate.saturating_add(self.rate / 100 * GROWTH_PERCENT) {
            self.limit = (self.limit + STEP).min(STREAMS_MAX);
        }
        self.rate = rate;
        self.window = None;
    }
}

impl Turn<'_> {
    /// Records that bytes arrived.
    pub fn received(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(to_u64(bytes));
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.host.lock();
        state.active -= 1;
        if self.is_hedge {
            state.hedges -= 1;
        }
        if self.bytes > 0 {
            state.count(self.bytes);
        }
        if state.active == 0 {
            // A pause between loads is no sign of a slow host.
            state.window = None;
        }
        drop(state);
        self.host.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_all(host: &Host, bytes: usize) {
        let mut turns: Vec<_> = (0..host.limit()).map(|_| host.wait(&|| Ok(())).unwrap()).collect();
        turns.iter_mut().for_each(|turn| turn.received(bytes));
    }

    #[test]
    fn limit_grows_with_the_rate_and_is_halved_once_for_answers_together() {
        let host = Host::default();
        end_all(&host, 1000);
        assert_eq!(host.limit(), STREAMS_START + STEP);
        host.halve();
        host.halve();
        assert_eq!(host.limit(), (STREAMS_START + STEP) / 2);
    }

    #[test]
    fn request_beyond_the_limit_waits_and_can_be_ended() {
        let host = Host::default();
        let turns: Vec<_> = (0..STREAMS_START).map(|_| host.wait(&|| Ok(())).unwrap()).collect();
        let ended = || Err(crate::Error::new(crate::error::Kind::Interrupted, ""));
        assert!(host.wait(&ended).is_err());
        drop(turns);
        assert!(host.wait(&ended).is_ok());
    }

    #[test]
    fn only_late_ranges_are_requested_a_second_time_and_only_in_free_turns() {
        let host = Host::default();
        let second = Duration::from_secs(1);
        assert!(host.hedge(1000, 100 * second).is_none(), "nothing is known of the host");
        host.arrived(1000, second);
        for (bytes, late) in [(10, 4), (1000, 4), (2000, 8)] {
            assert!(host.hedge(bytes, late * second - Duration::from_millis(1)).is_none());
            assert!(host.hedge(bytes, late * second).is_some());
        }
        let hedges: Vec<_> = (0..HEDGES_MAX).map(|_| host.hedge(1000, 4 * second).unwrap()).collect();
        assert!(host.hedge(1000, 4 * second).is_none());
        drop(hedges);
        let turns: Vec<_> = (0..host.limit()).map(|_| host.wait(&|| Ok(())).unwrap()).collect();
        assert!(host.hedge(1000, 4 * second).is_none(), "no turn is free");
        drop(turns);
        let fast = Host::default();
        fast.arrived(1000, Duration::from_millis(1));
        assert!(fast.hedge(1000, HEDGE_AFTER_MIN / 2).is_none());
    }
}
