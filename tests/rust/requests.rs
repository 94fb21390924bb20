//! Times of remote requests: their number at once, pauses, second requests and connections that stall.

use async_trait::async_trait;
use fst::error::{Error, Kind, Result};
use fst::remote::find::version::Version;
use fst::remote::internals::{AdaptiveLimit, Pieces, Progress, Target, answer, repeat};
use fst::remote::stores::{Answer, Attempt, Failure, FailureClass, Store};
use fst::remote::transfer::concurrency::Host;
use fst::remote::transfer::limits::{REQUESTS_MAX, REQUESTS_START, REQUESTS_START_FAR};
use fst::remote::transfer::runtime::block_on;
use futures_util::{StreamExt, stream};
use object_store::client::HttpError;
use proptest::prelude::*;
use std::future::pending;
use std::ops::Range;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant as WallInstant};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Instant, sleep};

const TICK: Duration = Duration::from_millis(1);

/// Returns a runtime whose clock moves on when all its tasks wait.
fn paused() -> Runtime {
    Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

/// Runs requests for `ticks` against a host whose connections have `stream_bytes` in a tick, and all together
/// `total_bytes`, and whose first bytes take `latency` ticks. Returns the limit.
fn run(
    adaptive_limit: &mut AdaptiveLimit,
    begin: WallInstant,
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
        let bytes = stream_bytes.min(total_bytes / (streaming as u64).max(1));
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
    let begin = WallInstant::now();
    let limit_after = |ticks, latency| run(&mut AdaptiveLimit::default(), begin, ticks, 50_000, u64::MAX, latency);
    assert_eq!(limit_after(80, 40), REQUESTS_START, "the connections have just begun");
    assert_eq!(limit_after(100, 40), 2 * REQUESTS_START);
    assert_eq!(limit_after(400, 40), REQUESTS_MAX);
    assert_eq!(limit_after(2000, 200), REQUESTS_MAX);
    let limit = run(&mut AdaptiveLimit::default(), begin, 10_000, u64::MAX, 10_000_000, 1);
    assert_eq!(limit, 2 * REQUESTS_START, "one step shows that more requests do not help");
}

#[test]
fn far_host_gets_more_requests_from_the_beginning() {
    let (near, far) = (Duration::from_millis(1), Duration::from_millis(40));
    let limit_after = |opened| {
        let mut adaptive_limit = AdaptiveLimit::default();
        adaptive_limit.opened(opened);
        adaptive_limit.limit()
    };
    assert_eq!((limit_after(near), limit_after(far)), (REQUESTS_START, REQUESTS_START_FAR));
    let mut adaptive_limit = AdaptiveLimit::default();
    adaptive_limit.halve(WallInstant::now());
    let halved = adaptive_limit.limit();
    adaptive_limit.opened(far);
    assert_eq!(adaptive_limit.limit(), halved, "the host has asked for fewer");
}

#[test]
fn limit_stays_if_fewer_requests_are_sent() {
    let (mut adaptive_limit, begin) = (AdaptiveLimit::default(), WallInstant::now());
    adaptive_limit.sent(begin);
    for tick in 0..1000 {
        adaptive_limit.received(1000, true, REQUESTS_START - 1, begin + TICK * tick);
    }
    assert_eq!(adaptive_limit.limit(), REQUESTS_START);
}

#[test]
fn limit_is_halved_once_for_answers_together_and_grows_slowly_then() {
    let (mut adaptive_limit, begin) = (AdaptiveLimit::default(), WallInstant::now());
    run(&mut adaptive_limit, begin, 1000, 50_000, u64::MAX, 40);
    let now = begin + TICK * 1000;
    adaptive_limit.halve(now);
    adaptive_limit.halve(now + TICK * 500);
    assert_eq!(adaptive_limit.limit(), REQUESTS_MAX / 2);
    assert_eq!(run(&mut adaptive_limit, now, 990, 50_000, u64::MAX, 40), REQUESTS_MAX / 2);
    let limit = run(&mut adaptive_limit, now + TICK * 990, 1000, 50_000, u64::MAX, 40);
    assert_eq!(limit, REQUESTS_MAX / 2 + 8);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn limit_ends_where_the_network_is_full(needed in 1_u64..300, latency in 1_u32..100) {
        let limit = run(&mut AdaptiveLimit::default(), WallInstant::now(), 3000, 1000, 1000 * needed, latency);
        let needed = needed as usize;
        // The last step may bring less than a fifth of what it adds.
        prop_assert!(limit >= REQUESTS_MAX.min(needed * 5 / 6), "{limit}");
        prop_assert!(limit <= REQUESTS_MAX.min((2 * REQUESTS_START).max(4 * needed)), "{limit}");
    }
}

#[test]
fn request_beyond_the_limit_waits_and_can_be_ended() {
    let host = Host::default();
    let permits: Vec<_> = (0..REQUESTS_START).map(|_| host.wait(&|| Ok(())).unwrap()).collect();
    assert!(host.wait(&never).is_err());
    drop(permits);
    assert!(host.wait(&never).is_ok());
}

#[test]
fn only_late_ranges_are_requested_a_second_time_and_only_in_free_turns() {
    let host = Host::default();
    let second = Duration::from_secs(1);
    assert!(host.hedge(1000, 100 * second).is_none(), "nothing is known of the host");
    host.arrived(1000, second);
    for (bytes, late) in [(10, 4), (1000, 4), (2000, 8)] {
        assert!(host.hedge(bytes, late * second - TICK).is_none());
        assert!(host.hedge(bytes, late * second).is_some());
    }
    let hedges: Vec<_> = (0..4).map(|_| host.hedge(1000, 4 * second).unwrap()).collect();
    assert!(host.hedge(1000, 4 * second).is_none());
    drop(hedges);
    let permits: Vec<_> = (0..host.limit()).map(|_| host.wait(&|| Ok(())).unwrap()).collect();
    assert!(host.hedge(1000, 4 * second).is_none(), "no permit is free");
    drop(permits);
    let fast = Host::default();
    fast.arrived(1000, TICK);
    assert!(fast.hedge(1000, TICK * 499).is_none());
}

/// Part of an answer: bytes that arrive after a number of seconds, or the end of the connection.
#[derive(Clone, Copy, Debug)]
enum Step {
    Bytes(u64, f32),
    Stall,
    Fail(FailureClass),
}
use Step::{Bytes as Arrives, Fail, Stall};

/// Store with the numbers 0, 1, ... as bytes, whose answers follow a script. Records the ranges.
struct Script {
    answers: Mutex<Vec<Vec<Step>>>,
    requests: Mutex<Vec<Range<u64>>>,
}

#[async_trait]
impl Store for Script {
    async fn get(&self, _: &str, range: Range<u64>, version: Option<&Version>) -> Attempt<Answer> {
        self.requests.lock().unwrap().push(range.clone());
        let steps = self.answers.lock().unwrap().remove(0);
        let mut begin = range.start;
        let frames = steps.into_iter().map(move |step| {
            let end = if let Arrives(bytes, _) = step { begin + bytes } else { begin };
            (step, std::mem::replace(&mut begin, end)..end)
        });
        let body = stream::iter(frames).then(|(step, range)| async move {
            match step {
                Arrives(_, seconds) => {
                    sleep(Duration::from_secs_f32(seconds)).await;
                    Ok(content(&range).into())
                }
                Stall => pending().await,
                Fail(class) => Err(Failure::new(class, "scripted")),
            }
        });
        let version = version.cloned().unwrap_or_default();
        Ok(Answer { length: Some(1000), version, range, body: body.boxed(), unreceived: None })
    }
}

fn content(range: &Range<u64>) -> Vec<u8> {
    range.clone().map(|number| (number % 251) as u8).collect()
}

/// Fills a range from bytes 100 to 200 of a host whose ranges take a second. Returns the first byte of each
/// request, or the error.
fn fill(answers: &[&[Step]]) -> Result<Vec<u64>> {
    let answers = Mutex::new(answers.iter().map(|steps| steps.to_vec()).collect());
    let store = Script { answers, requests: Mutex::default() };
    let host = Host::default();
    host.arrived(100, Duration::from_secs(1));
    let permit = host.wait(&|| Ok(())).unwrap();
    let target = Target { store: &store, key: "key", url: "url", permit: &permit };
    let mut into = vec![0; 100];
    let mut pieces = Pieces::one(100, &mut into);
    let filled = paused().block_on(target.fill(&mut pieces, 1000, &Version::default()));
    drop(permit);
    let (all, expired) = (host.limit(), Duration::from_secs(3600));
    let permits: Vec<_> = (0..all).map_while(|_| host.hedge(1, expired)).collect();
    assert_eq!(permits.len(), 4, "all permits have ended");
    filled?;
    assert_eq!(into, content(&(100..200)));
    let requests = store.requests.into_inner().unwrap();
    assert!(requests.iter().all(|range| range.end == 200));
    Ok(requests.into_iter().map(|range| range.start).collect())
}

#[test]
fn late_range_is_completed_by_the_faster_of_two_requests() {
    let slow = |seconds| [Arrives(30, 1.0), Arrives(70, seconds)];
    let lost = [Arrives(30, 1.0), Arrives(10, 5.0), Fail(FailureClass::Transient)];
    let check = |answers: &[&[Step]], begins: &[u64]| assert_eq!(fill(answers).unwrap(), begins, "{answers:?}");
    check(&[&[Arrives(100, 3.5)]], &[100]);
    check(&[&[Arrives(30, 1.0), Stall], &[Arrives(70, 1.0)]], &[100, 130]);
    // The first request wins, and failures of the second one do not matter.
    check(&[&slow(5.0), &[Arrives(10, 1.0), Stall]], &[100, 130]);
    for failed in [Fail(FailureClass::Permanent), Fail(FailureClass::RateLimited(None)), Arrives(71, 1.0)] {
        check(&[&slow(9.0), &[failed]], &[100, 130]);
    }
    // One second request, also if the first is repeated.
    check(&[&lost, &[Stall], &[Arrives(60, 9.0)]], &[100, 130, 140]);
    let changed = [Arrives(30, 5.0), Fail(FailureClass::Changed)];
    assert_eq!(fill(&[&changed, &[Stall]]).unwrap_err().kind(), Kind::SourceChanged);
}

#[test]
fn pauses_grow_also_if_the_server_asks_for_none() {
    let pauses = |stated: Option<u64>| {
        paused().block_on(async {
            let (host, begin, sent) = (Host::default(), Instant::now(), Mutex::new(Vec::new()));
            let request = || async {
                sent.lock().unwrap().push(begin.elapsed());
                Err::<(), _>(Failure::new(FailureClass::RateLimited(stated.map(Duration::from_secs)), "busy"))
            };
            let error = repeat("url", &host, None, 0, request).await.unwrap_err();
            assert!(error.to_string().ends_with("busy (8 requests failed; the last one is described)"), "{error}");
            let sent = sent.into_inner().unwrap();
            sent.windows(2).map(|pair| (pair[1] - pair[0]).as_millis()).collect::<Vec<u128>>()
        })
    };
    let usual = [100, 200, 400, 800, 1600, 3200, 5000];
    for (stated, expected) in [(None, usual), (Some(0), usual), (Some(30), [30_000; 7])] {
        let found = pauses(stated);
        assert!(found.iter().zip(expected).all(|(found, expected)| found.abs_diff(expected) <= 2), "{found:?}");
    }
}

#[test]
fn slow_connections_stall_and_slow_receivers_do_not() {
    const STALL_BYTES: usize = 16 << 10;
    // Frames of so many bytes, with a pause before each, and one in which nobody waits. The time of a stall is 10 s.
    for (bytes, wait_seconds, idle_seconds, expected) in [
        (STALL_BYTES, 11, 0, 0),
        (1, 1, 0, 10),
        (STALL_BYTES / 8, 1, 0, 100),
        (STALL_BYTES, 9, 0, 100),
        (STALL_BYTES / 8, 1, 60, 100),
    ] {
        let arrived = paused().block_on(async {
            let mut progress = Progress::new(Duration::from_secs(10));
            for count in 0..100 {
                sleep(Duration::from_secs(idle_seconds)).await;
                if progress.receive(sleep(Duration::from_secs(wait_seconds)), |()| bytes).await.is_none() {
                    return count;
                }
            }
            100
        });
        assert_eq!(arrived, expected, "{bytes} bytes, {wait_seconds} s, {idle_seconds} s");
    }
}

#[test]
fn answer_has_its_own_time_after_the_body() {
    for (seconds, expected) in [(0, 120), (50, 170), (119, 239), (1000, 2000)] {
        let waited = paused().block_on(async {
            let (begin, taken) = (Instant::now(), OnceLock::new());
            let body = async {
                sleep(Duration::from_secs(seconds)).await;
                taken.get_or_init(Instant::now);
                pending::<std::result::Result<(), HttpError>>().await
            };
            answer(begin, &taken, body).await.unwrap_err();
            begin.elapsed().as_secs()
        });
        assert_eq!(waited, expected);
    }
}

fn never() -> Result<()> {
    Err(Error::new(Kind::Interrupted, "ended"))
}

#[test]
fn request_runs_on_a_thread_of_another_runtime() {
    let outer = Builder::new_current_thread().enable_all().build().unwrap();
    let pause = || async {
        sleep(Duration::from_millis(5)).await;
        Ok(())
    };
    assert_eq!(outer.block_on(async { block_on(&|| Ok(()), pause()) }), Ok(()));
    let ended = outer.block_on(async { block_on(&never, pending::<Result<()>>()) });
    assert_eq!(ended.unwrap_err().kind(), Kind::Interrupted);
    assert_eq!(block_on(&never, pending::<Result<()>>()).unwrap_err().kind(), Kind::Interrupted);
}
