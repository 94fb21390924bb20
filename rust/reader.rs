//! How bytes leave a file. The choice of the reader is made once, when a load
//! begins, from the file system and from where the bytes go.

pub mod auto;
pub mod drop_cache;
pub mod mmap;
pub mod page_cache;
pub mod pread;
pub mod read_ahead;
mod recorded;
pub mod ring;
pub mod uring;

use crate::error::{Error, Kind, Result};
use crate::options::{Options, ReaderChoice};
use crate::os::file_system::FileSystem;
use crate::plan::Read;
use crate::profile;
use crate::source::Source;
use auto::AutoReader;
use drop_cache::DropCacheReader;
use mmap::MmapReader;
use pread::PreadReader;
use recorded::Recorded;
use ring::RingKernel;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use uring::{Rings, UringReader};

/// Gaps up to this long are read rather than skipped: about what a system call costs in bytes copied.
pub const GAP_BYTES: u64 = 16 << 10;
/// From this size on, a host destination is read into directly; below it, one read serves many tensors.
pub const IN_PLACE_BYTES: u64 = 128 << 10;

/// Reads ranges of one file. Every reader keeps to the same contract:
///
/// - What is asked for is filled whole or an error is returned; short reads are resumed, interrupted ones repeated.
/// - The end of the file before the end of the range is an `io` error that names the file and the byte.
/// - Any number of threads may read at once.
pub trait Reader: Send + Sync {
    /// [`Reader::fill`] is quickest where reads have room to be widened to multiples of this many bytes, and may
    /// write there.
    fn alignment(&self) -> u64 {
        1
    }

    /// Why the reader cannot do what it was chosen for and reads through the page cache, if so. To tell, it may try.
    fn refusal(&self) -> Option<&str> {
        None
    }

    /// Fills `into` with the bytes of the file from `offset` on.
    ///
    /// # Errors
    /// `io`, naming the file and the byte.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()>;

    /// Carries out all reads of a chunk.
    ///
    /// # Errors
    /// `io`, naming the file and the byte.
    fn fill(&self, reads: &[Read], buffer: SlotBuffer<'_>) -> Result<()> {
        for read in reads {
            let outside = || Error::new(Kind::Internal, format!("{read:?} does not fit its slot"));
            let end = read.slot_begin.saturating_add(read.length);
            self.read(read.offset, buffer.bytes.get_mut(read.slot_begin..end).ok_or_else(outside)?)?;
        }
        Ok(())
    }
}

/// Memory that a reader fills.
pub struct SlotBuffer<'a> {
    /// Names the memory for as long as the process lives, so that a reader may make it known to the kernel once.
    pub id: u64,
    /// The memory itself, which begins at a page.
    pub bytes: &'a mut [u8],
}

/// The readers there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaderKind {
    /// [`mmap`].
    Mmap,
    /// [`pread`].
    Pread,
    /// [`uring`].
    Uring,
    /// [`auto`]: what is cached through `pread`, the rest through `uring`.
    Auto,
    /// None of these: the device reads by itself.
    Gds,
}

impl ReaderKind {
    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            ReaderKind::Mmap => "mmap",
            ReaderKind::Pread => "pread",
            ReaderKind::Uring => "uring",
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

/// Where the bytes of a load go, as far as a reader cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// New tensors on the CPU, which may be views of a mapping.
    NewHostMemory,
    /// Memory of the host that exists already, so that bytes have to be moved.
    HostMemory,
    /// Memory of a device, which bytes reach through staging.
    DeviceMemory,
}

/// What moves the bytes of a file, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenReader {
    /// The reader.
    pub kind: ReaderKind,
    /// The reason, for people.
    pub why: Cow<'static, str>,
}

impl ChosenReader {
    /// A reader and the reason for it.
    pub fn new(kind: ReaderKind, why: impl Into<Cow<'static, str>>) -> ChosenReader {
        ChosenReader { kind, why: why.into() }
    }

    /// Tells the log, and profiles.
    pub fn log(&self, source: &Source) {
        tracing::debug!(path = %source.path.display(), reader = %self.kind, why = %self.why, "reader");
        profile::reader(&source.path, &source.file, self.kind.name(), &self.why);
    }
}

