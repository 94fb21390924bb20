//! Readers of files. A load chooses one reader per file when it opens.

pub mod auto;
pub mod drop_cache;
pub mod lease;
pub mod mmap;
pub mod object;
pub mod page_cache;
pub mod pread;
pub mod read_ahead;
mod recorded;
pub mod ring;
mod units;
pub mod uring;

use crate::error::{Error, Kind, Result};
use crate::options::{Options, ReaderChoice};
use crate::os::file_system::FileSystem;
use crate::os::retry::Check;
use crate::plan::{GAP_BYTES, Read};
use crate::profile;
use crate::source::{Protection, Source};
use auto::AutoReader;
use drop_cache::DropCacheReader;
use lease::LeaseReader;
use object::ObjectReader;
use pread::PreadReader;
use recorded::RecordedReader;
use ring::RingKernel;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use units::UnitReader;
use uring::{Rings, UringReader};

/// Reads ranges of one file. All readers obey the same contract:
///
/// - A call fills all requested bytes or returns an error. Short reads are resumed, interrupted reads are repeated.
/// - Before a read is repeated because it was interrupted or the kernel was busy, the reader calls `check`, and ends with
///   its error.
/// - A file that ends before the end of the range is an `io` error that names the file and the byte.
/// - Any number of threads may call a reader at once.
pub trait Reader: Send + Sync {
    /// Returns the limits that planned reads of this file should obey.
    fn limits(&self) -> ReadLimits;

    /// Returns the reason why the reader falls back to the page cache, or `None` if it does not. May try a read.
    fn refusal(&self) -> Option<&str> {
        None
    }

    /// Fills `into` with the bytes of the file from `offset`.
    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()>;

    /// Performs all reads of a chunk, whose slot begins at a page boundary.
    ///
    /// May also write to the rest of the blocks of [`ReadLimits::alignment`] bytes that the reads touch.
    fn fill(&self, reads: &[Read], slot: &mut [u8], check: Check<'_>) -> Result<()> {
        for read in reads {
            let misfit = || Error::new(Kind::Internal, format!("{read:?} does not fit its slot"));
            let end = read.slot_begin.saturating_add(read.length);
            self.read(read.offset, slot.get_mut(read.slot_begin..end).ok_or_else(misfit)?, check)?;
        }
        Ok(())
    }

    /// Passes the bytes of a read to `take` where they are in memory already. Returns whether it did.
    fn lend(&self, _: &Read, _take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<bool> {
        Ok(false)
    }

    /// Makes bytes present that [`lend`](Reader::lend) passes on next. May read them from the disk.
    fn look_up(&self, _: &Range<u64>) {}

    /// Returns whether several threads, each with a part of these reads, are faster than one.
    fn divides(&self, _: &[Read]) -> bool {
        false
    }

    /// Returns whether [`scatter`](Reader::scatter) is better than [`fill`](Reader::fill) with copies out of the slot: the
    /// reader copies the bytes anyway.
    fn scatters(&self) -> bool {
        false
    }

    /// Returns whether the reader makes the pages of new memory present as it fills them.
    fn populates(&self) -> bool {
        false
    }

    /// Fills many pieces of memory with the bytes from their offsets, which ascend.
    fn scatter(&self, pieces: Vec<(u64, &mut [u8])>, check: Check<'_>) -> Result<()> {
        pieces.into_iter().try_for_each(|(offset, into)| self.read(offset, into, check))
    }
}

/// Limits of a reader, from which the plan of a load follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// Multiple of bytes to which reads are widened, in the file and in the slot. 1 if they are not widened.
    pub alignment: u64,
    /// Largest gap between two reads that is cheaper to read than to skip, in bytes. At least the alignment, unless that
    /// is 1.
    pub gap_bytes: u64,
    /// Smallest read that goes straight into a destination in host memory, in bytes. A smaller one shares a read with
    /// its neighbours. `None` if reads can only fill slots.
    pub in_place_bytes: Option<u64>,
    /// Number of threads beyond which more do not read faster.
    pub concurrency: usize,
    /// Number of requests that a remote store gets at once at the beginning. 1 for local files.
    pub requests: usize,
    /// Size of a request to a remote store, in bytes, and with it of the chunks. Threads then wait most of the time, so
    /// that there may be more of them than cores. `None` for local files.
    pub request_bytes: Option<usize>,
    /// Size of the units that are read as a whole, in bytes from the start of a tensor, such as chunks of an encryption.
    /// 1 if there are none.
    pub unit_bytes: u64,
}

