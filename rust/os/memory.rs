//! Memory of this process that has not been used yet.

use std::sync::atomic::{AtomicBool, Ordering};

/// Smallest destination for which [`populate`] makes its system calls, in bytes.
const POPULATE_BYTES_MIN: usize = 64 << 10;

/// Makes the pages of new memory present before it is written.
///
/// Writing to new memory raises a page fault per page. One call for all pages takes about 60 % of the time of their
/// faults. Memory whose first and last page are present is left alone, because a call for present pages is not free.
/// So is all memory if the kernel has no such call (before Linux 5.14).
pub fn populate(memory: &mut [u8]) {
    static IS_MISSING: AtomicBool = AtomicBool::new(false);
    if memory.len() < POPULATE_BYTES_MIN || IS_MISSING.load(Ordering::Relaxed) {
        return;
    }
    let page_bytes = rustix::param::page_size();
    let range = memory.as_mut_ptr_range();
    let begin = range.start.map_addr(|address| address / page_bytes * page_bytes);
    let last = range.end.map_addr(|address| (address - 1) / page_bytes * page_bytes);
    if is_present(begin) && is_present(last) {
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

/// Returns whether the page at an address is present.
fn is_present(page: *mut u8) -> bool {
    let mut state = 0;
    // SAFETY: the kernel writes one byte for the one page.
    let code = unsafe { libc::mincore(page.cast(), 1, &raw mut state) };
    code == 0 && state & 1 == 1
}
