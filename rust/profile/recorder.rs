//! Recorded spans, totals and counters of one profile.

use super::totals::Totals;
use super::{Entry, Memory, Track, now};
use crate::os::mutex::Mutex;
use serde_json::Value;
use std::fs;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

/// Maximum number of spans that a profile keeps, about 20 MiB. Later spans are only added to the totals and counted as
/// dropped.
pub const SPANS_MAX: usize = 1 << 18;
/// Maximum number of errors that a profile keeps.
const ERRORS_MAX: usize = 1000;
/// Number of locks for spans, to reduce contention between threads.
const SHARDS: usize = 16;

/// Active profile.
pub struct Recorder {
    pub id: i64,
    pub begin: u64,
    /// Value of [`read_bytes`] at the start.
    storage_bytes: Option<u64>,
    shards: [Mutex<Vec<Entry>>; SHARDS],
    kept: AtomicUsize,
    pub dropped: AtomicU64,
    pub totals: Totals,
    memory: [AtomicU64; 2],
    pub readers: Mutex<Vec<Value>>,
    pub missing_kernels: Mutex<Vec<Value>>,
    pub errors: Mutex<Vec<ErrorNote>>,
}

/// Error that was returned to a caller.
#[derive(Clone)]
pub struct ErrorNote {
    pub at: u64,
    /// Row of the thread that returned the error.
    pub row: usize,
    pub text: String,
}

impl Recorder {
    pub fn new() -> Recorder {
        static NEXT: AtomicI64 = AtomicI64::new(1);
        Recorder {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            begin: now(),
            storage_bytes: read_bytes(),
            shards: Default::default(),
            kept: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
            totals: Totals::default(),
            memory: Default::default(),
            readers: Mutex::default(),
            missing_kernels: Mutex::default(),
            errors: Mutex::default(),
        }
    }

    pub fn keep(&self, entry: &Entry) {
        // A profile excludes spans that began before it.
        if entry.begin < self.begin {
            return;
        }
        self.totals.add(entry.stage, entry.bytes, entry.end.saturating_sub(entry.begin));
        if self.kept.fetch_add(1, Ordering::Relaxed) >= SPANS_MAX {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let row = match entry.track {
            Track::Load => 0,
            Track::Thread(row) | Track::CopyStream { copy_stream: row, .. } => row,
        };
        if let Some(shard) = self.shards.get(row % SHARDS) {
            shard.lock().push(entry.clone());
        }
    }

    pub fn memory(&self, what: Memory, bytes: u64) {
        if let Some(peak) = self.memory.get(what as usize) {
            peak.fetch_max(bytes, Ordering::Relaxed);
        }
    }

    pub fn reader(&self, choice: &Value) {
        let mut readers = self.readers.lock();
        if readers.len() < SPANS_MAX && !readers.contains(choice) {
            readers.push(choice.clone());
        }
    }

    pub fn missing_kernels(&self, gpu: &Value) {
        let mut gpus = self.missing_kernels.lock();
        if gpus.len() < ERRORS_MAX && !gpus.contains(gpu) {
            gpus.push(gpu.clone());
        }
    }

    pub fn error(&self, row: usize, text: &str) {
        let mut errors = self.errors.lock();
        if errors.len() < ERRORS_MAX {
            errors.push(ErrorNote { at: now(), row, text: text.to_owned() });
        }
    }

    /// Returns the spans sorted by begin. Of spans with equal begins the longest comes first, since it contains the
    /// others.
    pub fn entries(&self) -> Vec<Entry> {
        let mut entries: Vec<Entry> = self.shards.iter().flat_map(|shard| shard.lock().clone()).collect();
        entries.sort_by_key(|entry| (entry.begin, u64::MAX - entry.end));
        entries
    }

    /// Returns the number of bytes read from storage since the profile began, or `None` if unknown.
    pub fn storage_bytes(&self) -> Option<u64> {
        Some(read_bytes()?.saturating_sub(self.storage_bytes?))
    }

    pub fn memory_of(&self, what: Memory) -> u64 {
        self.memory.get(what as usize).map_or(0, |peak| peak.load(Ordering::Relaxed))
    }
}

/// Returns the number of bytes that the kernel has read from storage for this process, or `None` if it does not count
/// them. Hits in the page cache do not count.
fn read_bytes() -> Option<u64> {
    let counts = fs::read_to_string("/proc/self/io").ok()?;
    counts.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
}
