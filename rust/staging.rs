//! A fixed pool of page-aligned slots through which bytes travel.
//!
//! ```text
//! Free --acquire--> Reading --submit--> Copying --(copy done)--> Free
//! ```
//!
//! Where a slot stands is who owns it, so no flag can be wrong: a free slot
//! belongs to the pool, a reading one to the worker that holds the [`Slot`],
//! a copying one to the pool's queue together with the ticket of its copy.

use crate::device::Device;
use crate::error::{Error, Kind, Result};
use crate::plan::Placement;
use memmap2::{Advice, MmapMut, MmapRaw};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A slot that its holder may write.
pub struct Slot {
    address: *mut u8,
    bytes: usize,
}

// SAFETY: a slot is the only access to its bytes, so it may move to another thread.
unsafe impl Send for Slot {}

impl Slot {
    /// The slot's bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the pool hands out each part of its memory once, and outlives the borrow since the
        // slot came from it; anonymous pages are initialised to zero.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }
}

/// The slots of one load and the copies that run from them to `device`.
pub struct Pool<D: Device> {
    state: Mutex<State<D::Ticket>>,
    changed: Condvar,
    slot_count: usize,
    slot_bytes: usize,
    // In this order: what the device knows of the memory ends before the memory and the device do.
    _pinned: Option<D::Pinned>,
    _memory: MmapRaw,
    device: Arc<D>,
}

struct State<T> {
    free: Vec<Slot>,
    /// The oldest first, which is the order in which copies on one stream end.
    copying: VecDeque<(Slot, T)>,
}

/// Slots begin at page boundaries, as direct reads want it.
pub const PAGE_BYTES: usize = 4 << 10;

impl<D: Device> Pool<D> {
    /// Makes `slot_count` slots of `slot_bytes`, whole pages, and lets the device pin them.
    ///
    /// # Errors
    /// `out-of-memory` when the host has none.
    pub fn new(device: Arc<D>, slot_count: usize, slot_bytes: usize) -> Result<Self> {
        let length = slot_bytes.saturating_mul(slot_count);
        let memory = MmapMut::map_anon(length).map_err(|error| {
            Error::new(Kind::OutOfMemory, format!("cannot get {length} bytes of host memory for staging: {error}"))
        })?;
        let memory = MmapRaw::from(memory);
        // A page that a forked child still shared could be copied away from under a transfer that writes to it.
        if let Err(error) = memory.advise(Advice::DontFork) {
            tracing::debug!(%error, "staging is shared with forked children");
        }
        let pinned = device.pin(memory.as_mut_ptr(), length);
        let slot =
            |index: usize| Slot { address: memory.as_mut_ptr().wrapping_add(index * slot_bytes), bytes: slot_bytes };
        let state = State { free: (0..slot_count).rev().map(slot).collect(), copying: VecDeque::new() };
        tracing::debug!(slot_count, slot_bytes, pinned = pinned.is_some(), "staging");
        Ok(Pool {
            device,
            state: Mutex::new(state),
            changed: Condvar::new(),
            slot_count,
            slot_bytes,
            _pinned: pinned,
            _memory: memory,
        })
    }

    /// Whether there are that many slots of at least that size.
    pub fn has(&self, slot_count: usize, slot_bytes: usize) -> bool {
        self.slot_count >= slot_count && self.slot_bytes >= slot_bytes
    }

    /// Waits for a free slot.
    ///
    /// # Errors
    /// That of the copy that had to end first.
    pub fn acquire(&self) -> Result<Slot> {
        let mut state = self.lock();
        loop {
            if let Some(slot) = state.free.pop() {
                return Ok(slot);
            }
            if let Some((slot, ticket)) = state.copying.pop_front() {
                drop(state);
                let waited = self.device.wait(ticket);
                return match waited {
                    Ok(()) => Ok(slot),
                    Err(error) => {
                        self.release(slot);
                        Err(error)
                    }
                };
            }
            // Every slot is being read into by another worker.
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives back a slot from which nothing is copied.
    pub fn release(&self, slot: Slot) {
        self.lock().free.push(slot);
        self.changed.notify_one();
    }

    /// Starts the copies out of a slot, which becomes free when they have ended.
    ///
    /// # Errors
    /// That of the device; the slot is free then.
    pub fn submit(&self, slot: Slot, placements: &[Placement]) -> Result<()> {
        match self.device.copy(slot.bytes(), placements) {
            Ok(ticket) => {
                self.lock().copying.push_back((slot, ticket));
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
        while let Some((slot, ticket)) = { self.lock().copying.pop_front() } {
            result = result.and(self.device.wait(ticket));
            self.release(slot);
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, State<D::Ticket>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Device> Drop for Pool<D> {
    /// Memory from which a copy still runs must not go away.
    fn drop(&mut self) {
        if let Err(error) = self.drain() {
            tracing::debug!(%error, "a copy failed after the load had ended");
        }
    }
}
