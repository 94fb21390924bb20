//! Copies out of a mapping that no process can make shorter meanwhile, because this one holds a read lease of the file.

use super::pread::PreadReader;
use super::{ReadLimits, Reader, page_cache};
use crate::error::Result;
use crate::num::{to_u64, to_usize};
use crate::os::lease::LeasedFile;
use crate::os::local_file::LocalFile;
use crate::os::memory;
use crate::os::mutex::Mutex;
use crate::os::retry::Check;
use crate::plan::Read;
use memmap2::{MmapOptions, MmapRaw};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Largest gap between rows that are copied out of one range, in bytes. Their pages are looked up, but not copied.
const LEASED_GAP_BYTES: u64 = 64 << 10;

/// Number of bytes that are lent before the pages of the file are removed from this process, where they count as its memory.
const LENT_BYTES_MAX: usize = 8 << 20;

/// Reader that lends the bytes of a file where the page cache holds them, so that only the rows that are needed are
/// copied. A system call would copy the gaps between them, too.
///
/// Reads as [`PreadReader`] does while another process has the file open for writing.
pub struct LeaseReader {
    source: Arc<LocalFile>,
    leased: LeasedFile,
    /// Read under a lease only.
    pages: MmapRaw,
    /// Bytes that were lent since pages were last removed from this process.
    lent: Mutex<Lent>,
    buffered: PreadReader<Arc<LocalFile>>,
}

#[derive(Default)]
struct Lent {
    bytes: usize,
    /// Range of the file that has all of them.
    hull: Range<usize>,
}

impl LeaseReader {
    /// Maps a file, and tries to take a lease. The error says why the file cannot be leased or mapped.
    pub fn open(source: &Arc<LocalFile>) -> io::Result<LeaseReader> {
        let leased = LeasedFile::open(source)?;
        let pages = MmapOptions::new().len(to_usize(source.length)).map_raw_read_only(&source.file)?;
        drop(leased.lease()?);
        // Fails before Linux 5.14.
        memory::look_up(pages.as_ptr(), 1)?;
        let buffered = PreadReader::new(Arc::clone(source));
        Ok(LeaseReader { source: Arc::clone(source), leased, pages, lent: Mutex::default(), buffered })
    }

    /// Passes the bytes of a read to `take`, and returns its result. The error says why they cannot be lent: the errors of
    /// [`LeasedFile::lease`] and [`memory::look_up`], or a file that has become shorter.
    fn lend_under_lease(&self, read: &Read, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> io::Result<Result<()>> {
        let begin = to_usize(read.offset);
        let end = begin.checked_add(read.length).filter(|end| *end <= self.pages.len());
        let _lease = self.leased.lease()?;
        if end.is_none() || self.source.file.metadata()?.len() < self.source.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let address = self.pages.as_ptr().wrapping_add(begin);
        let range = read.offset..read.offset.saturating_add(to_u64(read.length));
        if !page_cache::is_all_cached(&self.source, &range) {
            memory::look_up(address, read.length)?;
        }
        // SAFETY: the pages are part of the file and in memory, and the lease keeps other processes from changing them.
        let taken = take(unsafe { std::slice::from_raw_parts(address, read.length) });
        self.unmap_after(begin..begin + read.length);
        Ok(taken)
    }

    /// Unmaps borrowed pages in batches. The kernel also looks at pages that were unmapped before, so only pages of the
    /// last bytes are given to it.
    fn unmap_after(&self, range: Range<usize>) {
        let mut lent = self.lent.lock();
        let Lent { bytes, hull } = std::mem::take(&mut *lent);
        let hull = if bytes == 0 { range.clone() } else { hull.start.min(range.start)..hull.end.max(range.end) };
        let bytes = bytes + range.len();
        if bytes < LENT_BYTES_MAX {
            *lent = Lent { bytes, hull };
        } else {
            drop(lent);
            memory::unmap_pages(&self.pages, hull);
        }
    }
}

impl Reader for LeaseReader {
    fn limits(&self) -> ReadLimits {
        ReadLimits { gap_bytes: LEASED_GAP_BYTES, ..self.buffered.limits() }
    }

    fn divides(&self, reads: &[Read]) -> bool {
        self.buffered.divides(reads)
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        self.buffered.read(offset, into, check)
    }

    fn look_up(&self, range: &Range<u64>) {
        let (begin, end) = (to_usize(range.start), to_usize(range.end).min(self.pages.len()));
        // Whoever uses the bytes learns why they cannot be read.
        let _ = memory::look_up(self.pages.as_ptr().wrapping_add(begin), end.saturating_sub(begin));
    }

    fn lend(&self, read: &Read, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<bool> {
        match self.lend_under_lease(read, take) {
            Ok(result) => result.map(|()| true),
            // The caller then calls `read`, which names a file that has become shorter, and a byte that cannot be read.
            Err(error) => {
                tracing::debug!(path = %self.source.path.display(), %error, "reads instead of copying under a lease");
                Ok(false)
            }
        }
    }
}
