//! Pool of staging memory, which the process keeps between loads, because pinning memory takes longer than filling it.
//!
//! The pool grows with the work, up to a bound that all loads share, and shrinks on request.

use crate::device::Pinned;
use crate::error::{Error, Kind, Result};
use crate::os::numa::{self, Node};
use crate::os::per_process::PerProcess;
use crate::profile::{self, Memory, Stage};
use memmap2::{Advice, MmapMut, MmapRaw};
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Alignment of slots, in bytes. It satisfies that of direct reads.
pub const PAGE_BYTES: usize = 4 << 10;
/// Interval at which a worker that waits for staging memory checks whether the wait should end.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Page-aligned memory, which only its owner uses.
pub struct Block {
    /// Number that no other block of the process ever has, not even one at the same address.
    id: u64,
    // Fields are dropped in this order: the registration must end before the memory does.
    pinned: Option<Pinned>,
    memory: MmapRaw,
    node: Option<Node>,
}

impl Block {
    /// Allocates memory, which does not count towards the bound of the pool.
    ///
    /// # Errors
    /// `out-of-memory` if the host has none.
    pub fn allocate(bytes: usize, node: Option<Node>) -> Result<Block> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let _span = profile::span(Stage::Allocate).bytes(bytes);
        let memory = MmapMut::map_anon(bytes).map_err(|error| {
            Error::new(Kind::OutOfMemory, format!("cannot allocate {bytes} bytes of host memory for staging: {error}"))
        })?;
        let memory = MmapRaw::from(memory);
        // Huge pages are faster to touch and to pin. Pages shared with a forked child could be copied on a write, while
        // the device accesses the old ones.
        for advice in [Advice::HugePage, Advice::DontFork] {
            if let Err(error) = memory.advise(advice) {
                tracing::debug!(%error, ?advice, "the kernel refuses advice about staging memory");
            }
        }
        if let Some(node) = node {
            numa::prefer(&memory, node);
        }
        Ok(Block { id: NEXT.fetch_add(1, Ordering::Relaxed), pinned: None, memory, node })
    }

    /// Returns the bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block owns the anonymous pages, which are initialized to zero.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr(), self.memory.len()) }
    }

    /// Pins the memory with `pin`, unless it is pinned.
    pub fn pin(&mut self, pin: impl FnOnce(&mut [u8]) -> Option<Pinned>) {
        if self.pinned.is_none() {
            self.pinned = pin(self.bytes_mut());
        }
    }
}

/// Block of the pool, to which it returns when it is dropped.
pub struct Slot {
    /// `Some` until the slot is dropped.
    block: Option<Block>,
    pool: &'static Pool,
}

impl Slot {
    /// Returns a number that no other memory of the process ever has.
    pub fn id(&self) -> u64 {
        self.block.as_ref().map_or(u64::MAX, |block| block.id)
    }

    /// Returns the bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.block.as_mut().map_or(&mut [], Block::bytes_mut)
    }

    /// Pins the memory with `pin`, unless it is pinned, perhaps by an earlier load.
    pub fn pin(&mut self, pin: impl FnOnce(&mut [u8]) -> Option<Pinned>) {
        if let Some(block) = &mut self.block {
            block.pin(pin);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if ptr::eq(self.pool, POOL.get()) {
            self.pool.lock().free.push(block);
            self.pool.changed.notify_all();
        } else {
            // A forked child has none of the pages of its parent's blocks, and must not touch them.
            mem::forget(block);
        }
    }
}

/// Requirements for a slot.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Minimum size, in bytes.
    pub bytes: usize,
    /// Preferred NUMA node, on a machine with several.
    pub node: Option<Node>,
    /// Upper bound for the pool of the process, in bytes.
    pub staging_bytes: usize,
}

struct Pool {
    blocks: Mutex<Blocks>,
    /// Signals that a block is free.
    changed: Condvar,
}

#[derive(Default)]
struct Blocks {
    free: Vec<Block>,
    /// Bytes of all blocks, free or in use.
    total_bytes: usize,
}

static POOL: PerProcess<Pool> = PerProcess::new(|| Pool { blocks: Mutex::default(), changed: Condvar::new() });

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Blocks {
    fn find(&mut self, request: &Request) -> Option<Block> {
        let fits = |block: &Block| block.memory.len() >= request.bytes && block.node == request.node;
        let free = self.free.iter().enumerate().filter(|(_, block)| fits(block));
        let (best, _) = free.min_by_key(|(_, block)| (block.memory.len(), block.pinned.is_none()))?;
        Some(self.free.swap_remove(best))
    }

    /// Drops free blocks, none of which fits, until the bound allows a new one. Returns whether it does.
    fn make_room(&mut self, request: &Request) -> bool {
        while self.total_bytes.saturating_add(request.bytes) > request.staging_bytes {
            let Some(block) = self.free.pop() else { break };
            self.total_bytes -= block.memory.len();
        }
        self.total_bytes == 0 || self.total_bytes.saturating_add(request.bytes) <= request.staging_bytes
    }
}

/// Returns a free or a new slot, or `None` if the bound allows no other.
///
/// # Errors
/// `out-of-memory` if the host has none.
pub fn take(request: &Request) -> Result<Option<Slot>> {
    let pool = POOL.get();
    let mut blocks = pool.lock();
    if let Some(block) = blocks.find(request) {
        profile::memory(Memory::Staging, blocks.total_bytes);
        return Ok(Some(Slot { block: Some(block), pool }));
    }
    if !blocks.make_room(request) {
        return Ok(None);
    }
    blocks.total_bytes += request.bytes;
    profile::memory(Memory::Staging, blocks.total_bytes);
    drop(blocks);
    match Block::allocate(request.bytes, request.node) {
        Ok(block) => Ok(Some(Slot { block: Some(block), pool })),
        Err(error) => {
            pool.lock().total_bytes -= request.bytes;
            Err(error)
        }
    }
}

/// Waits until a slot may have returned to the pool, at most for [`POLL_INTERVAL`].
pub fn wait() {
    let pool = POOL.get();
    drop(pool.changed.wait_timeout(pool.lock(), POLL_INTERVAL));
}

/// Frees all memory of the pool that is not in use, and returns its size in bytes.
pub fn release() -> usize {
    let mut blocks = POOL.get().lock();
    let free = mem::take(&mut blocks.free);
    let bytes = free.iter().map(|block| block.memory.len()).sum();
    blocks.total_bytes -= bytes;
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::per_process::testing::passes_in_child;

    #[test]
    fn child_takes_a_slot_although_the_pool_of_its_parent_is_locked() {
        let request = Request { bytes: PAGE_BYTES, node: None, staging_bytes: PAGE_BYTES };
        let inherited = take(&request).unwrap();
        // In the child, the slot of the parent neither counts towards the bound nor returns to the pool.
        let check = || {
            drop(inherited);
            take(&request).unwrap().is_some_and(|mut slot| slot.bytes_mut().len() == PAGE_BYTES)
        };
        assert!(passes_in_child(|| POOL.get().lock(), check));
    }
}
