//! Reader that records the reads of another reader in profiles.

use super::{ReadLimits, Reader, ReaderKind};
use crate::error::Result;
use crate::os::retry::Check;
use crate::plan::Read;
use crate::profile::{self, Count, Detail, Span, Stage};
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Reader that wraps every call in a span.
pub struct RecordedReader {
    reader: Arc<dyn Reader>,
    is_remote: bool,
    detail: Detail,
}

impl RecordedReader {
    /// Wraps a reader of this kind, which reads the file at `path`.
    pub fn new(kind: ReaderKind, path: &Path, reader: Arc<dyn Reader>) -> Self {
        let detail = json!({ "path": path.to_string_lossy(), "reader": kind.name() });
        RecordedReader { reader, is_remote: kind == ReaderKind::Object, detail: Arc::new(detail) }
    }

    fn span(&self, reads: usize, bytes: usize) -> Span {
        profile::count(Count::Reads, reads);
        if self.is_remote {
            profile::count(Count::RemoteBytes, bytes);
        }
        profile::span(Stage::Read).bytes(bytes).detail(|| Arc::clone(&self.detail))
    }
}

impl Reader for RecordedReader {
    fn limits(&self) -> ReadLimits {
        self.reader.limits()
    }

    fn refusal(&self) -> Option<&str> {
        self.reader.refusal()
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        let _span = self.span(1, into.len());
        self.reader.read(offset, into, check)
    }

    fn fill(&self, reads: &[Read], slot: &mut [u8], check: Check<'_>) -> Result<()> {
        let _span = self.span(reads.len(), reads.iter().map(|read| read.length).sum());
        self.reader.fill(reads, slot, check)
    }

    fn lend(&self, read: &Read, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<bool> {
        self.reader.lend(read, &mut |bytes| {
            // The copy has a span of its own.
            drop(self.span(1, bytes.len()));
            take(bytes)
        })
    }

    fn look_up(&self, range: &Range<u64>) {
        self.reader.look_up(range);
    }

    fn divides(&self, reads: &[Read]) -> bool {
        self.reader.divides(reads)
    }

    fn scatters(&self) -> bool {
        self.reader.scatters()
    }

    fn populates(&self) -> bool {
        self.reader.populates()
    }

    fn scatter(&self, pieces: Vec<(u64, &mut [u8])>, check: Check<'_>) -> Result<()> {
        let _span = self.span(1, pieces.iter().map(|(_, into)| into.len()).sum());
        self.reader.scatter(pieces, check)
    }
}
