//! Pool of staging memory, which the process keeps between loads, because pinning memory takes longer than filling it.
//!
//! The pool grows with the work, up to a bound that all loads share, and shrinks on request.

use crate::device::{CopyInFlight, Pinned};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::options::experiments::{self, Switch};
use crate::os::huge_pages;
use crate::os::mutex::{Condvar, Mutex};
use crate::os::numa::{self, Node};
use crate::os::per_process::PerProcess;
use crate::os::retry::Check;
use crate::profile::{self, Memory, Stage};
use memmap2::{Advice, MmapMut, MmapRaw};
use std::mem::{self, ManuallyDrop};
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::time::Duration;

/// Alignment of slots, in bytes. It satisfies the alignment of direct reads.
pub const PAGE_BYTES: usize = 4 << 10;
/// Interval at which a worker that waits for staging memory checks whether the wait should end.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Number of slots of ended loads with a copy in flight at which a load waits for the oldest and takes no new memory. A
/// GPU that is busy with the caller's work would otherwise let them take all of it.
const COPYING_MAX: usize = 16;

/// Page-aligned memory, which only its owner uses.
pub struct Block {
    /// Copy from or to the memory that may be in flight.
    copy: Option<Box<dyn CopyInFlight>>,
    pinned: Option<Pinned>,
    /// Mapping that contains the block, and address space before and after it that is never touched.
    memory: ManuallyDrop<MmapRaw>,
    /// Position of the block in the mapping.
    begin: usize,
    bytes: usize,
    node: Option<Node>,
}

impl Block {
    /// Allocates memory, which does not count towards the bound of the pool.
    pub fn allocate(bytes: usize, node: Option<Node>) -> Result<Block> {
        let _span = profile::span(Stage::Allocate).bytes(bytes);
        // The kernel uses huge pages for what begins at a multiple of their size, where it does not place all mappings.
        let huge_page_bytes = to_usize(huge_pages::huge_page_bytes());
        let alignment = if bytes < huge_page_bytes { PAGE_BYTES } else { huge_page_bytes };
        let memory = MmapMut::map_anon(bytes.saturating_add(alignment - PAGE_BYTES)).map_err(|error| {
            Error::new(Kind::OutOfMemory, format!("cannot allocate {bytes} bytes of host memory for staging: {error}"))
        })?;
        let memory = MmapRaw::from(memory);
        let address = memory.as_ptr().addr();
        let begin = address.next_multiple_of(alignment) - address;
        // Huge pages are faster to touch and to pin. Pages shared with a forked child could be copied on a write, while
        // the device accesses the old ones.
        match experiments::value(Switch::HugePages) {
            None => huge_pages::advise(to_u64(address + begin), to_u64(bytes)),
            Some(0) => {}
            Some(_) => huge_pages::advise_always(to_u64(address + begin), to_u64(bytes)),
        }
        if let Err(error) = memory.advise(Advice::DontFork) {
            tracing::debug!(%error, "the kernel refuses advice about staging memory");
        }
        if let Some(node) = node {
            numa::prefer(&memory, node);
        }
        Ok(Block { copy: None, pinned: None, memory: ManuallyDrop::new(memory), begin, bytes, node })
    }

    /// Returns the bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block owns the anonymous pages, which are initialized to zero, and the mapping is longer than both.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().add(self.begin), self.bytes) }
    }

    /// Pins the memory with `pin`, unless it is pinned.
    pub fn pin(&mut self, pin: impl FnOnce(&mut [u8]) -> Option<Pinned>) {
        if self.pinned.is_none() {
            self.pinned = pin(self.bytes_mut());
        }
    }

    /// Returns whether a chunk of this many bytes fits the block.
    pub fn holds(&self, bytes: usize) -> bool {
        self.bytes >= bytes
    }

    fn fits(&self, request: &Request) -> bool {
        self.bytes >= request.bytes && self.node == request.node
    }

    /// Keeps a copy from or to the block, which is not free before the copy is done.
    pub fn hold(&mut self, copy: impl CopyInFlight + 'static) {
        self.copy = Some(Box::new(copy));
    }

    /// Returns whether no copy is in flight any more.
    fn is_settled(&mut self) -> bool {
        // The wait for a copy that failed returns its error.
        self.copy.take_if(|copy| copy.is_done() == Ok(true));
        self.copy.is_none()
    }

    /// Waits for the copy that the block holds. If that fails, the copy may still be in flight.
    pub fn settle(&mut self, check: Check<'_>) -> Result<()> {
        if let Some(copy) = &self.copy {
            copy.wait(check)?;
        }
        self.copy = None;
        Ok(())
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(self.begin), self.bytes) }
    }
}

