//! AdaptiveLimit of the number of requests that a host gets at once.
//!
//! The number is doubled while that brings more bytes a second, as the window of a TCP connection at its start: a host
//! whose connections are slow gets as many as the network carries within a second. Once the host has asked for fewer
//! requests, the number grows by a few at a time.

use super::limits::{REQUESTS_MAX, REQUESTS_START};
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
pub(super) struct AdaptiveLimit {
    limit: usize,
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
        AdaptiveLimit { limit: REQUESTS_START, rate_min: 0, halved: None, phase: Phase::Idle }
    }
}

impl AdaptiveLimit {
    /// Returns the number of parts of new objects that the host gets at once.
    pub(super) fn of_uploads() -> AdaptiveLimit {
        AdaptiveLimit { limit: UPLOADS_START, ..AdaptiveLimit::default() }
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    pub(super) fn sent(&mut self, now: Instant) {
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
    pub(super) fn received(&mut self, bytes: u64, is_first: bool, active: usize, now: Instant) {
        match &mut self.phase {
            Phase::Idle => {}
            Phase::Starting { begin, answers } => {
                *answers = answers.saturating_sub(usize::from(is_first));
                if *answers == 0 {
                    // What takes longer to begin varies more.
                    let interval = now.duration_since(*begin).max(self.measurement_min());
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

    fn measurement_min(&self) -> Duration {
        if self.halved.is_some() { HALVING_INTERVAL } else { MEASUREMENT_MIN }
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
    pub(super) fn halve(&mut self, now: Instant) {
        if self.halved.is_none_or(|halved| now.duration_since(halved) >= HALVING_INTERVAL) {
            self.limit = (self.limit / 2).max(1);
            self.rate_min = 0;
            self.halved = Some(now);
            self.phase = Phase::Starting { begin: now, answers: self.limit };
            tracing::info!(streams = self.limit, "the host asks for fewer requests");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TICK: Duration = Duration::from_millis(1);

    /// Runs requests for `ticks` against a host whose connections have `stream_bytes` in a tick, and all together
    /// `total_bytes`, and whose first bytes take `latency` ticks. Returns the limit.
    fn run(
        adaptive_limit: &mut AdaptiveLimit,
        begin: Instant,
        ticks: u32,
        stream_bytes: u64,
        total_bytes: u64,
        latency: u32,
    ) -> usize {
        // Ticks since each request was sent.
        let mut requests: Vec<u32> = Vec::new();
        for tick in 0..ticks {
            let now = begin + TICK * tick;
            while requests.len() < adaptive_limit.limit() {
                adaptive_limit.sent(now);
                requests.push(0);
            }
            requests.truncate(adaptive_limit.limit());
            let streaming = requests.iter().filter(|age| **age >= latency).count();
            let bytes = stream_bytes.min(total_bytes / to_u64(streaming).max(1));
            for age in &mut requests {
                if *age >= latency {
                    adaptive_limit.received(bytes, *age == latency, adaptive_limit.limit(), now);
                }
                *age += 1;
            }
        }
        adaptive_limit.limit()
    }

    #[test]
    fn limit_is_doubled_while_connections_are_the_bottleneck() {
        let begin = Instant::now();
        let limit_after = |ticks, latency| run(&mut AdaptiveLimit::default(), begin, ticks, 50_000, u64::MAX, latency);
        assert_eq!(limit_after(80, 40), REQUESTS_START, "the connections have just begun");
        assert_eq!(limit_after(100, 40), 2 * REQUESTS_START);
        assert_eq!(limit_after(400, 40), REQUESTS_MAX);
        assert_eq!(limit_after(2000, 200), REQUESTS_MAX);
    }

    #[test]
    fn limit_stays_where_a_few_connections_fill_the_network() {
        let limit = run(&mut AdaptiveLimit::default(), Instant::now(), 10_000, u64::MAX, 10_000_000, 1);
        assert_eq!(limit, 2 * REQUESTS_START, "one step shows that more requests do not help");
    }

    #[test]
    fn limit_stays_if_fewer_requests_are_sent() {
        let (mut adaptive_limit, begin) = (AdaptiveLimit::default(), Instant::now());
        adaptive_limit.sent(begin);
        for tick in 0..1000 {
            adaptive_limit.received(1000, true, REQUESTS_START - 1, begin + TICK * tick);
        }
        assert_eq!(adaptive_limit.limit(), REQUESTS_START);
    }

    #[test]
    fn limit_is_halved_once_for_answers_together_and_grows_slowly_then() {
        let (mut adaptive_limit, begin) = (AdaptiveLimit::default(), Instant::now());
        run(&mut adaptive_limit, begin, 1000, 50_000, u64::MAX, 40);
        let now = begin + TICK * 1000;
        adaptive_limit.halve(now);
        adaptive_limit.halve(now + HALVING_INTERVAL / 2);
        assert_eq!(adaptive_limit.limit(), REQUESTS_MAX / 2);
        assert_eq!(run(&mut adaptive_limit, now, 990, 50_000, u64::MAX, 40), REQUESTS_MAX / 2);
        let limit = run(&mut adaptive_limit, now + TICK * 990, 1000, 50_000, u64::MAX, 40);
        assert_eq!(limit, REQUESTS_MAX / 2 + STEP);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn limit_ends_where_the_network_is_full(needed in 1_u64..300, latency in 1_u32..100) {
            let limit = run(&mut AdaptiveLimit::default(), Instant::now(), 3000, 1000, 1000 * needed, latency);
            let needed = usize::try_from(needed).unwrap();
            // The last step may bring less than a fifth of what it adds.
            prop_assert!(limit >= REQUESTS_MAX.min(needed * 5 / 6), "{limit}");
            prop_assert!(limit <= REQUESTS_MAX.min((2 * REQUESTS_START).max(4 * needed)), "{limit}");
        }
    }
}