impl ReadLimits {
    /// Limits of reads through the page cache.
    pub const BUFFERED: ReadLimits = ReadLimits {
        alignment: 1,
        gap_bytes: GAP_BYTES,
        in_place_bytes: Some(128 << 10),
        concurrency: usize::MAX,
        requests: 1,
        request_bytes: None,
        unit_bytes: 1,
    };

    /// Returns the limits for bytes in the page cache, where a system call costs about as much as copying 4 KiB, or for
    /// reads with gaps that other processes read: the disk reads these for all of them.
    fn with_short_gaps(self) -> ReadLimits {
        ReadLimits { gap_bytes: self.gap_bytes.min(4 << 10).max(self.alignment), ..self }
    }

    /// Returns the limits of reads past the page cache, in blocks of `alignment` bytes.
    pub fn direct(alignment: u64) -> ReadLimits {
        let buffered = ReadLimits::BUFFERED;
        ReadLimits {
            alignment,
            gap_bytes: buffered.gap_bytes.max(alignment),
            in_place_bytes: buffered.in_place_bytes.filter(|_| alignment == 1),
            ..buffered
        }
    }

    /// Returns limits that suit the files of both.
    #[must_use]
    pub fn merge(self, other: ReadLimits) -> ReadLimits {
        ReadLimits {
            alignment: self.alignment.max(other.alignment),
            gap_bytes: self.gap_bytes.max(other.gap_bytes),
            in_place_bytes: self.in_place_bytes.zip(other.in_place_bytes).map(|(one, two)| one.max(two)),
            concurrency: self.concurrency.min(other.concurrency),
            requests: self.requests.max(other.requests),
            request_bytes: self.request_bytes.max(other.request_bytes),
            unit_bytes: self.unit_bytes.max(other.unit_bytes),
        }
    }
}

/// Returns the part of a slot for each read, with the read's offset in the file. The reads ascend in the slot.
fn pieces_of<'a>(slot: &'a mut [u8], reads: &[Read]) -> Result<Vec<(u64, &'a mut [u8])>> {
    let misfit = |read: &Read| Error::new(Kind::Internal, format!("{read:?} does not fit its slot"));
    let mut pieces = Vec::with_capacity(reads.len());
    let (mut rest, mut taken) = (slot, 0);
    for read in reads {
        let skip = read.slot_begin.checked_sub(taken).ok_or_else(|| misfit(read))?;
        let (_, after) = rest.split_at_mut_checked(skip).ok_or_else(|| misfit(read))?;
        let (piece, after) = after.split_at_mut_checked(read.length).ok_or_else(|| misfit(read))?;
        pieces.push((read.offset, piece));
        (rest, taken) = (after, read.slot_begin + read.length);
    }
    Ok(pieces)
}

/// Kinds of readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaderKind {
    /// No reader of this module: tensors are views of a [`mmap::Mapping`].
    Mmap,
    /// [`pread`].
    Pread,
    /// [`uring`].
    Uring,
    /// [`object`]: requests to a remote store.
    Object,
    /// [`lease`]: copies out of a mapping under a read lease.
    Lease,
    /// [`auto`]: `pread` for cached bytes, `uring` for the others.
    Auto,
    /// No reader of this module: the device reads the file.
    Gds,
}

impl ReaderKind {
    /// Returns the name in `FST_READER` and in profiles.
    pub fn name(self) -> &'static str {
        match self {
            ReaderKind::Mmap => "mmap",
            ReaderKind::Pread => "pread",
            ReaderKind::Uring => "uring",
            ReaderKind::Object => "object",
            ReaderKind::Lease => "lease",
            ReaderKind::Auto => "auto",
            ReaderKind::Gds => "gds",
        }
    }
}

impl fmt::Display for ReaderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Use of a file's bytes, on which the choice of a reader depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// New CPU tensors, which may be views of a mapping.
    View,
    /// Memory that exists, on any device, to which the bytes are copied.
    Copy,
}

/// Reader of a file, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenReader {
    /// The reader.
    pub kind: ReaderKind,
    /// Reason, for logs and profiles.
    pub why: Cow<'static, str>,
}

