//! Memory of this process: that which has not been used yet, and that which may be gone.

use crate::num::to_usize;
use memmap2::MmapRaw;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Smallest destination for which [`populate`] makes its system calls, in bytes.
const POPULATE_BYTES_MIN: usize = 64 << 10;

/// Makes the pages of new memory present before it is written.
///
/// Writing to new memory raises a page fault per page. One call for all pages takes about 60 % of the time of their
/// faults. Memory whose first and last whole page are present is left alone, because a call for present pages is not
/// free. The pages at its ends may be present because neighbouring memory was written. So is all memory if the kernel has
/// no such call (before Linux 5.14).
pub fn populate(memory: &mut [u8]) {
    static IS_MISSING: AtomicBool = AtomicBool::new(false);
    if memory.len() < POPULATE_BYTES_MIN || IS_MISSING.load(Ordering::Relaxed) {
        return;
    }
    let page_bytes = rustix::param::page_size();
    let range = memory.as_mut_ptr_range();
    let begin = range.start.map_addr(|address| address / page_bytes * page_bytes);
    let last = range.end.map_addr(|address| (address - 1) / page_bytes * page_bytes);
    if is_present(begin.wrapping_byte_add(page_bytes)) && is_present(last.wrapping_byte_sub(page_bytes)) {
        return;
    }
    let length = last.addr() + page_bytes - begin.addr();
    // SAFETY: the call changes no byte. Whole pages around memory that may be written are mapped, too.
    let code = unsafe { libc::madvise(begin.cast(), length, libc::MADV_POPULATE_WRITE) };
    // Any other error shows again, and clearer, when the memory is written.
    if code != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
        IS_MISSING.store(true, Ordering::Relaxed);
    }
}

/// Makes the pages of mapped memory present, so that they can be read. Fails with the error of the kernel where an
/// access would raise a signal: a page that is not part of the file or cannot be read from the disk. `invalid-argument`
/// before Linux 5.14.
pub fn look_up(address: *const u8, length: usize) -> io::Result<()> {
    let page_bytes = rustix::param::page_size();
    let begin = address.map_addr(|address| address / page_bytes * page_bytes);
    let length = length + address.addr() - begin.addr();
    // SAFETY: the call changes no byte, and fails for memory that is not mapped.
    match unsafe { libc::madvise(begin.cast_mut().cast(), length, libc::MADV_POPULATE_READ) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Removes the pages of a range of a read-only mapping of a file from this process, unless they are locked in memory. They
/// stay in the page cache, and an access maps them again.
pub fn unmap_pages(mapping: &MmapRaw, range: Range<usize>) {
    let page_bytes = rustix::param::page_size();
    let begin = range.start / page_bytes * page_bytes;
    let length = range.end.min(mapping.len()) - begin;
    // SAFETY: nothing has written to the pages, so that they have the bytes of the file.
    unsafe { libc::madvise(mapping.as_mut_ptr().wrapping_add(begin).cast(), length, libc::MADV_DONTNEED) };
}

/// Returns whether the page that begins at an address is present.
pub fn is_present(page: *const u8) -> bool {
    let mut state = 0;
    // SAFETY: the kernel writes one byte for the one page.
    let code = unsafe { libc::mincore(page.cast_mut().cast(), 1, &raw mut state) };
    code == 0 && state & 1 == 1
}

/// Copies memory of this process with a system call, which fails where an access would raise a signal: at pages of a
/// mapped file that has become shorter or cannot be read.
///
/// Costs as much as a copy for mapped files, and more than twice as much for other memory. Where a sandbox refuses the
/// call, copies without it.
///
/// # Safety
/// The bytes from `address` on belong to mappings of this process, and nothing writes to them.
///
/// # Errors
/// The number of bytes before the first that cannot be read.
pub unsafe fn read(address: u64, into: &mut [u8]) -> Result<(), usize> {
    let source: *const u8 = std::ptr::with_exposed_provenance(to_usize(address));
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let from = source.wrapping_add(done);
        let remote = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: rest.len() };
        let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        // SAFETY: the kernel writes to `rest` only, and checks the memory that it reads.
        let count = unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(count) {
            Ok(count @ 1..) => done += count,
            Err(_) if is_refused() => {
                // SAFETY: the caller's promise. A missing page raises SIGBUS, as for any access.
                unsafe { std::ptr::copy_nonoverlapping(from, rest.as_mut_ptr(), rest.len()) };
                return Ok(());
            }
            _ => return Err(done),
        }
    }
    Ok(())
}

/// Returns whether the last system call failed because the process may not use it.
fn is_refused() -> bool {
    let error = io::Error::last_os_error();
    let is_refused = matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS));
    if is_refused {
        tracing::debug!(%error, "mapped files are read without system calls: one that becomes shorter raises SIGBUS");
    }
    is_refused
}
