//! Ranges of objects, from the first byte to the last, whatever happens on the way.
//!
//! A failed request is repeated from the byte that was reached. One that takes much longer than usual gets a hedged request
//! beside it: the missing bytes are requested a second time, and the answer that is complete first is used.

use super::concurrency::Permit;
use super::pieces::Pieces;
use super::progress::STALL_BYTES;
use super::retry::{Attempts, repeat};
use super::runtime;
use super::store::{Answer, Attempt, Failure, FailureClass, Store};
use super::version::Version;
use crate::error::Result;
use crate::num::{to_u64, to_usize};
use crate::profile::{self, Count};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use futures_util::stream::BoxStream;
use std::future::pending;
use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Interval at which a request is compared with the usual time of its host.
const HEDGE_INTERVAL: Duration = Duration::from_millis(100);

pub(super) type Body = BoxStream<'static, Attempt<Bytes>>;

/// Object to request ranges of.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) key: &'a str,
    /// URL for errors.
    pub(super) url: &'a str,
    pub(super) permit: &'a Permit<'a>,
}

impl Target<'_> {
    /// Requests the first `bytes_max` bytes, and with them the length and the version. The answer has just begun.
    pub(super) async fn first(&self, bytes_max: u64) -> Result<Answer> {
        let attempt = || async {
            let answer = self.store.get(self.key, 0..bytes_max, None).await?;
            check_range(&answer.range, &(0..answer.length.min(bytes_max)))?;
            Ok(answer)
        };
        repeat(self.url, self.permit.host(), Some(0), 0, attempt).await
    }

    /// Fills pieces of an object of this length and version.
    pub(super) async fn fill(&self, pieces: &mut Pieces<'_>, length: u64, version: &Version) -> Result<()> {
        let Range { start, end } = pieces.range();
        let mut attempts = Attempts::new(self.url, self.permit.host());
        let progress = Progress { reached: AtomicU64::new(start), is_hedged: AtomicBool::new(false) };
        while pieces.reached() < end {
            let expected = Expected { range: pieces.reached()..end, length, version };
            if let Err(failure) = self.fill_rest(&expected, pieces, &progress).await {
                let reached = pieces.reached();
                attempts.prepare(failure, Some(reached), to_usize(end - reached)).await?;
            }
        }
        Ok(())
    }

    /// Fills pieces from the answer that is complete first: that of one request, or of a hedged one beside it.
    async fn fill_rest(&self, expected: &Expected<'_>, pieces: &mut Pieces<'_>, progress: &Progress) -> Attempt<()> {
        let (begin, was_hedged) = (Instant::now(), progress.is_hedged());
        let result = {
            let request = pin!(self.try_fill(expected, pieces, progress));
            let hedged = pin!(self.hedge(expected, progress));
            match select(request, hedged).await {
                Either::Left((result, _)) => result.map(|()| None),
                Either::Right((answer, _)) => Ok(Some(answer)),
            }
        };
        if progress.is_hedged() == was_hedged {
            let bytes = pieces.reached() - expected.range.start;
            return result.map(|_| self.permit.host().arrived(bytes, begin.elapsed()));
        }
        // The connection of the request that was dropped still gets its answer.
        runtime::discard();
        if let Some((first, bytes)) = result? {
            // The first request went on meanwhile.
            let missing = bytes.get(to_usize(pieces.reached() - first)..).unwrap_or_default();
            if !pieces.write(missing) {
                return Err(too_long());
            }
        }
        Ok(())
    }

    /// Fills pieces from one answer, which may have the first bytes of the range only, and records the byte that was
    /// reached also if it fails.
    async fn try_fill(&self, expected: &Expected<'_>, pieces: &mut Pieces<'_>, progress: &Progress) -> Attempt<()> {
        let arrived = |bytes, reached| {
            self.permit.received(bytes);
            progress.reached.store(reached, Ordering::Relaxed);
        };
        receive(self.request(expected).await?, pieces, arrived).await
    }

    /// Waits until the request of a range is late, and requests the missing bytes a second time. Returns them and the
    /// offset of the first one. Never returns if the second request fails: the first one goes on.
    async fn hedge(&self, expected: &Expected<'_>, progress: &Progress) -> (u64, Vec<u8>) {
        let (begin, bytes) = (Instant::now(), expected.range.end - expected.range.start);
        let permit = loop {
            tokio::time::sleep(HEDGE_INTERVAL).await;
            if progress.is_hedged() || progress.reached() == expected.range.end {
                return pending().await;
            }
            if let Some(permit) = self.permit.host().hedge(bytes, begin.elapsed()) {
                break permit;
            }
        };
        progress.is_hedged.store(true, Ordering::Relaxed);
        let rest = Expected { range: progress.reached()..expected.range.end, ..*expected };
        let missing = rest.range.end - rest.range.start;
        profile::count(Count::HedgedRequests, 1);
        profile::count(Count::RepeatedBytes, to_usize(missing));
        tracing::info!(url = self.url, byte = rest.range.start, missing, "a slow range is requested a second time");
        let mut bytes = vec![0; to_usize(missing)];
        let answer = async {
            let mut pieces = Pieces::one(rest.range.start, &mut bytes);
            receive(self.request(&rest).await?, &mut pieces, |_, _| ()).await?;
            // An answer may have the first bytes of the range only.
            let received = pieces.reached() - rest.range.start;
            if received < missing { Err(too_short(received, missing)) } else { Ok(()) }
        };
        match answer.await {
            Ok(()) => (rest.range.start, bytes),
            Err(failure) => {
                if let FailureClass::RateLimited(_) = failure.class {
                    profile::count(Count::RateLimits, 1);
                    self.permit.host().halve();
                }
                tracing::info!(url = self.url, why = failure.message, "the second request of a slow range failed");
                drop(permit);
                pending().await
            }
        }
    }

    async fn request(&self, expected: &Expected<'_>) -> Attempt<Answer> {
        let answer = self.store.get(self.key, expected.range.clone(), Some(expected.version)).await?;
        expected.check(&answer)?;
        Ok(answer)
    }
}

