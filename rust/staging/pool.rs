//! The staging memory that the process keeps from load to load, since pinning
//! memory takes longer than filling it. It grows with the work up to a bound
//! that all loads share, and goes when it is asked to.

use crate::device::Pinned;
use crate::error::{Error, Kind, Result};
use crate::os::numa::{self, Node};
use crate::profile::{self, Memory, Stage};
use memmap2::{Advice, MmapMut, MmapRaw};
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Slots begin at page boundaries, as direct reads want it.
pub const PAGE_BYTES: usize = 4 << 10;

/// Memory that begins at a page, for bytes on their way. Its owner alone uses it.
pub struct Block {
    /// No other block of the process ever has this number, whatever address the block has.
    id: u64,
    // In this order: what the device knows of the memory ends before the memory does.
    pinned: Option<Pinned>,
    memory: MmapRaw,
    node: Option<Node>,
}

impl Block {
    /// New memory, which counts against no bound.
    ///
    /// # Errors
    /// `out-of-memory` when the host has none.
    pub fn allocate(bytes: usize, node: Option<Node>) -> Result<Block> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let _span = profile::span(Stage::Allocate).bytes(bytes);
        let memory = MmapMut::map_anon(bytes).map_err(|error| {
            Error::new(Kind::OutOfMemory, format!("cannot get {bytes} bytes of host memory for staging: {error}"))
        })?;
        let memory = MmapRaw::from(memory);
        // Fewer and larger pages are quicker to touch and to pin. A page that a forked child still shared could be
        // copied away from under a transfer that writes to it.
        for advice in [Advice::HugePage, Advice::DontFork] {
            if let Err(error) = memory.advise(advice) {
                tracing::debug!(%error, ?advice, "the kernel takes no advice on staging");
            }
        }
        if let Some(node) = node {
            numa::prefer(&memory, node);
        }
        Ok(Block { id: NEXT.fetch_add(1, Ordering::Relaxed), pinned: None, memory, node })
    }

    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the anonymous pages are the block's own, and are initialised to zero.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr(), self.memory.len()) }
    }

    /// Lets a device pin the memory, unless it is pinned already.
    pub fn pin(&mut self, pin: impl FnOnce(&mut [u8]) -> Option<Pinned>) {
        if self.pinned.is_none() {
            self.pinned = pin(self.bytes_mut());
        }
    }
}

/// A part of staging that its holder alone may use. It goes back to the process's pool when it is dropped.
pub struct Slot {
    /// Present until the slot is dropped.
    block: Option<Block>,
}

impl Slot {
    /// A number that no other memory of the process ever has.
    pub fn id(&self) -> u64 {
        self.block.as_ref().map_or(u64::MAX, |block| block.id)
    }

    /// The slot's bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.block.as_mut().map_or(&mut [], Block::bytes_mut)
    }

    /// Lets a device pin the slot, unless it is pinned from an earlier load.
    pub fn pin(&mut self, pin: impl FnOnce(&mut [u8]) -> Option<Pinned>) {
        if let Some(block) = &mut self.block {
            block.pin(pin);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            pool().free.push(block);
            CHANGED.notify_all();
        }
    }
}

/// What a load needs of a slot.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// At least this many bytes.
    pub bytes: usize,
    /// Near this node of the machine, where there are several.
    pub node: Option<Node>,
    /// The most that the whole process may keep.
    pub staging_bytes: usize,
}

struct Pool {
    free: Vec<Block>,
    /// Of all blocks, the free ones and those in use.
    total_bytes: usize,
    /// A forked child has none of the pages, so it must not touch what it finds here.
    process: u32,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { free: Vec::new(), total_bytes: 0, process: 0 });
static CHANGED: Condvar = Condvar::new();

fn pool() -> MutexGuard<'static, Pool> {
    let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if pool.process != process {
        mem::take(&mut pool.free).into_iter().for_each(mem::forget);
        pool.total_bytes = 0;
        pool.process = process;
    }
    pool
}

impl Pool {
    fn find(&mut self, request: &Request) -> Option<Block> {
        let fits = |block: &Block| block.memory.len() >= request.bytes && block.node == request.node;
        let free = self.free.iter().enumerate().filter(|(_, block)| fits(block));
        let (best, _) = free.min_by_key(|(_, block)| (block.memory.len(), block.pinned.is_none()))?;
        Some(self.free.swap_remove(best))
    }

    /// Gives up free blocks, which did not fit, until there is room for a new one.
    fn make_room(&mut self, request: &Request) -> bool {
        while self.total_bytes.saturating_add(request.bytes) > request.staging_bytes {
            let Some(block) = self.free.pop() else { break };
            self.total_bytes -= block.memory.len();
        }
        self.total_bytes == 0 || self.total_bytes.saturating_add(request.bytes) <= request.staging_bytes
    }
}

/// A slot that was kept, or a new one; `None` where the bound leaves no room for another.
///
/// # Errors
/// `out-of-memory` when the host has none.
pub fn take(request: &Request) -> Result<Option<Slot>> {
    let mut pool = pool();
    if let Some(block) = pool.find(request) {
        profile::memory(Memory::Staging, pool.total_bytes);
        return Ok(Some(Slot { block: Some(block) }));
    }
    if !pool.make_room(request) {
        return Ok(None);
    }
    pool.total_bytes += request.bytes;
    profile::memory(Memory::Staging, pool.total_bytes);
    drop(pool);
    match Block::allocate(request.bytes, request.node) {
        Ok(block) => Ok(Some(Slot { block: Some(block) })),
        Err(error) => {
            self::pool().total_bytes -= request.bytes;
            Err(error)
        }
    }
}

/// Waits until another load may have given a slot back, or `most` has passed.
pub fn wait(most: Duration) {
    drop(CHANGED.wait_timeout(pool(), most));
}

/// Gives back all memory that no load uses at the moment, and says how many bytes that were.
pub fn release() -> usize {
    let mut pool = pool();
    let free = mem::take(&mut pool.free);
    let bytes = free.iter().map(|block| block.memory.len()).sum();
    pool.total_bytes -= bytes;
    bytes
}