impl Drop for Block {
    /// Waits for no copy: the pool frees a block with a copy in flight later.
    fn drop(&mut self) {
        let is_settled = self.is_settled();
        // SAFETY: this value does not use the memory any more.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        let (copy, pinned) = (self.copy.take(), self.pinned.take());
        if is_settled {
            // The registration must end before the memory does.
            drop(pinned);
            return;
        }
        let Block { begin, bytes, node, .. } = *self;
        let mut blocks = POOL.get().blocks.lock();
        blocks.total_bytes += bytes;
        blocks.free.push(Block { copy, pinned, memory: ManuallyDrop::new(memory), begin, bytes, node });
    }
}

/// Block of the pool, to which it returns when it is dropped.
pub struct Slot {
    block: ManuallyDrop<Block>,
    pool: &'static Pool,
}

impl Slot {
    fn new(block: Block, pool: &'static Pool) -> Slot {
        Slot { block: ManuallyDrop::new(block), pool }
    }
}

impl Deref for Slot {
    type Target = Block;

    fn deref(&self) -> &Block {
        &self.block
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut Block {
        &mut self.block
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        self.block.as_ref()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // A forked child has none of the pages of its parent's blocks, and must not touch them.
        if ptr::eq(self.pool, POOL.get()) {
            // SAFETY: the slot does not use the block any more.
            let block = unsafe { ManuallyDrop::take(&mut self.block) };
            let mut blocks = self.pool.blocks.lock();
            blocks.free.push(block);
            if blocks.waiting > 0 {
                self.pool.changed.notify_all();
            }
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
    /// Number of threads that wait for a free block.
    waiting: usize,
}

static POOL: PerProcess<Pool> = PerProcess::new(|| Pool { blocks: Mutex::default(), changed: Condvar::new() });

impl Pool {}

impl Blocks {
    /// Removes the block without a copy that fits best, or the best of those that are pinned.
    fn find(&mut self, request: &Request, is_pinned: bool) -> Option<Block> {
        let fits =
            |block: &Block| block.fits(request) && block.copy.is_none() && (block.pinned.is_some() || !is_pinned);
        let free = self.free.iter().enumerate().filter(|(_, block)| fits(block));
        let (best, _) = free.min_by_key(|(_, block)| (block.bytes, block.pinned.is_none()))?;
        Some(self.free.remove(best))
    }

    /// Removes the oldest block that fits and has a copy. Returns it and whether to wait for the copy, because there are
    /// many or because the bound allows no new block.
    fn find_copying(&mut self, request: &Request) -> Option<(Block, bool)> {
        let is_full = self.total_bytes.saturating_add(request.bytes) > request.staging_bytes;
        let oldest = self.free.iter().position(|block| block.fits(request))?;
        let is_many = self.free.iter().filter(|block| block.fits(request)).count() >= COPYING_MAX;
        Some((self.free.remove(oldest), is_full || is_many))
    }

    /// Removes free blocks, none of which fits, until the bound allows a new one. Returns them, or `None` if it does not.
    fn make_room(&mut self, request: &Request) -> Option<Vec<Block>> {
        let mut removed = Vec::new();
        while self.total_bytes.saturating_add(request.bytes) > request.staging_bytes {
            let Some(block) = self.free.pop() else { break };
            self.total_bytes -= block.bytes;
            removed.push(block);
        }
        let has_room = self.total_bytes == 0 || self.total_bytes.saturating_add(request.bytes) <= request.staging_bytes;
        has_room.then_some(removed)
    }
}

/// Returns a free or a new slot, or `None` if the bound allows no other. May wait for copies of earlier loads.
///
/// # Errors
/// `out-of-memory` if the host has none; `device` if such a copy failed; the error of `check`.
pub fn take(request: &Request, check: Check<'_>) -> Result<Option<Slot>> {
    let pool = POOL.get();
    let mut blocks = pool.blocks.lock();
    profile::memory(Memory::Staging, blocks.total_bytes);
    if let Some(block) = blocks.find(request, false) {
        return Ok(Some(Slot::new(block, pool)));
    }
    if let Some((mut block, must_wait)) = blocks.find_copying(request) {
        // No lock is held during calls of the driver, which may take their time.
        drop(blocks);
        let settled = if must_wait { block.settle(check).map(|()| true) } else { Ok(block.is_settled()) };
        if settled == Ok(true) {
            return Ok(Some(Slot::new(block, pool)));
        }
        blocks = pool.blocks.lock();
        blocks.free.insert(0, block);
        settled?;
    }
    let Some(removed) = blocks.make_room(request) else { return Ok(None) };
    blocks.total_bytes += request.bytes;
    profile::memory(Memory::Staging, blocks.total_bytes);
    drop(blocks);
    free(removed, check).inspect_err(|_| pool.blocks.lock().total_bytes -= request.bytes)?;
    match Block::allocate(request.bytes, request.node) {
        Ok(block) => Ok(Some(Slot::new(block, pool))),
        Err(error) => {
            pool.blocks.lock().total_bytes -= request.bytes;
            Err(error)
        }
    }
}

/// Returns a free slot that is pinned, if there is one.
pub fn take_pinned(request: &Request) -> Option<Slot> {
    let pool = POOL.get();
    let mut blocks = pool.blocks.lock();
    let block = blocks.find(request, true)?;
    profile::memory(Memory::Staging, blocks.total_bytes);
    Some(Slot::new(block, pool))
}

/// Returns the number of free slots that [`take_pinned`] could return.
pub fn count_pinned(request: &Request) -> usize {
    let blocks = POOL.get().blocks.lock();
    let is_ready = |block: &&Block| block.fits(request) && block.copy.is_none() && block.pinned.is_some();
    blocks.free.iter().filter(is_ready).count()
}

/// Waits for a slot. Calls `check` from time to time, and ends with its error.
///
/// # Errors
/// The errors of [`take`], and the error of `check`.
pub fn acquire(request: &Request, check: Check<'_>) -> Result<Slot> {
    let _span = profile::span(Stage::Slot);
    loop {
        if let Some(slot) = take(request, check)? {
            return Ok(slot);
        }
        check()?;
        wait();
    }
}

/// Waits until a slot may have returned to the pool, at most for [`POLL_INTERVAL`].
pub fn wait() {
    let pool = POOL.get();
    let mut blocks = pool.blocks.lock();
    blocks.waiting += 1;
    blocks = pool.changed.wait_timeout(blocks, POLL_INTERVAL);
    blocks.waiting -= 1;
}

/// Frees all memory of the pool that is not in use, after the copies in flight from it, and returns its size in bytes.
///
/// # Errors
/// The error of `check`.
pub fn release(check: Check<'_>) -> Result<usize> {
    let mut blocks = POOL.get().blocks.lock();
    let removed = mem::take(&mut blocks.free);
    let bytes = removed.iter().map(|block| block.bytes).sum();
    blocks.total_bytes -= bytes;
    drop(blocks);
    free(removed, check).map(|()| bytes)
}

/// Frees blocks that were removed from the pool, after their copies. Those with copies in flight return to the pool if
/// `check` fails.
fn free(mut removed: Vec<Block>, check: Check<'_>) -> Result<()> {
    // A block whose copy failed is freed, too.
    removed.retain_mut(|block| {
        let is_kept = block.settle(check).is_err() && check().is_err();
        block.copy.take_if(|_| !is_kept);
        is_kept
    });
    if removed.is_empty() {
        return Ok(());
    }
    let mut blocks = POOL.get().blocks.lock();
    blocks.total_bytes += removed.iter().map(|block| block.bytes).sum::<usize>();
    blocks.free.append(&mut removed);
    drop(blocks);
    check()
}
