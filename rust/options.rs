//! What a person may set, with the defaults beside it. This is the only file
//! that reads the environment.

use crate::error::{Error, Kind, Result};
use std::str::FromStr;
use std::sync::OnceLock;

/// Which reader moves the bytes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReaderChoice {
    /// ChosenReader from the file system and the destination.
    #[default]
    Auto,
    /// The file is mapped; on the CPU the tensors are views of the mapping.
    Mmap,
    /// Parallel positioned reads.
    Pread,
    /// Reads past the page cache, many at a time.
    Uring,
    /// From the disk into the GPU's memory, past the host's.
    Gds,
}

/// What `FST_READER` may hold.
const READERS: [(&str, ReaderChoice); 5] = [
    ("auto", ReaderChoice::Auto),
    ("mmap", ReaderChoice::Mmap),
    ("pread", ReaderChoice::Pread),
    ("uring", ReaderChoice::Uring),
    ("gds", ReaderChoice::Gds),
];

impl FromStr for ReaderChoice {
    type Err = ();
    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        READERS.iter().find(|(name, _)| *name == text).map(|(_, choice)| *choice).ok_or(())
    }
}

/// The most host memory that staging may take, whatever is asked for.
pub const STAGING_BYTES_MAX: usize = 256 << 20;
/// The least a chunk may be: a page, since slots are page-aligned.
pub const CHUNK_BYTES_MIN: usize = 4 << 10;
/// More requests than this no disk takes at once.
pub const QUEUE_DEPTH_MAX: usize = 4096;
/// More threads than this never help a load and can exhaust a container.
pub const THREADS_MAX: usize = 256;

/// How a load is carried out.
///
/// ```
/// use fst::options::Options;
/// let options = Options { threads: 2, ..Options::default() };
/// assert!(options.chunk_bytes <= options.staging_bytes);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which reader to use. `FST_READER`: `auto`, `mmap`, `pread`, `uring` or `gds`.
    pub reader: ReaderChoice,
    /// Bytes of a slot of staging, and so the most that is read at once. `FST_CHUNK_BYTES`.
    pub chunk_bytes: usize,
    /// The most host memory of the process that holds bytes on their way, for all loads. `FST_STAGING_BYTES`.
    pub staging_bytes: usize,
    /// How many threads read. `FST_THREADS`.
    pub threads: usize,
    /// How many requests of a load the disk may have at once, all threads together; only `uring` asks for several.
    /// `FST_QUEUE_DEPTH`.
    pub queue_depth: usize,
    /// Whether pages that a load brings into the page cache are dropped again. Nothing is mapped then.
    /// `FST_DROP_CACHE`: `0` or `1`.
    pub drop_cache: bool,
}

impl Default for Options {
    fn default() -> Self {
        // Asking takes longer than a small load: it reads the files of control groups.
        static CORES: OnceLock<usize> = OnceLock::new();
        let cores = *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from));
        Options {
            reader: ReaderChoice::Auto,
            chunk_bytes: 4 << 20,
            staging_bytes: STAGING_BYTES_MAX,
            // Reads from a disk wait rather than work, so even few cores want several in flight.
            threads: cores.clamp(4, 16),
            queue_depth: 32,
            drop_cache: false,
        }
    }
}

impl Options {
    /// The defaults, changed by the environment.
    ///
    /// # Errors
    /// `invalid-argument` names the variable and what it may hold.
    pub fn from_env() -> Result<Self> {
        let defaults = Options::default();
        let staging_bytes =
            number("FST_STAGING_BYTES", CHUNK_BYTES_MIN..=STAGING_BYTES_MAX)?.unwrap_or(defaults.staging_bytes);
        Ok(Options {
            reader: match variable("FST_READER") {
                None => defaults.reader,
                Some(text) => text.parse().map_err(|()| {
                    let names = READERS.map(|(name, _)| name).join(", ");
                    Error::new(Kind::InvalidArgument, format!("FST_READER is {text:?}; it may be one of {names}"))
                })?,
            },
            chunk_bytes: number("FST_CHUNK_BYTES", CHUNK_BYTES_MIN..=STAGING_BYTES_MAX)?
                .unwrap_or(defaults.chunk_bytes)
                .min(staging_bytes),
            staging_bytes,
            threads: number("FST_THREADS", 1..=THREADS_MAX)?.unwrap_or(defaults.threads),
            queue_depth: number("FST_QUEUE_DEPTH", 1..=QUEUE_DEPTH_MAX)?.unwrap_or(defaults.queue_depth),
            drop_cache: number("FST_DROP_CACHE", 0..=1)?.map_or(defaults.drop_cache, |number| number == 1),
        })
    }
}

/// The level that `FST_LOG` asks for, if it asks for a log at all.
///
/// # Errors
/// `invalid-argument` when it is not the name of a level.
pub fn log_level_from_env() -> Result<Option<tracing::Level>> {
    let Some(text) = variable("FST_LOG") else { return Ok(None) };
    tracing::Level::from_str(&text).map(Some).map_err(|_| {
        Error::new(Kind::InvalidArgument, format!("FST_LOG is {text:?}; it may be error, warn, info, debug or trace"))
    })
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()).filter(|value| !value.is_empty())
}

fn number(name: &str, allowed: std::ops::RangeInclusive<usize>) -> Result<Option<usize>> {
    let Some(text) = variable(name) else { return Ok(None) };
    match text.parse() {
        Ok(value) if allowed.contains(&value) => Ok(Some(value)),
        _ => Err(Error::new(
            Kind::InvalidArgument,
            format!("{name} is {text:?}; it must be a whole number from {} to {}", allowed.start(), allowed.end()),
        )),
    }
}
