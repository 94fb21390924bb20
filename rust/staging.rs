//! Staging slots of one load, through which bytes pass from files to a device.
//!
//! ```text
//! Free --acquire--> Reading --submit--> Copying --(copy done)--> Free
//! ```
//!
//! Ownership expresses the state of a slot, so that no flag can be wrong. A free slot belongs to the pool of the
//! process or to the load. A slot that is read into belongs to the worker with the [`Slot`]. A slot that is copied from
//! is in the queue of the load, with the event of its copy. The slot of a load of one chunk is in the pool with that event
//! instead, so that the load need not wait.

pub mod ahead;
pub mod pool;
pub mod shared_slot;

use crate::device::{CopyInFlight, Device};
use crate::error::Result;
use crate::options::experiments::{self, Switch};
use crate::os::mutex::{Condvar, Mutex};
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::plan::SlotCopy;
pub use pool::{Block, PAGE_BYTES, Request, Slot};
use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

/// Largest number of slots of a load that are as short as their chunks.
const SHORT_SLOTS_MAX: usize = 4;

/// Returns the size of the first chunk of a large load to a device that pins, from which chunks double until they fill a
/// slot, or `None` if all of them fill a slot.
pub fn first_chunk_bytes() -> Option<usize> {
    experiments::value(Switch::FirstChunkKib).filter(|kib| *kib > 0).map(|kib| kib << 10)
}

/// Slots of one load, and the copies in flight from them to `device`.
pub struct Staging<D: Device> {
    state: Mutex<State<D::CopyEvent>>,
    changed: Condvar,
    request: Request,
    slot_count_max: usize,
    device: Arc<D>,
}

struct State<E> {
    free: Vec<Slot>,
    /// The oldest copy first, which is about the order in which copies finish.
    copying: VecDeque<(Slot, E)>,
    /// Number of slots of the load, in any state.
    slot_count: usize,
    /// Whether a worker pins another slot.
    is_pinning: bool,
}

impl<D: Device> Staging<D> {
    /// Creates staging of at most `slot_count_max` slots, which are taken from the pool when they are needed.
    pub fn new(device: Arc<D>, slot_count_max: usize, request: Request) -> Self {
        tracing::debug!(slot_count_max, slot_bytes = request.bytes, "staging");
        let state = State { free: Vec::new(), copying: VecDeque::new(), slot_count: 0, is_pinning: false };
        Staging { state: Mutex::new(state), changed: Condvar::new(), request, slot_count_max, device }
    }

    /// Returns whether this staging has enough slots of a sufficient size.
    pub fn suffices(&self, slot_count_max: usize, request: &Request) -> bool {
        self.slot_count_max >= slot_count_max && self.request.bytes >= request.bytes
    }

    /// Waits for a free slot for `bytes` bytes. Calls `check` from time to time, and ends with its error.
    ///
    /// The load takes another slot while fewer copies are in flight than keep the device busy. One worker at a time pins it,
    /// because the driver starts no copy meanwhile. The other workers wait for the copies from the slots that there are.
    ///
    /// # Errors
    /// The error of the copy that had to finish first, the error of `check`, or `out-of-memory`.
    pub fn acquire(&self, bytes: usize, check: Check<'_>) -> Result<Slot> {
        let fits = |slot: &Slot| slot.holds(bytes);
        let mut may_grow = true;
        loop {
            let mut state = self.state.lock();
            if let Some(index) = state.free.iter().rposition(fits) {
                return Ok(state.free.remove(index));
            }
            let fitting = state.copying.iter().position(|(slot, _)| fits(slot));
            let is_idle = state.copying.len() <= D::copies_ahead() || fitting.is_none();
            may_grow &= state.slot_count < self.slot_count_max && is_idle;
            let mut short = Vec::new();
            if fitting.is_none() && !may_grow {
                // The bound of the pool may have no room for a longer slot beside the short ones.
                short = mem::take(&mut state.free);
                state.slot_count -= short.len();
            }
            let oldest =
                state.copying.remove(if may_grow { fitting.unwrap_or(usize::MAX) } else { fitting.unwrap_or(0) });
            // No lock is held during calls of the driver, which may take their time.
            drop(state);
            drop(short);
            if let Some((slot, copy)) = oldest {
                let is_done = if may_grow { copy.is_done() } else { copy.wait(check).map(|()| true) };
                match is_done {
                    Ok(true) if fits(&slot) => return Ok(slot),
                    Ok(true) => {
                        self.release(slot);
                        continue;
                    }
                    _ => {}
                }
                self.state.lock().copying.push_front((slot, copy));
                self.changed.notify_one();
                is_done?;
            }
            if may_grow {
                if let Some(slot) = self.grow(bytes, check)? {
                    return Ok(slot);
                }
                may_grow = false;
                continue;
            }
            self.wait_for_change(fits);
            may_grow = true;
            check()?;
        }
    }

