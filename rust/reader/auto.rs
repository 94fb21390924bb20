//! Reader that copies cached bytes from the page cache and reads the others past it.

use super::page_cache::{self, Run};
use super::ring::RingKernel;
use super::uring::{Rings, UringReader};
use super::{ReadLimits, Reader, ReaderKind};
use crate::error::Result;
use crate::num::to_u64;
use crate::os::local_file::LocalFile;
use crate::os::retry::Check;
use crate::plan::Read;
use crate::profile;
use std::sync::{Arc, OnceLock};

/// Unit in which a read is split into cached and uncached parts, in bytes.
const UNIT_BYTES: u64 = 128 << 10;

/// Reader of one file that reads uncached bytes with O_DIRECT.
pub struct AutoReader<K: RingKernel> {
    source: Arc<LocalFile>,
    rings: Arc<Rings<K>>,
    alignment: u64,
    buffered: Arc<dyn Reader>,
    /// Opened at the first read of uncached bytes. A file in the page cache does not need it.
    direct: OnceLock<std::result::Result<UringReader<K>, String>>,
}

impl<K: RingKernel> AutoReader<K> {
    /// Creates a reader that reads cached bytes with `buffered`. The error is the reason why the file has no direct
    /// reads, if this is known without a read.
    pub fn open(
        source: &Arc<LocalFile>,
        rings: &Arc<Rings<K>>,
        buffered: Arc<dyn Reader>,
    ) -> std::result::Result<Self, String> {
        let alignment = rings.alignment(source)?;
        let (source, rings) = (Arc::clone(source), Arc::clone(rings));
        Ok(AutoReader { source, rings, alignment, buffered, direct: OnceLock::new() })
    }

    fn direct(&self) -> &std::result::Result<UringReader<K>, String> {
        self.direct.get_or_init(|| {
            let opened = UringReader::open(&self.source, &self.rings, Arc::clone(&self.buffered));
            if let Err(why) = &opened {
                tracing::info!(path = %self.source.path.display(), why, "no direct reads; uses the page cache");
                let why = format!("through the page cache only, because uring is not available: {why}");
                profile::reader(&self.source.path, Some(&self.source.file), ReaderKind::Auto.name(), &why);
            }
            opened
        })
    }
}

impl<K: RingKernel> Reader for AutoReader<K> {
    /// Does not limit the concurrency, because cached bytes are copied by the threads that read.
    fn limits(&self) -> ReadLimits {
        ReadLimits::direct(self.alignment)
    }

    fn refusal(&self) -> Option<&str> {
        self.direct().as_ref().err().map(String::as_str)
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        self.buffered.read(offset, into, check)
    }

    /// Returns whether all bytes are cached. The disk serves one thread as fast as several.
    fn divides(&self, reads: &[Read]) -> bool {
        let span = reads.first().zip(reads.last()).map(|(first, last)| first.offset..end_of(last));
        span.is_none_or(|span| page_cache::is_all_cached(&self.source, &span))
    }

    fn fill(&self, reads: &[Read], slot: &mut [u8], check: Check<'_>) -> Result<()> {
        // One system call for many small reads: most often all of them are cached.
        if reads.len() > 1 && self.divides(reads) {
            return self.buffered.fill(reads, slot, check);
        }
        let mut cached = Vec::new();
        let mut cold = Vec::new();
        for read in reads {
            for Run { range, is_cached } in page_cache::runs(&self.source, read.offset..end_of(read), UNIT_BYTES) {
                let list = if is_cached { &mut cached } else { &mut cold };
                list.extend(read.part(range));
            }
        }
        if !cached.is_empty() {
            self.buffered.fill(&cached, slot, check)?;
        }
        if cold.is_empty() {
            return Ok(());
        }
        match self.direct() {
            Ok(direct) => direct.fill(&cold, slot, check),
            Err(_) => self.buffered.fill(&cold, slot, check),
        }
    }
}

fn end_of(read: &Read) -> u64 {
    read.offset.saturating_add(to_u64(read.length))
}
