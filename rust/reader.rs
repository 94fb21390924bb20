//! How bytes leave a file. The choice of the reader is made once, when a load
//! begins, from the file system and from where the bytes go.

pub mod mmap;
pub mod pread;
pub mod read_ahead;

use crate::error::{Error, Kind, Result};
use crate::options::ReaderChoice;
use crate::plan::Read;
use crate::source::Source;
use std::fmt;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// Gaps up to this long are read rather than skipped: about what a system call costs in bytes copied.
pub const GAP_BYTES: u64 = 16 << 10;
/// From this size on, a host destination is read into directly; below it, one read serves many tensors.
pub const DIRECT_BYTES: u64 = 128 << 10;

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

    /// Fills `into` with the bytes of the file from `offset` on.
    ///
    /// # Errors
    /// `io`, naming the file and the byte.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()>;

    /// Carries out all reads of a chunk.
    ///
    /// # Errors
    /// `io`, naming the file and the byte.
    fn fill(&self, reads: &[Read], buffer: Buffer<'_>) -> Result<()> {
        for read in reads {
            let outside = || Error::new(Kind::Internal, format!("{read:?} does not fit its slot"));
            let end = read.slot_begin.saturating_add(read.length);
            self.read(read.offset, buffer.bytes.get_mut(read.slot_begin..end).ok_or_else(outside)?)?;
        }
        Ok(())
    }
}

/// Memory that a reader fills.
pub struct Buffer<'a> {
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
}

impl fmt::Display for ReaderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReaderKind::Mmap => "mmap",
            ReaderKind::Pread => "pread",
        })
    }
}

/// Where the bytes of a load go, as far as a reader cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// New tensors on the CPU, which may be views of a mapping.
    NewHostMemory,
    /// Memory of the host that exists already, so that bytes have to be moved.
    HostMemory,
    /// Memory of a device, which bytes reach through staging.
    DeviceMemory,
}

/// Chooses the reader for a file.
///
/// # Errors
/// `io` when the file system cannot be asked what it is.
pub fn choose(choice: ReaderChoice, source: &Source, target: Target) -> Result<ReaderKind> {
    let (kind, why) = match choice {
        ReaderChoice::Mmap => (ReaderKind::Mmap, "asked for"),
        ReaderChoice::Pread => (ReaderKind::Pread, "asked for"),
        ReaderChoice::Auto if target != Target::NewHostMemory => {
            (ReaderKind::Pread, "bytes that are moved anyway are best read where they go")
        }
        ReaderChoice::Auto => match remote_file_system(source)? {
            Some(name) => {
                tracing::debug!(path = %source.path.display(), file_system = name, "not mapped");
                (ReaderKind::Pread, "a page fault on a network or FUSE file system can hang or kill the process")
            }
            None => (ReaderKind::Mmap, "tensors on the CPU need no copy of a local file"),
        },
    };
    tracing::debug!(path = %source.path.display(), reader = %kind, why, "reader");
    Ok(kind)
}

/// Opens the reader of a file that moves bytes to `target`.
///
/// # Errors
/// `io` where the file cannot be mapped or asked about.
pub fn open(choice: ReaderChoice, source: &Arc<Source>, target: Target) -> Result<Box<dyn Reader>> {
    Ok(match choose(choice, source, target)? {
        ReaderKind::Mmap => Box::new(mmap::MmapReader::open(source)?),
        ReaderKind::Pread => Box::new(pread::PreadReader::new(Arc::clone(source))),
    })
}

/// File systems whose pages come over a network or from another process, by the magic number of statfs(2).
const REMOTE_FILE_SYSTEMS: [(u32, &str); 15] = [
    (0x6969, "nfs"),
    (0x517B, "smb"),
    (0xFF53_4D42, "cifs"),
    (0xFE53_4D42, "smb2"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0x00C3_6400, "ceph"),
    (0x0BD0_0BD0, "lustre"),
    (0x4750_4653, "gpfs"),
    (0x1983_0326, "beegfs"),
    (0x5346_414F, "afs"),
    (0x6B41_4653, "kafs"),
    (0x7375_7245, "coda"),
    (0x7461_636F, "ocfs2"),
    (0x0116_1970, "gfs2"),
];

fn remote_file_system(source: &Source) -> Result<Option<&'static str>> {
    // SAFETY: statfs is plain data, and zero is a value of each of its fields.
    let mut facts: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open for as long as `source` lives, and `facts` is a valid place to write.
    if unsafe { libc::fstatfs(source.file.as_raw_fd(), &raw mut facts) } != 0 {
        let error = std::io::Error::last_os_error();
        return Err(Error::from_io(&error, &source.path, "cannot ask which file system it is on"));
    }
    Ok(REMOTE_FILE_SYSTEMS.iter().find(|(magic, _)| i64::from(*magic) == facts.f_type).map(|(_, name)| *name))
}
