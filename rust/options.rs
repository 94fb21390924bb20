//! Options of loads and saves, with their defaults. Only this file reads the environment.

pub mod experiments;

use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use rustix::thread::{Pid, sched_getaffinity};
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Reader that a user requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReaderChoice {
    /// Chosen for each file from its file system and the destination.
    #[default]
    Auto,
    /// Mapped files. CPU tensors are views of the mapping.
    Mmap,
    /// Parallel positioned reads through the page cache.
    Pread,
    /// Direct reads through io_uring, many at once.
    Uring,
    /// GPUDirect Storage: reads from the disk into GPU memory.
    Gds,
    /// Copies out of a mapping, under a read lease. No variable sets it.
    Lease,
}

/// Values of `FST_READER`.
const READERS: [(&str, ReaderChoice); 5] = [
    ("auto", ReaderChoice::Auto),
    ("mmap", ReaderChoice::Mmap),
    ("pread", ReaderChoice::Pread),
    ("uring", ReaderChoice::Uring),
    ("gds", ReaderChoice::Gds),
];

/// Upper bound for staging memory, in bytes.
pub const STAGING_BYTES_MAX: usize = 256 << 20;
/// Lower bound for the chunk size, in bytes: one page, because slots are page-aligned.
pub const CHUNK_BYTES_MIN: usize = 4 << 10;
/// Upper bound for the queue depth. No disk accepts more requests at once.
pub const QUEUE_DEPTH_MAX: usize = 4096;
/// Upper bound for the number of threads. More never help a load, and can exhaust a container.
pub const THREADS_MAX: usize = 256;

/// Options of a load or save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Requested reader. `FST_READER`: `auto`, `mmap`, `pread`, `uring` or `gds`.
    pub reader: ReaderChoice,
    /// Size of a staging slot, and so of the largest chunk, in bytes. `FST_CHUNK_BYTES`.
    pub chunk_bytes: usize,
    /// Size of a request to a remote store, in bytes. `FST_REQUEST_BYTES`.
    pub request_bytes: usize,
    /// Upper bound for the staging memory of the process, for all loads together, in bytes. `FST_STAGING_BYTES`.
    pub staging_bytes: usize,
    /// Number of threads that read. `FST_THREADS`, or by default the cores of this rank, but 4 to 16.
    pub threads: usize,
    /// Number of requests of a load that may be in flight, for all threads together. Only `uring` uses several per
    /// thread. `FST_QUEUE_DEPTH`.
    pub queue_depth: usize,
    /// Whether a load drops the pages that it brings into the page cache. Files are not mapped then. `FST_DROP_CACHE`:
    /// `0` or `1`.
    pub drop_cache: bool,
    /// Whether reads and requests leave out the bytes between those that are needed, however few they are: other ranks read
    /// them. No variable sets it.
    pub leaves_gaps: bool,
    /// Whether other processes of this machine read the bytes between those that are needed. Reads of local files then
    /// leave out gaps that a disk reads as fast as it answers another request. No variable sets it.
    pub shares_disk: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            reader: ReaderChoice::Auto,
            chunk_bytes: 4 << 20,
            // Long enough that the latency of a request is short beside it, and short enough for many at once.
            request_bytes: 8 << 20,
            staging_bytes: STAGING_BYTES_MAX,
            threads: default_threads(cores(), None),
            queue_depth: 32,
            drop_cache: false,
            leaves_gaps: false,
            shares_disk: false,
        }
    }
}

impl Options {
    /// Returns the defaults with the changes of the environment. Fails with `invalid-argument`, with the variable and
    /// its allowed values.
    pub fn from_env() -> Result<Self> {
        experiments::from_env()?;
        let defaults = Options::default();
        let staging_bytes =
            number("FST_STAGING_BYTES", CHUNK_BYTES_MIN..=STAGING_BYTES_MAX)?.unwrap_or(defaults.staging_bytes);
        Ok(Options {
            reader: match variable("FST_READER") {
                None => defaults.reader,
                Some(text) => {
                    READERS.into_iter().find(|(name, _)| *name == text).map(|(_, choice)| choice).ok_or_else(|| {
                        let names = READERS.map(|(name, _)| name).join(", ");
                        Error::new(Kind::InvalidArgument, format!("FST_READER is {text:?}; it may be one of {names}"))
                    })?
                }
            },
            chunk_bytes: number("FST_CHUNK_BYTES", CHUNK_BYTES_MIN..=STAGING_BYTES_MAX)?
                .unwrap_or(defaults.chunk_bytes)
                .min(staging_bytes),
            request_bytes: number("FST_REQUEST_BYTES", CHUNK_BYTES_MIN..=STAGING_BYTES_MAX)?
                .unwrap_or(defaults.request_bytes)
                .min(staging_bytes),
            staging_bytes,
            threads: number("FST_THREADS", 1..=THREADS_MAX)?
                .unwrap_or_else(|| default_threads(cores(), variable("LOCAL_WORLD_SIZE").as_deref())),
            queue_depth: number("FST_QUEUE_DEPTH", 1..=QUEUE_DEPTH_MAX)?.unwrap_or(defaults.queue_depth),
            drop_cache: number("FST_DROP_CACHE", 0..=1)?.map_or(defaults.drop_cache, |number| number == 1),
            ..defaults
        })
    }
}

