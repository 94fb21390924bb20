//! Repetitions of requests after failures that may pass.

use super::concurrency::Host;
use crate::error::{Error, Result};
use crate::profile::{self, Count};
use crate::remote::stores::{Attempt, Failure, FailureClass};
use std::future::Future;
use std::time::Duration;
use tokio::time::Instant;

/// Number of times that a range is requested before its load fails, each from the byte that was reached.
pub const ATTEMPTS_MAX: usize = 8;
/// Number of times if the port of the server refuses connections or is not one of HTTP, and nothing of the object has
/// arrived.
const NO_SERVER_ATTEMPTS_MAX: usize = 4;
/// Time after which a request is not repeated any more.
const DEADLINE: Duration = Duration::from_secs(300);
/// Pause before the first repetition. Each further one is twice as long.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Runs a request, and runs it again from its beginning after failures that may pass. It transfers `bytes` bytes, from
/// `offset` of the object if it concerns some.
pub async fn repeat<T, F>(
    url: &str,
    host: &Host,
    offset: Option<u64>,
    bytes: usize,
    request: impl Fn() -> F,
) -> Result<T>
where
    F: Future<Output = Attempt<T>>,
{
    let mut attempts = Attempts::new(url, host);
    loop {
        match request().await {
            Ok(answer) => return Ok(answer),
            Err(failure) => attempts.prepare(failure, offset, bytes).await?,
        }
    }
}

pub(super) struct Attempts<'a> {
    /// URL for errors.
    url: &'a str,
    host: &'a Host,
    begin: Instant,
    failed: usize,
    pause: Duration,
}

impl<'a> Attempts<'a> {
    pub(super) fn new(url: &'a str, host: &'a Host) -> Self {
        Attempts { url, host, begin: Instant::now(), failed: 0, pause: PAUSE_FIRST }
    }

    /// Waits before the next attempt, which transfers `bytes` bytes again. Fails with the error of the failure, with
    /// the byte that was reached, if the request is not to be repeated.
    pub(super) async fn prepare(&mut self, failure: Failure, reached: Option<u64>, bytes: usize) -> Result<()> {
        self.failed += 1;
        if !failure.is_transient() {
            return Err(self.error(failure, reached));
        }
        let mut pause = self.pause;
        if let FailureClass::RateLimited(stated) = failure.class {
            profile::count(Count::RateLimits, 1);
            self.host.halve();
            pause = pause.max(stated.unwrap_or_default());
        }
        // No server of the object is there. One that was lost in the middle of an object may be starting again.
        let is_absent = failure.class == FailureClass::NoServer && reached.is_none_or(|reached| reached == 0);
        let attempts_max = if is_absent { NO_SERVER_ATTEMPTS_MAX } else { ATTEMPTS_MAX };
        if self.failed >= attempts_max || self.begin.elapsed() + pause > DEADLINE {
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