    /// Takes a slot of the pool, and pins it if the device supports it. Returns `None` if another worker does, or if a bound
    /// leaves no room.
    fn grow(&self, bytes: usize, check: Check<'_>) -> Result<Option<Slot>> {
        let mut state = self.state.lock();
        if state.slot_count == self.slot_count_max {
            return Ok(None);
        }
        let request = self.request_for(bytes, state.slot_count);
        if D::PINS {
            if let Some(slot) = pool::take_pinned(&request) {
                state.slot_count += 1;
                return Ok(Some(slot));
            }
            if mem::replace(&mut state.is_pinning, true) {
                return Ok(None);
            }
        }
        state.slot_count += 1;
        drop(state);
        let mut taken = pool::take(&request, check);
        if let Ok(Some(slot)) = &mut taken {
            slot.pin(|memory| self.device.pin(memory));
        }
        let mut state = self.state.lock();
        state.is_pinning = false;
        state.slot_count -= usize::from(!matches!(taken, Ok(Some(_))));
        self.changed.notify_one();
        taken
    }

    /// Pins slots until the load has `count` of them, unless a worker pins one or a bound leaves no room. The load gets
    /// each at once.
    ///
    /// # Errors
    /// The error of `check`, or `out-of-memory`.
    fn pin_ahead(&self, count: usize, check: Check<'_>) -> Result<()> {
        while self.state.lock().slot_count < count {
            check()?;
            let Some(slot) = self.grow(self.request.bytes, check)? else { break };
            self.release(slot);
        }
        Ok(())
    }

    /// Returns the requirements for the next slot, for a chunk of `bytes` bytes. The slots of a ramp are as short as its chunks,
    /// and so are pinned sooner.
    fn request_for(&self, bytes: usize, slot_count: usize) -> Request {
        let short_bytes = bytes.next_power_of_two();
        let is_short = first_chunk_bytes().is_some()
            && slot_count < SHORT_SLOTS_MAX
            && self.slot_count_max > 2 * SHORT_SLOTS_MAX
            && short_bytes < self.request.bytes;
        Request { bytes: if is_short { short_bytes } else { self.request.bytes }, ..self.request }
    }

    /// Waits while there is neither a free slot that fits nor a copy in flight from one, at most for an interval.
    fn wait_for_change(&self, fits: impl Fn(&Slot) -> bool) {
        let state = self.state.lock();
        if state.slot_count == 0 {
            // Other loads hold all staging memory.
            drop(state);
            pool::wait();
        } else if !state.free.iter().chain(state.copying.iter().map(|(slot, _)| slot)).any(fits) {
            // Other workers pin a slot, read into all of them, or wait for the copies.
            drop(self.changed.wait_timeout(state, pool::POLL_INTERVAL));
        }
    }

    /// Frees a slot from which no copy is in flight.
    pub fn release(&self, slot: Slot) {
        self.state.lock().free.push(slot);
        self.changed.notify_one();
    }

    /// Starts the copies from a slot, whose first `bytes` bytes are the chunk. The slot is free once they are done.
    ///
    /// # Errors
    /// The device's error. The slot is free once the copies that were started are done.
    pub fn submit(&self, mut slot: Slot, bytes: usize, copies: &[SlotCopy]) -> Result<()> {
        match self.device.copy(slot.bytes_mut(), bytes, copies) {
            Ok(mut copy) => {
                let failure = copy.take_failure();
                self.state.lock().copying.push_back((slot, copy));
                self.changed.notify_one();
                failure
            }
            Err(error) => {
                self.release(slot);
                Err(error)
            }
        }
    }

    /// Waits until no copy is in flight. If `check` ends the wait, the slots return to the pool with their copies, and later
    /// work of the caller waits for these.
    pub fn drain(&self, check: Check<'_>) -> Result<()> {
        let copying = mem::take(&mut self.state.lock().copying);
        if copying.is_empty() {
            return Ok(());
        }
        let waited = self.device.wait_for_copies(check);
        if waited.is_ok() || check().is_ok() {
            copying.into_iter().for_each(|(slot, _)| self.release(slot));
            return waited;
        }
        self.device.leave_copies();
        self.state.lock().slot_count -= copying.len();
        copying.into_iter().for_each(|(mut slot, copy)| slot.hold(copy));
        waited
    }
}

impl<D: Device> Drop for Staging<D> {
    /// Waits for the copies, because another load may take the memory next.
    fn drop(&mut self) {
        let watch = Watch::begin();
        if let Err(error) = self.drain(&|| watch.check()) {
            tracing::debug!(%error, "a copy failed after the load had ended");
        }
    }
}
