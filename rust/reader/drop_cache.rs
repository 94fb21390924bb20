//! Reader that leaves the page cache unchanged, so that a load does not evict the files of other programs.

use super::page_cache::{self, Advice};
use super::{ReadLimits, Reader};
use crate::error::Result;
use crate::num::to_u64;
use crate::os::local_file::LocalFile;
use crate::os::retry::Check;
use crate::plan::Read;
use std::ops::Range;
use std::sync::Arc;

/// Reader that drops the pages it has read, except those that were cached when it was opened.
pub struct DropCacheReader<R> {
    inner: R,
    source: Arc<LocalFile>,
    /// Uncached ranges, sorted and disjoint. Determined before the first read: later, pages that were cached before
    /// cannot be told from pages that a neighbouring read has brought in.
    cold: Vec<Range<u64>>,
}

impl<R: Reader> DropCacheReader<R> {
    /// Creates a reader around `inner`, which reads `source`.
    pub fn new(inner: R, source: &Arc<LocalFile>) -> Self {
        let runs = page_cache::runs(source, 0..source.length, page_cache::page_bytes());
        let cold = runs.into_iter().filter(|run| !run.is_cached).map(|run| run.range).collect();
        DropCacheReader { inner, source: Arc::clone(source), cold }
    }

    fn drop_pages(&self, offset: u64, length: usize) {
        let end = offset.saturating_add(to_u64(length));
        let read = page_cache::pages_of(&(offset..end));
        let first = self.cold.partition_point(|cold| cold.end <= read.start);
        let touched = self.cold.iter().skip(first).take_while(|cold| cold.start < read.end);
        for cold in touched {
            let pages = cold.start.max(read.start)..cold.end.min(read.end);
            page_cache::advise(&self.source, &pages, Advice::DontNeed);
        }
    }
}

impl<R: Reader> Reader for DropCacheReader<R> {
    fn limits(&self) -> ReadLimits {
        self.inner.limits()
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        let read = self.inner.read(offset, into, check);
        self.drop_pages(offset, into.len());
        read
    }

    fn fill(&self, reads: &[Read], slot: &mut [u8], check: Check<'_>) -> Result<()> {
        let filled = self.inner.fill(reads, slot, check);
        for read in reads {
            self.drop_pages(read.offset, read.length);
        }
        filled
    }
}
