//! Ranges of objects, from the first byte to the last, whatever happens on the way.

use super::store::{Answer, Failure, FailureClass, Store, Version};
use super::streams::Host;
use crate::error::{Error, Result};
use crate::num::{to_u64, to_usize};
use crate::profile::{self, Count};
use futures_util::StreamExt;
use std::future::Future;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Number of times that a range is requested before its load fails, each from the byte that was reached.
pub const ATTEMPTS_MAX: usize = 8;
/// Time after which a request is not repeated any more.
const DEADLINE: Duration = Duration::from_secs(300);
/// Pause before the first repetition. Each further one is twice as long.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Object to request ranges of.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) key: &'a str,
    /// URL for errors.
    pub(super) url: &'a str,
    pub(super) host: &'a Host,
}

/// First answer of an object.
pub(super) struct First {
    pub(super) length: u64,
    pub(super) version: Version,
    pub(super) bytes: Vec<u8>,
}

impl Target<'_> {
    /// Requests the first `bytes_max` bytes, and with them the length and the version.
    pub(super) async fn first(&self, bytes_max: u64) -> Result<First> {
        repeat(self.url, self.host, Some(0), to_usize(bytes_max), || self.try_first(bytes_max)).await
    }

    async fn try_first(&self, bytes_max: u64) -> std::result::Result<First, Failure> {
        let Answer { length, version, range, mut body } = self.store.get(self.key, 0..bytes_max, None).await?;
        let expected = 0..length.min(bytes_max);
        check_range(&range, &expected)?;
        let mut bytes = Vec::with_capacity(to_usize(expected.end));
        while let Some(frame) = body.next().await {
            bytes.extend_from_slice(&frame?);
            if to_u64(bytes.len()) > expected.end {
                return Err(too_long());
            }
        }
        if to_u64(bytes.len()) < expected.end {
            return Err(too_short(to_u64(bytes.len()), expected.end));
        }
        Ok(First { length, version, bytes })
    }

    /// Fills `into` with the bytes from `offset` of an object of this length and version.
    pub(super) async fn fill(&self, offset: u64, into: &mut [u8], length: u64, version: &Version) -> Result<()> {
        let end = offset.saturating_add(to_u64(into.len()));
        let mut attempts = Attempts::new(self.url, self.host);
        let mut filled = 0;
        while filled < into.len() {
            let begin = offset.saturating_add(to_u64(filled));
            let rest = into.get_mut(filled..).unwrap_or_default();
            let expected = Expected { range: begin..end, length, version };
            if let Err(failure) = self.try_fill(&expected, rest, &mut filled).await {
                let reached = offset.saturating_add(to_u64(filled));
                attempts.prepare(failure, Some(reached), to_usize(end - reached)).await?;
            }
        }
        Ok(())
    }

    /// Fills `into` from one answer, and adds the bytes that arrived to `filled` also if it fails.
    async fn try_fill(
        &self,
        expected: &Expected<'_>,
        into: &mut [u8],
        filled: &mut usize,
    ) -> std::result::Result<(), Failure> {
        let answer = self.store.get(self.key, expected.range.clone(), Some(expected.version)).await?;
        expected.check(&answer)?;
        let mut body = answer.body;
        let mut rest = into;
        while let Some(frame) = body.next().await {
            let frame = frame?;
            let (now, later) = std::mem::take(&mut rest).split_at_mut_checked(frame.len()).ok_or_else(too_long)?;
            now.copy_from_slice(&frame);
            *filled += frame.len();
            rest = later;
        }
        match to_u64(rest.len()) {
            0 => Ok(()),
            missing => {
                let bytes = expected.range.end - expected.range.start;
                Err(too_short(bytes - missing, bytes))
            }
        }
    }
}

/// Answer that a request should get.
struct Expected<'a> {
    range: Range<u64>,
    length: u64,
    version: &'a Version,
}

impl Expected<'_> {
    fn check(&self, answer: &Answer) -> std::result::Result<(), Failure> {
        if !self.version.matches(&answer.version) {
            return Err(changed("the object changed while it was loaded"));
        }
        if self.length != answer.length {
            return Err(changed(&format!(
                "the object had {} bytes and now has {}; it changed while it was loaded",
                self.length, answer.length
            )));
        }
        check_range(&answer.range, &self.range)
    }
}

/// Returns the failure of a load whose object was replaced.
pub(super) fn changed(what: &str) -> Failure {
    Failure::new(FailureClass::Changed, format!("{what}; load it again to get the new version"))
}

fn check_range(found: &Range<u64>, expected: &Range<u64>) -> std::result::Result<(), Failure> {
    if found == expected {
        return Ok(());
    }
    let message = format!(
        "the server answered with bytes {}..{}, but {}..{} were requested; a server or proxy on the way is faulty",
        found.start, found.end, expected.start, expected.end
    );
    Err(Failure::new(FailureClass::Permanent, message))
}

fn too_long() -> Failure {
    Failure::new(FailureClass::Permanent, "the server sent more bytes than were requested; it is faulty")
}

fn too_short(found: u64, expected: u64) -> Failure {
    Failure::new(FailureClass::Transient, format!("the answer ended after {found} of {expected} bytes"))
}

/// Runs a request, and runs it again from its beginning after failures that may pass. It transfers `bytes` bytes, from
/// `offset` of the object if it concerns some.
pub(super) async fn repeat<T, F>(
    url: &str,
    host: &Host,
    offset: Option<u64>,
    bytes: usize,
    request: impl Fn() -> F,
) -> Result<T>
where
    F: Future<Output = std::result::Result<T, Failure>>,
{
    let mut attempts = Attempts::new(url, host);
    loop {
        match request().await {
            Ok(answer) => return Ok(answer),
            Err(failure) => attempts.prepare(failure, offset, bytes).await?,
        }
    }
}

/// Repetitions of one request.
struct Attempts<'a> {
    /// URL for errors.
    url: &'a str,
    host: &'a Host,
    begin: Instant,
    failed: usize,
    pause: Duration,
}

impl<'a> Attempts<'a> {
    fn new(url: &'a str, host: &'a Host) -> Self {
        Attempts { url, host, begin: Instant::now(), failed: 0, pause: PAUSE_FIRST }
    }

    /// Waits before the next attempt, which transfers `bytes` bytes again.
    ///
    /// # Errors
    /// That of the failure, with the byte that was reached, if the request is not to be repeated.
    async fn prepare(&mut self, failure: Failure, reached: Option<u64>, bytes: usize) -> Result<()> {
        self.failed += 1;
        if !failure.is_transient() {
            return Err(self.error(failure, reached));
        }
        let mut pause = self.pause;
        if let FailureClass::RateLimited(stated) = failure.class {
            profile::count(Count::RateLimits, 1);
            self.host.halve();
            pause = stated.unwrap_or(pause);
        }
        if self.failed >= ATTEMPTS_MAX || self.begin.elapsed() + pause > DEADLINE {
            let failed = self.failed;
            let message = format!("{} ({failed} requests failed; the last one is described)", failure.message);
            return Err(self.error(Failure { message, ..failure }, reached));
        }
        profile::count(Count::Retries, 1);
        profile::count(Count::RepeatedBytes, bytes);
        tracing::info!(url = self.url, byte = reached, why = failure.message, "the request is repeated");
        tokio::time::sleep(pause).await;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Ok(())
    }

    fn error(&self, failure: Failure, reached: Option<u64>) -> Error {
        let error = failure.into_error(self.url);
        match reached {
            Some(reached) => error.offset(reached),
            None => error,
        }
    }
}
