//! Profiles of loads and saves.
//!
//! Each stage of a load or save is a span: the stage, the thread or copy stream, begin and end times, and the number of
//! bytes. The totals of the process always count it, which costs two reads of the clock. While a profile is active, the
//! profile also keeps the span.
//!
//! The result of a profile is a Chrome trace in JSON, which Perfetto opens. It contains the totals under `otherData`.

mod recorder;
mod thread;
mod totals;
mod trace;

use crate::error::{Error, Kind, Result, named_enum};
use crate::os::file_system::mount_type;
use crate::os::per_process::PerProcess;
use recorder::Recorder;
pub use recorder::SPANS_MAX;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use totals::Totals;

named_enum! {
    /// Stage of a load or a save.
    Stage,
    /// Returns the name of the stage in traces.
    name:
    /// Whole load, which contains all other stages except header stages.
    Load = "load",
    /// Opens the files and merges their headers into one checkpoint.
    Open = "open",
    /// Reads and checks the header of one file.
    Header = "header",
    /// Resolves names, and plans reads and copies.
    Plan = "plan",
    /// Maps a file. The bytes are those that tensors view.
    Map = "map",
    /// Reads pages of a mapped file before their first access.
    ReadAhead = "read ahead",
    /// Acquires a staging slot, and waits for one if necessary.
    Slot = "slot",
    /// Allocates host memory for staging.
    Allocate = "allocate",
    /// Pins host memory for a device.
    Pin = "pin",
    /// Reads bytes of a file.
    Read = "read",
    /// Hashes bytes for a digest, and waits for the bytes before them if the digest needs their order.
    Hash = "hash",
    /// Encrypts or decrypts bytes.
    Cipher = "cipher",
    /// Copies bytes from a slot to host memory.
    Place = "place",
    /// Copies bytes from a slot to host memory with a cast.
    Cast = "cast",
    /// Queues copies and kernels in the driver.
    Queue = "queue",
    /// Copies bytes from the host to a device.
    Copy = "copy",
    /// Scatters and casts copied bytes on a device.
    Kernel = "kernel",
    /// Waits for a device.
    Wait = "wait",
    /// Whole save, which contains all other stages.
    Save = "save",
    /// Copies bytes of tensors in host memory to a slot.
    Gather = "gather",
    /// Writes bytes to a file.
    Write = "write",
    /// Flushes a file to the disk and renames it to its path.
    Flush = "flush",
}

named_enum! {
    /// Counter of a profile and of the process.
    Count,
    /// Returns the name of the counter in traces.
    name:
    /// Ranges of files requested from readers.
    Reads = "reads",
    /// Copies queued in the driver.
    Copies = "copies",
    /// Kernels queued in the driver.
    Launches = "launches",
    /// Requests to remote stores that were repeated.
    Retries = "retries",
    /// Second requests of remote ranges whose first one was slow.
    HedgedRequests = "hedged_requests",
    /// Bytes that were requested again by those and by repeated requests.
    RepeatedBytes = "repeated_bytes",
    /// Answers of remote stores that asked for fewer requests.
    RateLimits = "rate_limits",
    /// Requests to remote stores for bytes of objects, also repeated ones.
    Requests = "requests",
    /// Bytes of objects in remote stores that loads have read.
    RemoteBytes = "remote_bytes",
    /// Objects that were opened from their copies on a local disk.
    CacheHits = "cache_hits",
    /// Tensors that loads have returned or overwritten.
    Tensors = "tensors",
    /// Errors that were returned to callers.
    Errors = "error_count",
}

/// Memory whose peak a profile records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Host memory of the process's staging, used and free.
    Staging,
    /// Device memory that callers provide as scratch space of batches.
    Scratch,
}

/// Further properties of a span: a JSON object, shared by many spans.
pub type Detail = Arc<Value>;

/// Row of the trace that shows a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Track {
    /// Row of a whole load or save, which may begin on one thread and end on another.
    Load,
    /// Thread of this process.
    Thread(usize),
    /// Copy stream of a GPU.
    CopyStream { ordinal: i32, copy_stream: usize },
}

/// Completed span. Times are from [`now`].
#[derive(Clone, Debug)]
struct Entry {
    stage: Stage,
    track: Track,
    begin: u64,
    end: u64,
    bytes: u64,
    detail: Option<Detail>,
}

/// Number of active profiles, which every span checks first. A child that is forked during a profile keeps the number of
/// its parent, so that its spans look for a profile until it starts and stops one.
static RUNNING_COUNT: AtomicUsize = AtomicUsize::new(0);
/// Totals of the process since its first span. A forked child starts at zero.
static TOTALS: PerProcess<Totals> = PerProcess::new(Totals::default);
static RUNNING: PerProcess<RwLock<Vec<Arc<Recorder>>>> = PerProcess::new(RwLock::default);

/// Returns whether a profile is active.
#[inline]
pub fn is_on() -> bool {
    RUNNING_COUNT.load(Ordering::Relaxed) != 0
}