impl ChosenReader {
    /// Creates a choice.
    pub fn new(kind: ReaderKind, why: impl Into<Cow<'static, str>>) -> ChosenReader {
        ChosenReader { kind, why: why.into() }
    }

    /// Records the choice in the log and in profiles.
    pub fn log(&self, source: &Source) {
        tracing::debug!(path = %source.path().display(), reader = %self.kind, why = %self.why, "reader");
        let file = source.local_bytes().map(|file| &file.file);
        profile::reader(source.path(), file, self.kind.name(), &self.why);
    }
}

/// Chooses the reader of a file.
pub fn choose(options: &Options, source: &Source, access: Access) -> Result<ChosenReader> {
    let Some(file) = source.local_bytes() else {
        return Ok(ChosenReader::new(ReaderKind::Object, "requests for ranges, many at once"));
    };
    if let Source::Units(source) = source {
        let why = match source.protection {
            Protection::Encrypted(_) => "the file is encrypted, in chunks of any alignment",
            Protection::Hashed(_) => "parts of tensors are verified, in groups of any alignment",
        };
        return Ok(ChosenReader::new(ReaderKind::Pread, why));
    }
    // The cache may remove a copy at any time, but its bytes stay while it is open.
    let access = if source.file().is_some() { access } else { Access::Copy };
    let requested = |kind| Ok(ChosenReader::new(kind, "requested"));
    match options.reader {
        ReaderChoice::Mmap if options.drop_cache => {
            Ok(ChosenReader::new(ReaderKind::Pread, "mapped pages cannot be dropped from the page cache"))
        }
        ReaderChoice::Mmap if access == Access::Copy => {
            Ok(ChosenReader::new(ReaderKind::Pread, "bytes that are copied are read, in case the file becomes shorter"))
        }
        ReaderChoice::Mmap => requested(ReaderKind::Mmap),
        ReaderChoice::Pread => requested(ReaderKind::Pread),
        ReaderChoice::Uring => requested(ReaderKind::Uring),
        ReaderChoice::Lease if options.drop_cache => {
            Ok(ChosenReader::new(ReaderKind::Pread, "mapped pages cannot be dropped from the page cache"))
        }
        ReaderChoice::Lease => {
            Ok(ChosenReader::new(ReaderKind::Lease, "other processes copy from the page cache, too"))
        }
        ReaderChoice::Auto => Ok(choose_by(FileSystem::of(&file.file), options, access)),
        // The device has no engine for direct reads, or the bytes are for views.
        ReaderChoice::Gds => {
            let ChosenReader { kind, why } = choose_by(FileSystem::of(&file.file), options, access);
            Ok(ChosenReader::new(kind, format!("gds is not available; {why}")))
        }
    }
}

fn choose_by(file_system: FileSystem, options: &Options, access: Access) -> ChosenReader {
    match (access, file_system) {
        (Access::View, FileSystem::Remote(name)) => ChosenReader::new(
            ReaderKind::Pread,
            format!(
                "the file is on {name}, and a page fault on a network or FUSE file system can hang or kill the process"
            ),
        ),
        (Access::View, _) if !options.drop_cache => {
            ChosenReader::new(ReaderKind::Mmap, "CPU tensors are views of a local file, without a copy")
        }
        (_, FileSystem::Remote(name)) => ChosenReader::new(
            ReaderKind::Pread,
            format!("the file is on {name}, which has a cache and a read-ahead of its own"),
        ),
        (_, FileSystem::Memory(name)) => {
            ChosenReader::new(ReaderKind::Pread, format!("the file is on {name}, in memory already"))
        }
        (_, FileSystem::Local) => {
            ChosenReader::new(ReaderKind::Auto, "pread for what the page cache holds, uring for what it does not")
        }
    }
}

/// Open reader of one file.
pub struct Opened {
    /// The reader.
    pub reader: Arc<dyn Reader>,
    chosen: ChosenReader,
    has_short_gaps: bool,
}

impl Opened {
    /// Returns the limits that planned reads of this file should obey.
    pub fn limits(&self) -> ReadLimits {
        let limits = self.reader.limits();
        if self.has_short_gaps { limits.with_short_gaps() } else { limits }
    }

