//! AdaptiveLimit of the number of requests that a host gets at once.
//!
//! The number is doubled while that brings more bytes a second, as the window of a TCP connection at its start: a host
//! whose connections are slow gets as many as the network carries within a second. Once the host has asked for fewer
//! requests, the number grows by a few at a time.

use super::limits::{FAR, REQUESTS_MAX, REQUESTS_START, REQUESTS_START_FAR};
use crate::num::to_u64;
use std::time::{Duration, Instant};

/// Number of parts at once to a host to which nothing was sent yet. More share a slow link, so that each takes longer.
const UPLOADS_START: usize = 2;
/// Requests that are added once the host has asked for fewer.
const STEP: usize = 8;
/// Share of its adaptive_limit in proportion to the requests that the rate must have, as a divisor.
const SHARE_DIVISOR: u64 = 5;
/// Shortest time in which a rate is measured.
const MEASUREMENT_MIN: Duration = Duration::from_millis(50);
/// Time in which the answers to requests that were sent together count as one sign of too many, and after which one more
/// step is tried.
const HALVING_INTERVAL: Duration = Duration::from_secs(1);

/// Number of requests that a host gets at once, and the measurement that decides whether it grows.
#[derive(Debug)]
pub struct AdaptiveLimit {
    limit: usize,
    /// Limit at the beginning.
    start: usize,
    /// Rate from which the limit is raised, in bytes per second.
    rate_min: u64,
    /// Time at which the host last asked for fewer requests.
    halved: Option<Instant>,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// No request has been sent since the last pause.
    Idle,
    /// The requests that were added last bring their first bytes. The rate grows meanwhile.
    Starting {
        begin: Instant,
        answers: usize,
    },
    Measuring {
        begin: Instant,
        interval: Duration,
        bytes: u64,
        is_full: bool,
    },
}

impl Default for AdaptiveLimit {
    fn default() -> Self {
        AdaptiveLimit { limit: REQUESTS_START, start: REQUESTS_START, rate_min: 0, halved: None, phase: Phase::Idle }
    }
}

impl AdaptiveLimit {
    /// Returns the number of parts of new objects that the host gets at once.
    pub(super) fn of_uploads() -> AdaptiveLimit {
        AdaptiveLimit { limit: UPLOADS_START, ..AdaptiveLimit::default() }
    }

    /// Returns how many requests the host gets at once.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Records the time in which the first answer for an object began. A far host gets more requests from the beginning.
    pub fn opened(&mut self, time: Duration) {
        let is_new = self.limit == REQUESTS_START && self.rate_min == 0 && self.halved.is_none();
        if is_new && time >= FAR {
            (self.limit, self.start) = (REQUESTS_START_FAR, REQUESTS_START_FAR);
        }
    }

    /// Returns how many requests the host gets at once at the beginning.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Records that a request is sent.
    pub fn sent(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Idle) {
            self.phase = Phase::Starting { begin: now, answers: self.limit };
        }
    }

    /// Records that no request is left. The pause before the next one is no sign of a slow host.
    pub(super) fn paused(&mut self) {
        self.phase = Phase::Idle;
    }

    /// Records bytes that have arrived, or were sent: the first ones of their request, if `is_first`. `active` requests
    /// are open.
    pub fn received(&mut self, bytes: u64, is_first: bool, active: usize, now: Instant) {
        match &mut self.phase {
            Phase::Idle => {}
            Phase::Starting { begin, answers } => {
                *answers = answers.saturating_sub(usize::from(is_first));
                if *answers == 0 {
                    // What takes longer to begin varies more.
                    let least = if self.halved.is_some() { HALVING_INTERVAL } else { MEASUREMENT_MIN };
                    let interval = now.duration_since(*begin).max(least);
                    self.phase = Phase::Measuring { begin: now, interval, bytes: 0, is_full: false };
                }
            }
            Phase::Measuring { begin, interval, bytes: measured, is_full } => {
                *measured = measured.saturating_add(bytes);
                *is_full |= active >= self.limit;
                let elapsed = now.duration_since(*begin);
                if elapsed >= *interval {
                    let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX).max(1);
                    let rate = measured.saturating_mul(1_000_000) / micros;
                    let (interval, is_full) = (*interval, *is_full);
                    if is_full && rate >= self.rate_min {
                        self.raise(rate, now);
                    } else {
                        self.phase = Phase::Measuring { begin: now, interval, bytes: 0, is_full: false };
                    }
                }
            }
        }
    }

    fn raise(&mut self, rate: u64, now: Instant) {
        let limit = (self.limit + if self.halved.is_some() { STEP } else { self.limit }).min(REQUESTS_MAX);
        let added = limit - self.limit;
        let share = rate.saturating_mul(to_u64(added)) / to_u64(self.limit) / SHARE_DIVISOR;
        self.rate_min = rate.saturating_add(share);
        self.limit = limit;
        self.phase = Phase::Starting { begin: now, answers: added };
        tracing::debug!(streams = limit, rate, "the host gets more requests at once");
    }

    /// Halves the number of requests, because the host asked for fewer.
    pub fn halve(&mut self, now: Instant) {
        if self.halved.is_none_or(|halved| now.duration_since(halved) >= HALVING_INTERVAL) {
            self.limit = (self.limit / 2).max(1);
            self.rate_min = 0;
            self.halved = Some(now);
            self.phase = Phase::Starting { begin: now, answers: self.limit };
            tracing::info!(streams = self.limit, "the host asks for fewer requests");
        }
    }
}