/// Returns the time of the monotonic clock of all spans, in nanoseconds.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let part = |number: i64| u64::try_from(number).unwrap_or(0);
    part(time.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(time.tv_nsec))
}

/// Span in progress. It ends when it is dropped.
#[must_use = "the span ends when it is dropped"]
pub struct Span {
    begin: u64,
    /// Whether a profile was active at the begin.
    is_kept: bool,
    stage: Stage,
    bytes: u64,
    detail: Option<Detail>,
}

/// Begins a span.
#[inline]
pub fn span(stage: Stage) -> Span {
    Span { begin: now(), is_kept: is_on(), stage, bytes: 0, detail: None }
}

impl Span {
    /// Sets the number of bytes.
    pub fn bytes(mut self, bytes: impl TryInto<u64>) -> Span {
        self.bytes = bytes.try_into().unwrap_or(u64::MAX);
        self
    }

    /// Sets further properties, which `detail` computes only while a profile is active.
    pub fn detail(mut self, detail: impl FnOnce() -> Detail) -> Span {
        if self.is_kept {
            self.detail = Some(detail());
        }
        self
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let (begin, end) = (self.begin, now());
        TOTALS.get().add(self.stage, self.bytes, end.saturating_sub(begin));
        if self.is_kept {
            let detail = self.detail.take();
            let track = if matches!(self.stage, Stage::Load | Stage::Save) {
                Track::Load
            } else {
                Track::Thread(thread::current())
            };
            record(&Entry { stage: self.stage, track, begin, end, bytes: self.bytes, detail });
        }
    }
}

/// Records a span of a GPU whose times are known.
pub fn device_span(stage: Stage, ordinal: i32, copy_stream: usize, begin: u64, end: u64, bytes: u64) {
    TOTALS.get().add(stage, bytes, end.saturating_sub(begin));
    record(&Entry { stage, track: Track::CopyStream { ordinal, copy_stream }, begin, end, bytes, detail: None });
}

fn record(entry: &Entry) {
    each(|recorder| recorder.keep(entry));
}

/// Adds `number` to a counter.
#[inline]
pub fn count(what: Count, number: usize) {
    TOTALS.get().count(what, number);
    if is_on() {
        each(|recorder| recorder.totals.count(what, number));
    }
}

/// Records the current amount of memory.
#[inline]
pub fn memory(what: Memory, bytes: impl TryInto<u64>) {
    if is_on() {
        let bytes = bytes.try_into().unwrap_or(u64::MAX);
        each(|recorder| recorder.memory(what, bytes));
    }
}

/// Records the reader chosen for a file and the reason.
pub fn reader(path: &Path, file: Option<&File>, reader: &str, why: &str) {
    if is_on() {
        let choice = json!({
            "path": path.to_string_lossy(),
            "file_system": file.and_then(mount_type),
            "reader": reader,
            "why": why,
        });
        each(|recorder| recorder.reader(&choice));
    }
}

/// Records that a GPU is used without device kernels, and the reason.
pub fn missing_kernels(ordinal: i32, why: &str) {
    if is_on() {
        let gpu = json!({ "gpu": ordinal, "why": why });
        each(|recorder| recorder.missing_kernels(&gpu));
    }
}

/// Records an error that is returned to a caller.
pub fn error(error: &Error) {
    count(Count::Errors, 1);
    if is_on() {
        let (row, text) = (thread::current(), error.to_string());
        each(|recorder| recorder.error(row, &text));
    }
}

fn each(apply: impl Fn(&Recorder)) {
    RUNNING.get().read().unwrap_or_else(PoisonError::into_inner).iter().for_each(|recorder| apply(recorder));
}

/// Starts a profile of the whole process and returns its id. Several profiles may run at once. A profile records the
/// spans that begin and end while it runs. A forked child is not part of it.
pub fn start() -> i64 {
    let recorder = Arc::new(Recorder::new());
    let id = recorder.id;
    let mut running = RUNNING.get().write().unwrap_or_else(PoisonError::into_inner);
    running.push(recorder);
    RUNNING_COUNT.store(running.len(), Ordering::Relaxed);
    id
}

/// Stops a profile and returns its Chrome trace as JSON text. Fails with `invalid-argument` if no profile with this id
/// runs in this process.
pub fn stop(id: i64) -> Result<String> {
    let mut running = RUNNING.get().write().unwrap_or_else(PoisonError::into_inner);
    let index = running.iter().position(|recorder| recorder.id == id).ok_or_else(|| {
        let message = format!(
            "no profile {id} runs in this process; pass what profile_start returned, and stop each profile once, in the \
             process that started it"
        );
        Error::new(Kind::InvalidArgument, message)
    })?;
    let recorder = running.remove(index);
    RUNNING_COUNT.store(running.len(), Ordering::Relaxed);
    drop(running);
    Ok(trace::text(&recorder, now()))
}

/// Returns the totals of the process as JSON text: all counters by name, and `stages`.
pub fn totals() -> String {
    Value::Object(TOTALS.get().to_json()).to_string()
}
