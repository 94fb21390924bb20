//! A file mapped into memory: on the CPU the tensors are views of it and no
//! byte is copied; towards other memory it is copied like any other source.

use super::Reader;
use crate::error::{Error, Kind, Result};
use crate::source::Source;
use memmap2::{MmapOptions, MmapRaw, UncheckedAdvice};
use std::ops::Range;
use std::sync::Arc;

/// A private mapping of a whole file. What the process writes there stays in the process.
///
/// A file that another process makes shorter takes pages away from every mapping of it, and touching
/// them then ends the process with SIGBUS; that is the nature of mappings, and the reason why files of
/// network file systems are read instead.
pub struct Mapping {
    pages: MmapRaw,
    page_bytes: u64,
}

impl Mapping {
    /// Maps a file as long as it was when its header was checked.
    ///
    /// # Errors
    /// `io` when it cannot be mapped or has become shorter.
    pub fn open(source: &Source) -> Result<Mapping> {
        check_length(source, source.length)?;
        let length = usize::try_from(source.length)
            .map_err(|_| Error::new(Kind::Io, "is larger than the address space").at(&source.path))?;
        // A private mapping that can be written counts towards the commit limit unless nothing is reserved for it.
        // SAFETY: the mapping is only ever used through raw addresses, for which no promise is made that the file
        // stays as it is; a file that changes underneath changes the values, as it does for every mapping.
        let mapped = unsafe { MmapOptions::new().len(length).no_reserve_swap().map_copy(&source.file) };
        let pages = mapped.map_err(|error| Error::from_io(error, &source.path, "cannot map"))?;
        Ok(Mapping { pages: pages.into(), page_bytes: page_bytes() })
    }

    /// Gives back what the process keeps of the whole pages in a range, and with it what it has written there.
    ///
    /// # Safety
    /// Nobody uses these bytes any more.
    pub unsafe fn forget(&self, range: &Range<u64>) {
        let (begin, end) = (range.start.next_multiple_of(self.page_bytes), range.end - range.end % self.page_bytes);
        let (Ok(begin), Ok(length)) = (usize::try_from(begin), usize::try_from(end.saturating_sub(begin))) else {
            return;
        };
        if length == 0 {
            return;
        }
        // SAFETY: these pages are of this range alone, which nobody uses.
        if let Err(error) = unsafe { self.pages.unchecked_advise_range(UncheckedAdvice::DontNeed, begin, length) } {
            tracing::debug!(%error, "the pages stay until the mapping goes");
        }
    }

    /// The address of the file's byte `offset`, or `None` past the end.
    pub fn address(&self, offset: u64) -> Option<u64> {
        let position = usize::try_from(offset).ok().filter(|&position| position <= self.pages.len())?;
        u64::try_from(self.pages.as_ptr().addr().checked_add(position)?).ok()
    }
}

/// A reader that copies out of a mapping.
pub struct MmapReader {
    source: Arc<Source>,
    mapping: Mapping,
}

impl MmapReader {
    /// Maps the file.
    ///
    /// # Errors
    /// Those of [`Mapping::open`].
    pub fn open(source: &Arc<Source>) -> Result<MmapReader> {
        Ok(MmapReader { source: Arc::clone(source), mapping: Mapping::open(source)? })
    }
}

impl Reader for MmapReader {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let length = u64::try_from(into.len()).unwrap_or(u64::MAX);
        let end = offset.saturating_add(length);
        // The pages past the end of a file that became shorter cannot be touched.
        check_length(&self.source, end)?;
        let pages = &self.mapping.pages;
        let begin = usize::try_from(offset).unwrap_or(usize::MAX);
        if begin.checked_add(into.len()).is_none_or(|end| end > pages.len()) {
            return Err(ended(&self.source, self.source.length));
        }
        // SAFETY: the range lies inside the mapping, whose pages the file still backs, and `into` is
        // memory of ours that cannot overlap a mapping that nobody else writes.
        unsafe { std::ptr::copy_nonoverlapping(pages.as_ptr().add(begin), into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}

/// Of a page of this machine, of which a mapping is made.
fn page_bytes() -> u64 {
    u64::try_from(rustix::param::page_size()).unwrap_or(u64::MAX)
}

fn check_length(source: &Source, needed: u64) -> Result<()> {
    let facts = source.file.metadata().map_err(|error| Error::from_io(error, &source.path, "cannot stat"))?;
    if facts.len() < needed { Err(ended(source, facts.len())) } else { Ok(()) }
}

fn ended(source: &Source, length: u64) -> Error {
    Error::new(Kind::Io, "the file ended early; it became shorter while it was loaded").at(&source.path).offset(length)
}
