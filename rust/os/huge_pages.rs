//! Huge pages for new memory.
//!
//! They make page faults, and so loads, faster, as long as the kernel has free blocks of their size. Without such blocks,
//! memory with the advice `MADV_HUGEPAGE` makes it move other pages to free some, which takes ten times as long as small
//! pages: a machine whose memory is full of page cache has few. On virtual machines that report free memory to their
//! host, blocks of this size are those that the host has taken back, and come from it page by page.

use super::memory;
use super::per_process::PerProcess;
use crate::num::{to_u64, to_usize};
use crate::os::mutex::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};
use std::{fs, io, ptr};

/// Share of the free blocks that this process takes, as a divisor. The kernel keeps some of them, and other processes
/// take memory at the same time.
const SHARE_DIVISOR: u64 = 2;
/// Time for which a measurement holds. Memory that was allocated since may not have taken its blocks yet.
const MEASUREMENT_TIME: Duration = Duration::from_millis(100);

/// Free blocks that this process may still take.
struct Budget {
    begin: Instant,
    bytes: u64,
}

static BUDGET: PerProcess<Mutex<Option<Budget>>> = PerProcess::new(Mutex::default);

/// Returns the size and alignment of a huge page, in bytes.
pub fn huge_page_bytes() -> u64 {
    huge_page_bytes_of(to_u64(rustix::param::page_size()))
}

/// Returns 2 MiB for pages of 4 KiB, and 512 MiB for pages of 64 KiB, which some kernels for 64-bit Arm have: a huge page
/// has as many pages as entries of 8 bytes fit in one.
fn huge_page_bytes_of(page_bytes: u64) -> u64 {
    (page_bytes / 8).saturating_mul(page_bytes)
}

/// Asks for huge pages in new memory, if the kernel has free ones. Other memory at the address stays as it is.
pub fn advise(address: u64, bytes: u64) {
    let pages = whole_pages(address, bytes);
    if !pages.is_empty() && takes_huge_pages(pages.end - pages.start) {
        request(&pages);
    }
}

/// Asks for huge pages in new memory, however few the kernel has.
pub fn advise_always(address: u64, bytes: u64) {
    let pages = whole_pages(address, bytes);
    if !pages.is_empty() {
        request(&pages);
    }
}

/// Asks for huge pages in new memory that a disk writes to many times, where [`advise`] does not because the host may have
/// taken them back. A virtual disk takes up to three times as long to write to small pages.
pub fn advise_for_disk(memory: &mut [u8]) {
    let pages = whole_pages(to_u64(memory.as_ptr().addr()), to_u64(memory.len()));
    let first: *const u8 = ptr::with_exposed_provenance(to_usize(pages.start));
    // The advice locks the memory of the whole process. Memory that was used has its pages.
    if !pages.is_empty() && is_reporting() && !memory::is_present(first) {
        request(&pages);
    }
}

/// Returns the addresses of the huge pages that lie in memory as a whole.
fn whole_pages(address: u64, bytes: u64) -> Range<u64> {
    let page_bytes = huge_page_bytes();
    address.next_multiple_of(page_bytes)..address.saturating_add(bytes) / page_bytes * page_bytes
}

/// Asks for whole huge pages.
fn request(&Range { start: begin, end }: &Range<u64>) {
    let memory = ptr::with_exposed_provenance_mut(to_usize(begin));
    // SAFETY: the advice changes no byte.
    let code = unsafe { libc::madvise(memory, to_usize(end - begin), libc::MADV_HUGEPAGE) };
    if code != 0 {
        tracing::debug!(error = %io::Error::last_os_error(), "the kernel refuses advice about huge pages");
    }
}

/// Returns whether new memory of this size should be huge pages, and counts it as such.
fn takes_huge_pages(bytes: u64) -> bool {
    let mut budget = BUDGET.get().lock();
    let current = budget.take().filter(|budget| budget.begin.elapsed() < MEASUREMENT_TIME);
    let current = current.unwrap_or_else(|| Budget { begin: Instant::now(), bytes: free_bytes() / SHARE_DIVISOR });
    let left = current.bytes.checked_sub(bytes);
    *budget = Some(Budget { bytes: left.unwrap_or(current.bytes), ..current });
    left.is_some()
}

/// Returns whether this machine reports free memory to a host, which takes it back.
pub fn is_reporting() -> bool {
    static IS_REPORTING: PerProcess<bool> = PerProcess::new(|| {
        let order = fs::read_to_string("/sys/module/page_reporting/parameters/page_reporting_order");
        order.is_ok_and(|order| is_order(&order))
    });
    *IS_REPORTING.get()
}

/// Returns the bytes of free blocks of at least a huge page, on the NUMA node that has the fewest. Returns 0 if the host
/// of a virtual machine may have taken them back.
fn free_bytes() -> u64 {
    if is_reporting() {
        return 0;
    }
    let text = fs::read_to_string("/proc/buddyinfo");
    text.map_or(0, |text| free_bytes_of(&text, to_u64(rustix::param::page_size())))
}

/// Returns whether the kernel reports free blocks of an order of pages to the host. Without a driver that takes the
/// reports, the order is -1 as an unsigned number.
pub fn is_order(text: &str) -> bool {
    text.trim().parse::<u32>().is_ok_and(|order| order < u32::BITS)
}

/// Adds up the free blocks in lines such as `Node 0, zone   Normal  30498  58458 ...`, which have the number of blocks of
/// one page, two, four and so on. The kernel keeps the zones `DMA` and `DMA32` for devices while the others have pages.
pub fn free_bytes_of(buddyinfo: &str, page_bytes: u64) -> u64 {
    let bytes_min = huge_page_bytes_of(page_bytes);
    let mut nodes: BTreeMap<&str, u64> = BTreeMap::new();
    for line in buddyinfo.lines() {
        let Some((node, zone)) = line.split_once(", zone") else { continue };
        let mut words = zone.split_whitespace();
        if words.next().is_none_or(|name| name.starts_with("DMA")) {
            continue;
        }
        let blocks = (0_u32..).zip(words);
        let bytes = blocks.filter_map(|(order, count)| {
            let block_bytes = page_bytes.checked_shl(order).filter(|bytes| *bytes >= bytes_min)?;
            Some(block_bytes.saturating_mul(count.parse().ok()?))
        });
        let sum = nodes.entry(node).or_default();
        *sum = sum.saturating_add(bytes.fold(0, u64::saturating_add));
    }
    nodes.into_values().min().unwrap_or(0)
}
