//! What a person may set, with the defaults beside it. This is the only file
//! that reads the environment.

use crate::error::{Error, Kind, Result};
use std::str::FromStr;

/// Which reader moves the bytes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReaderChoice {
    /// Chosen from the file system and the destination.
    #[default]
    Auto,
    /// The file is mapped; on the CPU the tensors are views of the mapping.
    Mmap,
    /// Parallel positioned reads.
    Pread,
}

impl FromStr for ReaderChoice {
    type Err = ();
    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        match text {
            "auto" => Ok(ReaderChoice::Auto),
            "mmap" => Ok(ReaderChoice::Mmap),
            "pread" => Ok(ReaderChoice::Pread),
            _ => Err(()),
        }
    }
}

/// The most host memory that staging may take, whatever is asked for.
pub const STAGING_BYTES_MAX: usize = 256 << 20;
/// The least a chunk may be: a page, since slots are page-aligned.
pub const CHUNK_BYTES_MIN: usize = 4 << 10;
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
    /// Which reader to use. `FST_READER`: `auto`, `mmap` or `pread`.
    pub reader: ReaderChoice,
    /// Bytes of a slot of staging, and so the most that is read at once. `FST_CHUNK_BYTES`.
    pub chunk_bytes: usize,
    /// The most host memory of the process that holds bytes on their way, for all loads. `FST_STAGING_BYTES`.
    pub staging_bytes: usize,
    /// How many threads read. `FST_THREADS`.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Options {
            reader: ReaderChoice::Auto,
            chunk_bytes: 4 << 20,
            staging_bytes: STAGING_BYTES_MAX,
            // Reads from a disk wait rather than work, so even few cores want several in flight.
            threads: cores.clamp(4, 16),
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
                    Error::new(Kind::InvalidArgument, format!("FST_READER is {text:?}; it may be auto, mmap or pread"))
                })?,
            },
            chunk_bytes: number("FST_CHUNK_BYTES", CHUNK_BYTES_MIN..=STAGING_BYTES_MAX)?
                .unwrap_or(defaults.chunk_bytes)
                .min(staging_bytes),
            staging_bytes,
            threads: number("FST_THREADS", 1..=THREADS_MAX)?.unwrap_or(defaults.threads),
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