/// Chooses the reader for a file.
///
/// # Errors
/// `io` when the file system cannot be asked what it is.
pub fn choose(options: &Options, source: &Source, memory_kind: MemoryKind) -> Result<ChosenReader> {
    let asked_for = |kind| Ok(ChosenReader::new(kind, "asked for"));
    match options.reader {
        ReaderChoice::Mmap if options.drop_cache => {
            Ok(ChosenReader::new(ReaderKind::Pread, "what is mapped cannot be dropped from the page cache"))
        }
        ReaderChoice::Mmap => asked_for(ReaderKind::Mmap),
        ReaderChoice::Pread => asked_for(ReaderKind::Pread),
        ReaderChoice::Uring => asked_for(ReaderKind::Uring),
        ReaderChoice::Auto => Ok(choose_by(FileSystem::of(&source.file, &source.path)?, options, memory_kind)),
        // Only what no device reads by itself is asked for here.
        ReaderChoice::Gds => {
            let ChosenReader { kind, why } =
                choose_by(FileSystem::of(&source.file, &source.path)?, options, memory_kind);
            Ok(ChosenReader::new(kind, format!("gds is not to be had; {why}")))
        }
    }
}

fn choose_by(file_system: FileSystem, options: &Options, memory_kind: MemoryKind) -> ChosenReader {
    match (memory_kind, file_system) {
        (MemoryKind::NewHostMemory, FileSystem::Remote(name)) => ChosenReader::new(
            ReaderKind::Pread,
            format!("it is on {name}, and a page fault on a network or FUSE file system can hang or kill the process"),
        ),
        (MemoryKind::NewHostMemory, _) if !options.drop_cache => {
            ChosenReader::new(ReaderKind::Mmap, "tensors on the CPU need no copy of a local file")
        }
        (_, FileSystem::Remote(name)) => {
            ChosenReader::new(ReaderKind::Pread, format!("it is on {name}, whose own cache and read-ahead know best"))
        }
        (_, FileSystem::Memory(name)) => {
            ChosenReader::new(ReaderKind::Pread, format!("it is on {name}, in memory already, from where it is copied"))
        }
        (_, FileSystem::Local) => {
            ChosenReader::new(ReaderKind::Auto, "pread for what the page cache holds, uring for what it does not")
        }
    }
}

/// The reader of one file.
pub struct Opened {
    /// Reads.
    pub reader: Arc<dyn Reader>,
    chosen: ChosenReader,
}

impl Opened {
    /// What moves the bytes and why, also where it is not what was meant to.
    pub fn chosen(&self) -> ChosenReader {
        self.reader.refusal().map_or_else(|| self.chosen.clone(), refused)
    }
}

fn refused(why: impl fmt::Display) -> ChosenReader {
    ChosenReader::new(ReaderKind::Pread, format!("uring is not to be had: {why}"))
}

/// Opens the reader of a file that moves bytes to `memory_kind`.
///
/// # Errors
/// `io` where the file cannot be mapped or asked about.
pub fn open<K: RingKernel + 'static>(
    options: &Options,
    source: &Arc<Source>,
    memory_kind: MemoryKind,
    rings: &Arc<Rings<K>>,
) -> Result<Opened> {
    let mut chosen = choose(options, source, memory_kind)?;
    let buffered = match (chosen.kind, options.drop_cache) {
        (ReaderKind::Mmap, _) => shared(MmapReader::open(source)?),
        (_, true) => shared(DropCacheReader::new(PreadReader::new(Arc::clone(source)), source)),
        (_, false) => shared(PreadReader::new(Arc::clone(source))),
    };
    let opened = match chosen.kind {
        ReaderKind::Mmap | ReaderKind::Pread | ReaderKind::Gds => Ok(Arc::clone(&buffered)),
        ReaderKind::Uring => UringReader::open(source, rings, Arc::clone(&buffered)).map(shared),
        ReaderKind::Auto => AutoReader::open(source, rings, Arc::clone(&buffered)).map(shared),
    };
    let reader = match opened {
        Ok(reader) => reader,
        Err(why) => {
            tracing::info!(path = %source.path.display(), why, "no direct reads; through the page cache");
            chosen = refused(why);
            buffered
        }
    };
    chosen.log(source);
    Ok(Opened { reader: shared(Recorded::new(chosen.kind, source, reader)), chosen })
}

fn shared(reader: impl Reader + 'static) -> Arc<dyn Reader> {
    Arc::new(reader)
}
