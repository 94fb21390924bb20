//! Reads that leave the page cache as they found it, so that a load does not
//! push out what other programs on the machine keep there.

use super::page_cache::{self, Advice};
use super::{Reader, SlotBuffer};
use crate::error::Result;
use crate::plan::Read;
use crate::source::Source;
use std::ops::Range;
use std::sync::Arc;

/// A reader after whose reads the pages that were not cached when it was opened are dropped.
pub struct DropCacheReader<R> {
    inner: R,
    source: Arc<Source>,
    /// In the order of the file, and apart from each other. Found out before the first read: later nobody could tell
    /// a page that was there from one that a neighbouring read has just brought.
    cold: Vec<Range<u64>>,
}

impl<R: Reader> DropCacheReader<R> {
    /// A reader that reads with `inner`, which reads `source`.
    pub fn new(inner: R, source: &Arc<Source>) -> Self {
        let runs = page_cache::runs(source, 0..source.length, page_cache::page_bytes());
        let cold = runs.into_iter().filter(|run| !run.is_cached).map(|run| run.range).collect();
        DropCacheReader { inner, source: Arc::clone(source), cold }
    }

    fn drop_pages(&self, offset: u64, length: usize) {
        let end = offset.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
        let read = page_cache::pages_of(&(offset..end));
        let first = self.cold.partition_point(|cold| cold.end <= read.start);
        let touched = self.cold.iter().skip(first).take_while(|cold| cold.start < read.end);
        for cold in touched {
            let brought = cold.start.max(read.start)..cold.end.min(read.end);
            page_cache::advise(&self.source, &brought, Advice::DontNeed);
        }
    }
}

impl<R: Reader> Reader for DropCacheReader<R> {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let read = self.inner.read(offset, into);
        self.drop_pages(offset, into.len());
        read
    }

    fn fill(&self, reads: &[Read], buffer: SlotBuffer<'_>) -> Result<()> {
        let filled = self.inner.fill(reads, buffer);
        for read in reads {
            self.drop_pages(read.offset, read.length);
        }
        filled
    }
}