/// Progress of a range, which a request and the hedged one share.
struct Progress {
    /// First byte of the object that has not arrived.
    reached: AtomicU64,
    /// Whether a hedged request was sent. A range gets one at most.
    is_hedged: AtomicBool,
}

impl Progress {
    fn reached(&self) -> u64 {
        self.reached.load(Ordering::Relaxed)
    }

    fn is_hedged(&self) -> bool {
        self.is_hedged.load(Ordering::Relaxed)
    }
}

/// Fills pieces from the body of an answer. `arrived` gets the length of each frame, and the byte that is reached then.
async fn receive(answer: Answer, pieces: &mut Pieces<'_>, arrived: impl Fn(u64, u64)) -> Attempt<()> {
    let Answer { range: Range { start, end }, mut body, .. } = answer;
    while let Some(frame) = body.next().await {
        let frame = frame?;
        if to_u64(frame.len()) > end - pieces.reached() || !pieces.write(&frame) {
            return Err(too_long());
        }
        arrived(to_u64(frame.len()), pieces.reached());
    }
    if pieces.reached() < end { Err(too_short(pieces.reached() - start, end - start)) } else { Ok(()) }
}

/// Answer that a request should get.
struct Expected<'a> {
    range: Range<u64>,
    length: u64,
    version: &'a Version,
}

impl Expected<'_> {
    fn check(&self, answer: &Answer) -> Attempt<()> {
        if !self.version.matches(&answer.version) {
            return Err(Failure::changed("the object changed while it was loaded"));
        }
        if self.length != answer.length {
            return Err(Failure::changed(&format!(
                "the object had {} bytes and now has {}; it changed while it was loaded",
                self.length, answer.length
            )));
        }
        check_range(&answer.range, &self.range)
    }
}

/// Checks the range of an answer. It may end earlier than requested, but not so early that a load would not end.
fn check_range(found: &Range<u64>, expected: &Range<u64>) -> Attempt<()> {
    let is_first_part =
        found.start == expected.start && found.end < expected.end && found.end - found.start >= to_u64(STALL_BYTES);
    if found == expected || is_first_part {
        return Ok(());
    }
    let message = format!(
        "the server answered with bytes {}..{}, but {}..{} were requested; a server or proxy on the way is faulty",
        found.start, found.end, expected.start, expected.end
    );
    Err(Failure::new(FailureClass::Permanent, message))
}

pub(super) fn too_long() -> Failure {
    Failure::new(FailureClass::Permanent, "the server sent more bytes than were requested; it is faulty")
}

