//! Mapped files, of which new CPU tensors are views. fst itself reads a mapping with system calls only.

use super::page_cache;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::local_file::LocalFile;
use memmap2::{MmapOptions, MmapRaw, UncheckedAdvice};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Share of the memory maps of a process that views may use: one in so many. The others remain for allocators, threads
/// and libraries, which fail without them.
const MAPS_SHARE: usize = 4;
/// Linux's own bound for the memory maps of a process, where `/proc` does not tell it.
const MAX_MAP_COUNT: usize = 65_530;

/// Number of mappings of this process. A forked child has its parent's mappings.
static MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// Returns the largest number of mappings that views use.
pub fn mappings_max() -> usize {
    static MAX: AtomicUsize = AtomicUsize::new(0);
    if MAX.load(Ordering::Relaxed) == 0 {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let maps = text.and_then(|text| text.trim().parse().ok()).unwrap_or(MAX_MAP_COUNT);
        MAX.store((maps / MAPS_SHARE).max(1), Ordering::Relaxed);
    }
    MAX.load(Ordering::Relaxed)
}

/// Private mapping of a whole file. Writes of the process stay in the process.
///
/// If another process makes the file shorter, every mapping of it loses pages, and an access to them ends the process
/// with SIGBUS. This holds for all mappings, and no check before an access prevents it, because the file may become shorter
/// after the check. Bytes that fst copies, casts, compares or saves are therefore read with system calls, which return an error.
/// Files on network file systems, where this is likelier, are read for all tensors.
pub struct Mapping {
    pages: MmapRaw,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        MAPPINGS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Mapping {
    /// Maps a file with the length that it had when its header was checked. Returns `None` where its bytes have to be read
    /// instead: the system refuses another mapping, or [`mappings_max`] are in use.
    ///
    /// # Errors
    /// `io` if the file has become shorter.
    pub fn open(source: &LocalFile) -> Result<Option<Mapping>> {
        check_length(source, source.length)?;
        let length = usize::try_from(source.length)
            .map_err(|_| Error::new(Kind::Io, "the file is larger than the address space").at(&source.path))?;
        if MAPPINGS.load(Ordering::Relaxed) >= mappings_max() {
            tracing::debug!(path = %source.path.display(), "views use their share of the memory maps; reads instead");
            return Ok(None);
        }
        // Without MAP_NORESERVE a private writable mapping would count towards the commit limit.
        // SAFETY: the mapping is accessed through raw addresses only. A file that changes changes the values, as it
        // does for every mapping.
        let mapped = unsafe { MmapOptions::new().len(length).no_reserve_swap().map_copy(&source.file) };
        let refused = |error: &_| tracing::debug!(path = %source.path.display(), %error, "cannot map; reads instead");
        let Ok(pages) = mapped.inspect_err(refused) else { return Ok(None) };
        MAPPINGS.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Mapping { pages: pages.into() }))
    }

    /// Drops the whole pages in a range, and with them what the process has written there.
    ///
    /// # Safety
    /// Nothing uses these bytes any more.
    pub unsafe fn forget(&self, range: &Range<u64>) {
        let page_bytes = page_cache::page_bytes();
        let (begin, end) = (range.start.next_multiple_of(page_bytes), range.end - range.end % page_bytes);
        let (begin, length) = (to_usize(begin), to_usize(end.saturating_sub(begin)));
        if length == 0 {
            return;
        }
        // SAFETY: these pages belong to this range only, which nothing uses.
        if let Err(error) = unsafe { self.pages.unchecked_advise_range(UncheckedAdvice::DontNeed, begin, length) } {
            tracing::debug!(%error, "the pages of a view stay until its mapping is dropped");
        }
    }

    /// Returns the address of byte `offset` of the file, or `None` past the end.
    pub fn address(&self, offset: u64) -> Option<u64> {
        let position = Some(to_usize(offset)).filter(|&position| position <= self.pages.len())?;
        self.pages.as_ptr().addr().checked_add(position).map(to_u64)
    }
}

fn check_length(source: &LocalFile, needed: u64) -> Result<()> {
    let metadata = source.file.metadata().map_err(|error| Error::from_io(error, &source.path, "cannot stat"))?;
    if metadata.len() < needed { Err(ended(source, metadata.len())) } else { Ok(()) }
}

fn ended(source: &LocalFile, length: u64) -> Error {
    Error::new(Kind::Io, "the file ended early; it became shorter while it was loaded").at(&source.path).offset(length)
}
