//! Fetches a byte range of an object, with retries and hedged requests.
//!
//! A failed request is repeated from the byte that was reached. One that takes much longer than usual gets a hedged request
//! beside it: the missing bytes are requested a second time, and the answer that is complete first is used.

use super::concurrency::Permit;
use super::pieces::Pieces;
use super::retry::{Attempts, repeat};
use super::runtime;
use crate::error::Result;
use crate::num::{to_u64, to_usize};
use crate::profile::{self, Count};
use crate::remote::find::version::Version;
use crate::remote::stores::http_error::STALL_BYTES;
use crate::remote::stores::{Answer, Attempt, Failure, FailureClass, Store};
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
pub struct Target<'a> {
    /// Service of the object.
    pub store: &'a dyn Store,
    /// Key of the object.
    pub key: &'a str,
    /// URL for errors.
    pub url: &'a str,
    /// Permit of the request.
    pub permit: &'a Permit<'a>,
}

impl Target<'_> {
    /// Requests the first `bytes_max` bytes, and with them the length and the version. The answer has just begun.
    pub(super) async fn first(&self, bytes_max: u64) -> Result<(Answer, u64)> {
        let attempt = || async {
            profile::count(Count::Requests, 1);
            let answer = self.store.get(self.key, 0..bytes_max, None).await?;
            let length = answer.length.ok_or_else(|| {
                let message = "the server does not state the length of the file; it must be in Content-Range, or in \
                               Content-Length of the answer to HEAD";
                Failure::new(FailureClass::Permanent, message)
            })?;
            check_range(&answer.range, &(0..length.min(bytes_max)))?;
            Ok((answer, length))
        };
        repeat(self.url, self.permit.host(), Some(0), 0, attempt).await
    }

    /// Fills pieces of an object of this length and version.
    pub async fn fill(&self, pieces: &mut Pieces<'_>, length: u64, version: &Version) -> Result<()> {
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

    /// Fills pieces from the answer that is complete first: from one request, or from a hedged one beside it.
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
        profile::count(Count::Requests, 1);
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
    let Answer { range: Range { start, end }, mut body, unreceived, .. } = answer;
    if let Some(mut rest) = unreceived.and_then(|body| body.take()) {
        if rest.left() > end - pieces.reached() {
            return Err(too_long());
        }
        while rest.left() > 0 {
            let count = rest.receive(pieces.room()).await?;
            pieces.advance(count);
            arrived(to_u64(count), pieces.reached());
        }
        rest.end();
    }
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
        if let Some(length) = answer.length.filter(|length| *length != self.length) {
            return Err(Failure::changed(&format!(
                "the object had {} bytes and now has {length}; it changed while it was loaded",
                self.length
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
