//! Connections on which bytes arrive too slowly.

use super::store::{Failure, FailureClass};
use std::future::Future;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Number of bytes that arrive at least in the time of a stall, or all that are missing. A record of TLS has as many, and
/// can be used only once it is whole.
pub(super) const STALL_BYTES: usize = 16 << 10;

#[derive(Debug)]
pub(super) struct Progress {
    stall: Duration,
    /// Time since the last [`STALL_BYTES`] bytes, without that in which nobody waited.
    waited: Duration,
    bytes: usize,
}

impl Progress {
    /// Creates the progress of an answer, of which nothing has arrived. Fewer than [`STALL_BYTES`] bytes in the time
    /// `stall` are a failure.
    pub(super) fn new(stall: Duration) -> Progress {
        Progress { stall, waited: Duration::ZERO, bytes: 0 }
    }

    /// Waits for bytes, of which `length` returns the number. Returns `None` if too few have arrived in time.
    pub(super) async fn receive<T>(
        &mut self,
        bytes: impl Future<Output = T>,
        length: impl FnOnce(&T) -> usize,
    ) -> Option<T> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::sleep;

    /// Returns the number of frames of `bytes` bytes that arrive before the connection counts as stalled, with a pause
    /// of `wait` before each and one of `idle` in which nobody waits. The time of a stall is 10 s.
    fn frames(bytes: usize, wait: Duration, idle: Duration) -> usize {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut progress = Progress::new(Duration::from_secs(10));
            for count in 0..100 {
                sleep(idle).await;
                if progress.receive(sleep(wait), |()| bytes).await.is_none() {
                    return count;
                }
            }
            100
        })
    }

    #[test]
    fn slow_connections_stall_and_slow_receivers_do_not() {
        let seconds = Duration::from_secs;
        assert_eq!(frames(STALL_BYTES, seconds(11), seconds(0)), 0, "no byte");
        assert_eq!(frames(1, seconds(1), seconds(0)), 10, "a byte each second");
        assert_eq!(frames(STALL_BYTES / 8, seconds(1), seconds(0)), 100);
        assert_eq!(frames(STALL_BYTES, seconds(9), seconds(0)), 100);
        assert_eq!(frames(STALL_BYTES / 8, seconds(1), seconds(60)), 100);
    }
}
