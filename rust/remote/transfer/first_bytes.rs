//! First bytes of objects, which arrive with their lengths and versions.
//!
//! Most headers are shorter than what the first request asks for. An object is therefore open once the answer begins, and
//! its bytes are received when they are needed: the answer waits meanwhile, with the runtime that its connection belongs to.
//! Other connections can so be opened while the rest of the first bytes is on its way.

use super::get::{Body, Target, too_long, too_short};
use super::runtime::Runtime;
use crate::error::Result;
use crate::num::{to_u64, to_usize};
use crate::os::memory;
use crate::os::per_process::PerProcess;
use crate::os::retry::Check;
use crate::profile::{self, Count};
use crate::remote::stores::Attempt;
use futures_util::StreamExt;
use futures_util::lock::{Mutex, MutexGuard};
use std::fmt;
use std::future::Future;
use std::time::Duration;
use tokio::time::Instant;

/// First bytes of an object.
///
/// A forked child cannot use its parent's connections. It has none of the bytes, and requests those that it needs.
pub(super) struct FirstBytes {
    length: u64,
    arrived: PerProcess<Mutex<Received>>,
}

/// The bytes that have arrived, and the answer that has the others.
#[derive(Default)]
pub(super) struct Received {
    bytes: Vec<u8>,
    /// `None` once the answer has ended, or has failed.
    rest: Option<Rest>,
    /// The runtime that runs the answer, while nobody receives it.
    runtime: Option<Runtime>,
}

impl Drop for Received {
    /// Leaves the rest to the next request of the runtime.
    fn drop(&mut self) {
        if let (Some(mut rest), Some(runtime)) = (self.rest.take(), self.runtime.take()) {
            runtime.free_after(async move { while rest.body.next().await.is_some() {} });
        }
    }
}

struct Rest {
    body: Body,
    /// Number of all bytes of the answer.
    end: usize,
    /// Time that was spent on the answer so far.
    elapsed: Duration,
}

impl fmt::Debug for FirstBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FirstBytes").field("length", &self.length).finish_non_exhaustive()
    }
}

impl FirstBytes {
    /// Creates the first bytes from those that have arrived.
    pub(super) fn new(arrived: Received) -> FirstBytes {
        let length = arrived.rest.as_ref().map_or(arrived.bytes.len(), |rest| rest.end);
        let first_bytes = FirstBytes { length: to_u64(length), arrived: PerProcess::new(Mutex::default) };
        if let Some(mut own) = first_bytes.try_lock() {
            *own = arrived;
        }
        first_bytes
    }

    /// Returns the number of the first bytes, also of those that have not arrived.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Returns the bytes, or `None` while another thread receives more of them.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Received>> {
        self.arrived.get().try_lock()
    }

    /// Waits until no other thread receives bytes.
    pub(super) async fn wait(&self) {
        drop(self.arrived.get().lock().await);
    }
}

impl Received {
    /// Creates the first bytes, all of which have arrived.
    pub(super) fn all(bytes: Vec<u8>) -> Received {
        Received { bytes, rest: None, runtime: None }
    }

    /// Creates the first bytes from an answer that has just begun, and that took `elapsed` to do so.
    pub(super) fn begin(body: Body, end: u64, elapsed: Duration) -> Received {
        let rest = Rest { body, end: to_usize(end), elapsed };
        Received { bytes: Vec::with_capacity(rest.end), rest: Some(rest), runtime: None }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Copies the bytes that have arrived to buffers, each with the offset of its first byte. Returns the buffers for the
    /// others.
    pub(super) fn copy<'a>(&self, buffers: Vec<(u64, &'a mut [u8])>) -> Vec<(u64, &'a mut [u8])> {
        let rest = |(offset, into): (u64, &'a mut [u8])| {
            let known = self.bytes.get(to_usize(offset)..).unwrap_or_default();
            let (first, rest) = into.split_at_mut(known.len().min(into.len()));
            memory::populate(first);
            first.copy_from_slice(known.get(..first.len()).unwrap_or_default());
            (!rest.is_empty()).then(|| (offset.saturating_add(to_u64(first.len())), rest))
        };
        buffers.into_iter().filter_map(rest).collect()
    }

    pub(super) fn has_rest(&self) -> bool {
        self.rest.is_some()
    }

    /// Keeps the runtime that ran the answer for the rest of it, or frees it.
    #[must_use]
    pub(super) fn with_runtime(mut self, runtime: Option<Runtime>) -> Received {
        self.set_runtime(runtime);
        self
    }

    fn set_runtime(&mut self, runtime: Option<Runtime>) {
        match runtime {
            Some(runtime) if self.has_rest() => self.runtime = Some(runtime),
            Some(runtime) => runtime.free(),
            // Its connections are closed.
            None => self.rest = None,
        }
    }

    /// Receives bytes until there are `end` of them, and then runs other requests on the same runtime, whose connection
    /// they use. To open another connection beside it would take as long as the rest of an answer. Fails with the
    /// errors of [`receive`](Received::receive) and of the other requests; the error of `check`.
    pub(super) fn receive_before<T: Send>(
        &mut self,
        end: u64,
        target: &Target<'_>,
        check: Check<'_>,
        others: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let runtime = match self.runtime.take() {
            Some(runtime) => runtime,
            None => Runtime::take()?,
        };
        let (runtime, result) = runtime.run(check, async {
            self.receive(end, target).await?;
            others.await
        });
        self.set_runtime(runtime);
        result
    }

    /// Receives bytes until there are `end` of them. After a failure that may pass there are fewer, and the caller
    /// requests the others. The caller runs the runtime. Fails with `io` if the server sends too many bytes.
    pub(super) async fn receive(&mut self, end: u64, target: &Target<'_>) -> Result<()> {
        let Some(mut rest) = self.rest.take() else { return Ok(()) };
        let (begin, all) = (Instant::now(), rest.end);
        let received = self.try_receive(&mut rest, to_usize(end).min(all), target).await;
        rest.elapsed += begin.elapsed();
        let reached = self.bytes.len();
        match received {
            Ok(()) if reached < all => self.rest = Some(rest),
            Ok(()) => target.permit.host().arrived(to_u64(all), rest.elapsed),
            Err(failure) if failure.is_transient() => {
                profile::count(Count::Retries, 1);
                profile::count(Count::RepeatedBytes, all - reached);
                tracing::info!(url = target.url, byte = reached, why = failure.message, "the request is repeated");
            }
            Err(failure) => return Err(failure.into_error(target.url).offset(to_u64(reached))),
        }
        Ok(())
    }

    async fn try_receive(&mut self, rest: &mut Rest, end: usize, target: &Target<'_>) -> Attempt<()> {
        while self.bytes.len() < end {
            let reached = self.bytes.len();
            let ended = || Err(too_short(to_u64(reached), to_u64(rest.end)));
            let frame = rest.body.next().await.unwrap_or_else(ended)?;
            if frame.len() > rest.end - reached {
                return Err(too_long());
            }
            self.bytes.extend_from_slice(&frame);
            target.permit.received(to_u64(frame.len()));
        }
        // A connection is free for other requests once the end of its answer was seen.
        match if end == rest.end { rest.body.next().await } else { None } {
            Some(frame) => frame.and_then(|_| Err(too_long())),
            None => Ok(()),
        }
    }
}