/// Returns the number of cores that this process may use.
pub fn cores() -> usize {
    // The call reads the files of control groups, which takes longer than a small load.
    static CORES: AtomicUsize = AtomicUsize::new(0);
    let mut cores = CORES.load(Ordering::Relaxed);
    if cores == 0 {
        cores = std::thread::available_parallelism().map_or(1, usize::from);
        CORES.store(cores, Ordering::Relaxed);
    }
    cores
}

/// Returns the default of `FST_THREADS`: the cores of this process over the ranks that share them, but 4 to 16. Launchers such
/// as torchrun set `LOCAL_WORLD_SIZE` to the number of ranks on this machine.
#[doc(hidden)]
pub fn default_threads(cores: usize, local_world_size: Option<&str>) -> usize {
    // The variable is not one of fst, so other values are no error.
    let ranks = local_world_size.and_then(|text| text.parse().ok()).unwrap_or(1);
    let cores = if ranks < 2 || has_own_cores() { cores } else { cores / ranks };
    // Threads that read from a disk mostly wait, so several keep it busy even on few cores.
    cores.clamp(4, 16)
}

/// Returns whether this process may use fewer cores than its parent, because a launcher has divided them already.
fn has_own_cores() -> bool {
    // SAFETY: the call has no preconditions.
    let parent = Pid::from_raw(unsafe { libc::getppid() });
    match (sched_getaffinity(None), sched_getaffinity(parent)) {
        (Ok(own), Ok(parent)) => own.count() < parent.count(),
        _ => false,
    }
}

/// Returns the level that `FST_LOG` requests, or `None` if it is not set. Fails with `invalid-argument` if it is not
/// the name of a level.
pub fn log_level_from_env() -> Result<Option<tracing::Level>> {
    let Some(text) = variable("FST_LOG") else { return Ok(None) };
    tracing::Level::from_str(&text).map(Some).map_err(|_| {
        Error::new(Kind::InvalidArgument, format!("FST_LOG is {text:?}; it may be error, warn, info, debug or trace"))
    })
}

/// Returns the time after which a request to a remote store counts as stalled if too few bytes arrive.
/// `FST_STALL_SECONDS`. Fails with `invalid-argument`, with the allowed values.
pub fn stall_timeout_from_env() -> Result<Duration> {
    Ok(Duration::from_secs(to_u64(number("FST_STALL_SECONDS", 1..=3600)?.unwrap_or(10))))
}

/// Returns the path in a variable that is not empty: `FST_ENCRYPTION_KEY_FILE` or `FST_ENCRYPTION_PASSPHRASE_FILE`, with
/// the key or the passphrase of files that a load opens without a key, or `FST_CACHE_DIR`.
pub fn path_from_env(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Options of the copies of remote objects on a local disk.
pub struct CacheOptions {
    /// Directory of the copies. `FST_CACHE_DIR`.
    pub directory: PathBuf,
    /// Upper bound for the size of all copies, in bytes. `FST_CACHE_BYTES`.
    pub bytes_max: Option<u64>,
}

/// Returns the options of copies on a local disk, or `None` if none are to be kept. Fails with `invalid-argument`, with
/// the variable and its allowed values.
pub fn cache_from_env() -> Result<Option<CacheOptions>> {
    let Some(directory) = path_from_env("FST_CACHE_DIR") else { return Ok(None) };
    let bytes_max = number("FST_CACHE_BYTES", 0..=usize::MAX)?.map(to_u64);
    Ok(Some(CacheOptions { directory, bytes_max }))
}

/// Returns all variables whose names begin with `prefix`, sorted by name.
pub fn variables_with_prefix(prefix: &str) -> Vec<(String, String)> {
    let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    let mut found: Vec<_> = std::env::vars_os().filter_map(text).filter(|(name, _)| name.starts_with(prefix)).collect();
    found.sort();
    found
}

/// Returns a variable of the environment, or `None` if it is not set or empty.
pub fn variable(name: &str) -> Option<String> {
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