    /// Returns the reader that is in use and the reason for it, after any fallback.
    pub fn chosen(&self) -> ChosenReader {
        self.reader.refusal().map_or_else(|| self.chosen.clone(), |why| refused(ReaderKind::Uring, why))
    }
}

fn refused(kind: ReaderKind, why: impl fmt::Display) -> ChosenReader {
    ChosenReader::new(ReaderKind::Pread, format!("{kind} is not available: {why}"))
}

/// Opens the reader of a file or object whose bytes are copied.
pub fn open<K: RingKernel + 'static>(options: &Options, source: &Source, rings: &Arc<Rings<K>>) -> Result<Opened> {
    let mut chosen = choose(options, source, Access::Copy)?;
    let (reader, has_short_gaps) = match (source, source.local_bytes()) {
        (Source::Units(source), _) => {
            let options = Options { reader: ReaderChoice::Pread, ..options.clone() };
            let Opened { reader, has_short_gaps, .. } = open(&options, &source.stored, rings)?;
            return Ok(Opened { reader: shared(UnitReader::new(reader, Arc::clone(source))), chosen, has_short_gaps });
        }
        (Source::Object(object), None) => (shared(ObjectReader::new(Arc::clone(object), options)), false),
        (Source::File(file), _) | (Source::Object(_), Some(file)) => {
            let buffered = PreadReader::new(Arc::clone(file));
            let buffered =
                if options.drop_cache { shared(DropCacheReader::new(buffered, file)) } else { shared(buffered) };
            let opened = match chosen.kind {
                ReaderKind::Uring => UringReader::open(file, rings, Arc::clone(&buffered)).map(shared),
                ReaderKind::Auto => AutoReader::open(file, rings, Arc::clone(&buffered)).map(shared),
                ReaderKind::Lease => LeaseReader::open(file).map(shared).map_err(|why| why.to_string()),
                ReaderKind::Mmap | ReaderKind::Pread | ReaderKind::Object | ReaderKind::Gds => {
                    Ok(Arc::clone(&buffered))
                }
            };
            let reader = opened.unwrap_or_else(|why| {
                // Direct reads are refused for the auto reader, too.
                let kind = if chosen.kind == ReaderKind::Lease { ReaderKind::Lease } else { ReaderKind::Uring };
                chosen = refused(kind, why);
                tracing::info!(path = %file.path.display(), why = %chosen.why, "uses positioned reads");
                buffered
            });
            let is_shared = options.leaves_gaps || options.shares_disk;
            let has_short_gaps = || is_shared || page_cache::is_mostly_cached(file);
            (reader, chosen.kind != ReaderKind::Lease && has_short_gaps())
        }
    };
    chosen.log(source);
    Ok(Opened { reader: shared(RecordedReader::new(chosen.kind, source.path(), reader)), chosen, has_short_gaps })
}

/// Opens a reader of bytes that are not loaded, but only looked at. It reads a local file through the page cache, where a
/// later load finds the bytes.
pub fn open_buffered(options: &Options, source: &Source) -> Arc<dyn Reader> {
    let (kind, reader) = match source {
        Source::Units(source) => {
            return shared(UnitReader::new(open_buffered(options, &source.stored), Arc::clone(source)));
        }
        Source::Object(object) => (ReaderKind::Object, shared(ObjectReader::new(Arc::clone(object), options))),
        Source::File(file) => (ReaderKind::Pread, shared(PreadReader::new(Arc::clone(file)))),
    };
    shared(RecordedReader::new(kind, source.path(), reader))
}

/// Does what [`open_buffered`] does. The reader of a file that may be mapped also lends bytes, if the file can be leased.
pub fn open_lending(options: &Options, source: &Source) -> Arc<dyn Reader> {
    let may_map = || choose(options, source, Access::View).is_ok_and(|chosen| chosen.kind == ReaderKind::Mmap);
    match source.file().filter(|_| may_map()).map(LeaseReader::open) {
        Some(Ok(reader)) => shared(RecordedReader::new(ReaderKind::Lease, source.path(), shared(reader))),
        Some(Err(error)) => {
            tracing::debug!(path = %source.path().display(), %error, "no read lease; copies bytes to look at them");
            open_buffered(options, source)
        }
        None => open_buffered(options, source),
    }
}

fn shared(reader: impl Reader + 'static) -> Arc<dyn Reader> {
    Arc::new(reader)
}
