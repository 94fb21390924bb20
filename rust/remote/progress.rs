//! Connections on which bytes arrive too slowly.

use super::store::{Failure, FailureClass};
use std::future::Future;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Number of bytes that arrive at least in the time of a stall, or all that are missing. A record of TLS has as many, and
/// can be used only once it is whole.
pub(super) const STALL_BYTES: usize = 16 << 10;

/// Bytes of an answer since the connection last was fast enough.
#[derive(Debug)]
pub struct Progress {
    stall: Duration,
    /// Time since the last [`STALL_BYTES`] bytes, without that in which nobody waited.
    waited: Duration,
    bytes: usize,
}

impl Progress {
    /// Creates the progress of an answer, of which nothing has arrived. Fewer than [`STALL_BYTES`] bytes in the time
    /// `stall` are a failure.
    pub fn new(stall: Duration) -> Progress {
        Progress { stall, waited: Duration::ZERO, bytes: 0 }
    }

    /// Waits for bytes, of which `length` returns the number. Returns `None` if too few have arrived in time.
    pub async fn receive<T>(&mut self, bytes: impl Future<Output = T>, length: impl FnOnce(&T) -> usize) -> Option<T> {
        let begin = Instant::now();
        let arrived = timeout(self.stall.saturating_sub(self.waited), bytes).await.ok()?;
        self.waited += begin.elapsed();
        self.bytes += length(&arrived);
        if self.bytes >= STALL_BYTES {
            *self = Progress::new(self.stall);
        }
        Some(arrived)
    }
}

/// Returns the failure of a connection on which too few bytes arrive.
pub(super) fn stalled() -> Failure {
    let message = format!("the connection stalled: fewer than {STALL_BYTES} bytes in the time of FST_STALL_SECONDS");
    Failure::new(FailureClass::Transient, message)
}
