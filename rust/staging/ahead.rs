//! Thread that pins staging slots of a load, while the caller opens files and allocates tensors.

use super::Staging;
use crate::device::Device;
use crate::error::{Error, Kind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Thread that pins slots. Dropping it ends the thread after the slot that it pins.
pub struct PinAhead {
    is_closed: Arc<AtomicBool>,
    /// `None` once it was joined.
    thread: Option<JoinHandle<()>>,
}

impl PinAhead {
    /// Pins slots until the load has `count` of them. Returns `None` if no thread can be started: workers pin the slots then.
    pub fn start<D: Device>(staging: &Arc<Staging<D>>, count: usize) -> Option<PinAhead> {
        let is_closed = Arc::new(AtomicBool::new(false));
        let (staging, closed) = (Arc::clone(staging), Arc::clone(&is_closed));
        let check = move || match closed.load(Ordering::Relaxed) {
            true => Err(Error::new(Kind::Interrupted, "the load has ended")),
            false => Ok(()),
        };
        let run = move || {
            // A worker that needs a slot meets the same error.
            if let Err(error) = staging.pin_ahead(count, &check) {
                tracing::debug!(%error, "a thread pins no more slots");
            }
        };
        let started = thread::Builder::new().name("fst pin".into()).spawn(run);
        let thread =
            started.inspect_err(|error| tracing::debug!(%error, "cannot start a thread, so workers pin slots"));
        Some(PinAhead { is_closed, thread: Some(thread.ok()?) })
    }
}

impl Drop for PinAhead {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that pins slots has panicked");
        }
    }
}