pub(super) fn too_short(found: u64, expected: u64) -> Failure {
    Failure::new(FailureClass::Transient, format!("the answer ended after {found} of {expected} bytes"))
}

#[cfg(test)]
mod tests {
    use super::super::concurrency::Host;
    use super::*;
    use async_trait::async_trait;
    use futures_util::stream;
    use std::sync::Mutex;

    const LENGTH: u64 = 1000;
    const USUAL: Duration = Duration::from_secs(1);

    /// Part of an answer: bytes that arrive after a time, or the end of the connection.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Bytes(u64, Duration),
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
                    Arrives(_, time) => {
                        tokio::time::sleep(time).await;
                        Ok(content(&range).into())
                    }
                    Stall => pending().await,
                    Fail(class) => Err(Failure::new(class, "scripted")),
                }
            });
            let version = version.cloned().unwrap_or_default();
            Ok(Answer { length: LENGTH, version, range, body: body.boxed() })
        }

        async fn list(&self, _: &str) -> Attempt<Option<Vec<String>>> {
            Ok(None)
        }
    }

    fn content(range: &Range<u64>) -> Vec<u8> {
        range.clone().map(|number| u8::try_from(number % 251).unwrap()).collect()
    }

    /// Fills a range from bytes 100 to 200 of a host whose ranges take a second. Returns the requests, or the error.
    fn fill(answers: &[&[Step]]) -> Result<Vec<Range<u64>>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let answers = Mutex::new(answers.iter().map(|steps| steps.to_vec()).collect());
        let store = Script { answers, requests: Mutex::default() };
        let host = Host::default();
        host.arrived(100, USUAL);
        let permit = host.wait(&|| Ok(())).unwrap();
        let target = Target { store: &store, key: "key", url: "url", permit: &permit };
        let mut into = vec![0; 100];
        let mut pieces = Pieces::one(100, &mut into);
        let filled = runtime.block_on(target.fill(&mut pieces, LENGTH, &Version::default()));
        drop(permit);
        let (all, expired) = (host.limit(), Duration::from_secs(3600));
        let permits: Vec<_> = (0..all).map_while(|_| host.hedge(1, expired)).collect();
        assert_eq!(permits.len(), 4, "all permits have ended");
        filled?;
        assert_eq!(into, content(&(100..200)));
        Ok(store.requests.into_inner().unwrap())
    }

    #[test]
    fn late_range_is_completed_by_a_second_request() {
        let requests = fill(&[&[Arrives(30, USUAL), Stall], &[Arrives(70, USUAL)]]).unwrap();
        assert_eq!(requests, [100..200, 130..200]);
    }

    #[test]
    fn request_that_ends_in_time_is_sent_once() {
        assert_eq!(fill(&[&[Arrives(100, USUAL * 7 / 2)]]).unwrap().len(), 1);
    }

    #[test]
    fn first_request_may_still_win() {
        let slow = [Arrives(30, USUAL), Arrives(70, USUAL * 5)];
        assert_eq!(fill(&[&slow, &[Arrives(10, USUAL), Stall]]).unwrap(), [100..200, 130..200]);
    }

    #[test]
    fn failure_of_the_second_request_does_not_matter() {
        for failed in [Fail(FailureClass::Permanent), Fail(FailureClass::RateLimited(None)), Arrives(71, USUAL)] {
            let slow = [Arrives(30, USUAL), Arrives(70, USUAL * 9)];
            assert_eq!(fill(&[&slow, &[failed]]).unwrap(), [100..200, 130..200]);
        }
    }

    #[test]
    fn range_gets_one_second_request_also_if_the_first_is_repeated() {
        let lost = [Arrives(30, USUAL), Arrives(10, USUAL * 5), Fail(FailureClass::Transient)];
        let slow = [Arrives(60, USUAL * 9)];
        let requests = fill(&[&lost, &[Stall], &slow]).unwrap();
        assert_eq!(requests, [100..200, 130..200, 140..200]);
    }

    #[test]
    fn error_of_the_first_request_ends_the_range() {
        let changed = [Arrives(30, USUAL * 5), Fail(FailureClass::Changed)];
        assert_eq!(fill(&[&changed, &[Stall]]).unwrap_err().kind(), crate::error::Kind::SourceChanged);
    }
}
