//! The slots through which the bytes of one load travel.
//!
//! ```text
//! Free --acquire--> Reading --submit--> Copying --(copy done)--> Free
//! ```
//!
//! Where a slot stands is who owns it, so no flag can be wrong: a free slot
//! belongs to the process's pool or to the load's, a reading one to the worker
//! that holds the [`Slot`], a copying one to the load's queue together with
//! the ticket of its copy.

pub mod pool;

use crate::device::Device;
use crate::error::Result;
use crate::plan::SlotCopy;
use crate::profile::{self, Stage};
pub use pool::{Block, PAGE_BYTES, Request, Slot};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// While other loads hold all memory, how long until a waiting one looks whether it should go on waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The slots of one load and the copies that run from them to `device`.
pub struct Staging<D: Device> {
    state: Mutex<State<D::CopyEvent>>,
    changed: Condvar,
    request: Request,
    slot_count_max: usize,
    device: Arc<D>,
}

struct State<T> {
    free: Vec<Slot>,
    /// The oldest first, which is about the order in which copies end.
    copying: VecDeque<(Slot, T)>,
    /// Slots that the load has, wherever they stand.
    slot_count: usize,
}

impl<D: Device> Staging<D> {
    /// Staging of at most `slot_count_max` slots, which are taken when they are needed.
    pub fn new(device: Arc<D>, slot_count_max: usize, request: Request) -> Self {
        tracing::debug!(slot_count_max, slot_bytes = request.bytes, "staging");
        let state = State { free: Vec::new(), copying: VecDeque::new(), slot_count: 0 };
        Staging { state: Mutex::new(state), changed: Condvar::new(), request, slot_count_max, device }
    }

    /// Whether this staging would serve another filling.
    pub fn has(&self, slot_count_max: usize, request: &Request) -> bool {
        self.slot_count_max >= slot_count_max && self.request.bytes >= request.bytes
    }

    /// Waits for a free slot for as long as `go_on` says so.
    ///
    /// # Errors
    /// That of the copy that had to end first, that of `go_on`, or `out-of-memory`.
    pub fn acquire(&self, go_on: impl Fn() -> Result<()>) -> Result<Slot> {
        let _span = profile::span(Stage::Slot);
        let mut state = self.lock();
        loop {
            if let Some(slot) = state.free.pop() {
                return Ok(slot);
            }
            let is_oldest_done = match state.copying.front() {
                Some((_, copy)) => self.device.is_done(copy)?,
                None => false,
            };
            if !is_oldest_done && state.slot_count < self.slot_count_max {
                state.slot_count += 1;
                drop(state);
                match self.take() {
                    Ok(Some(slot)) => return Ok(slot),
                    refused => {
                        state = self.lock();
                        state.slot_count -= 1;
                        refused?;
                    }
                }
            }
            if let Some((slot, copy)) = state.copying.pop_front() {
                drop(state);
                return self.device.wait(copy).map(|()| slot).inspect_err(|_| self.forget_slot());
            }
            state = if state.slot_count > 0 {
                // Every slot is being read into by another worker.
                self.changed.wait_timeout(state, POLL_INTERVAL).map_or_else(|e| e.into_inner().0, |(state, _)| state)
            } else {
                drop(state);
                pool::wait(POLL_INTERVAL);
                self.lock()
            };
            go_on()?;
        }
    }

    /// A slot of the process's pool, pinned if the device can.
    fn take(&self) -> Result<Option<Slot>> {
        let mut slot = pool::take(&self.request)?;
        if let Some(slot) = &mut slot {
            slot.pin(|bytes| self.device.pin(bytes));
        }
        Ok(slot)
    }

    /// Gives back a slot from which nothing is copied.
    pub fn release(&self, slot: Slot) {
        self.lock().free.push(slot);
        self.changed.notify_one();
    }

    /// Starts the copies out of a slot, which becomes free when they have ended. The chunk is its first `bytes`.
    ///
    /// # Errors
    /// That of the device; the slot is free then.
    pub fn submit(&self, mut slot: Slot, bytes: usize, copies: &[SlotCopy]) -> Result<()> {
        match self.device.copy(slot.bytes_mut(), bytes, copies) {
            Ok(copy) => {
                self.lock().copying.push_back((slot, copy));
                self.changed.notify_one();
                Ok(())
            }
            Err(error) => {
                self.release(slot);
                Err(error)
            }
        }
    }

    /// Waits until no copy runs from any slot.
    ///
    /// # Errors
    /// The first of a copy that failed.
    pub fn drain(&self) -> Result<()> {
        let mut result = Ok(());
        while let Some((slot, copy)) = { self.lock().copying.pop_front() } {
            result = result.and(self.device.wait(copy));
            self.release(slot);
        }
        result
    }

    /// A slot has gone back to the process's pool.
    fn forget_slot(&self) {
        self.lock().slot_count -= 1;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State<D::CopyEvent>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Device> Drop for Staging<D> {
    /// Memory from which a copy still runs must not go to another load.
    fn drop(&mut self) {
        if let Err(error) = self.drain() {
            tracing::debug!(%error, "a copy failed after the load had ended");
        }
    }
}
