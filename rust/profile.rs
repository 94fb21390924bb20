//! What a load spends its time on.
//!
//! While somebody profiles, every stretch of a load leaves a span: its stage,
//! where it ran, when it began and ended, and the bytes it was for. While
//! nobody does, each of these places costs one relaxed load of an integer.
//!
//! ```
//! use fst::profile::{self, Stage};
//! let profile = profile::start();
//! {
//!     let _span = profile::span(Stage::Read).bytes(4096);
//!     // ... the work ...
//! }
//! let trace = profile::stop(profile)?;
//! assert!(trace.contains(r#""name":"read""#));
//! # Ok::<(), fst::Error>(())
//! ```
//!
//! What comes out is the text of a Chrome trace, which Perfetto opens, with the
//! totals under `otherData`.

mod recorder;
mod storage;
mod thread;
mod trace;

use crate::error::{Error, Kind, Result};
use crate::os::file_system::mount_type;
use recorder::Recorder;
pub use recorder::SPANS_MAX;
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};
use std::time::Instant;

/// A stretch of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A whole load, around everything else but the headers.
    Load,
    /// Files are found and opened, and their headers are made one checkpoint.
    Open,
    /// The header of one file is read and checked.
    Header,
    /// Names are looked up, and reads and placements are planned.
    Plan,
    /// A file is mapped; the bytes are those that tensors view.
    Map,
    /// Pages of a mapped file are asked for before anybody touches them.
    ReadAhead,
    /// A worker gets a slot of staging, and waits if it must.
    Slot,
    /// Staging gets new host memory.
    Allocate,
    /// Host memory is made known to a device.
    Pin,
    /// Bytes come out of a file.
    Read,
    /// Bytes go from a slot to host memory.
    Place,
    /// As [`Stage::Place`], with a cast.
    Cast,
    /// The host hands copies and kernels to the driver.
    Queue,
    /// A device copies from the host.
    Copy,
    /// A device spreads and casts what has been copied.
    Kernel,
    /// The host waits for a device.
    Wait,
    /// A whole save, around everything else.
    Save,
    /// Bytes of tensors in host memory go to a slot.
    Gather,
    /// Bytes go into a file.
    Write,
    /// A file is brought to the disk and given its name.
    Flush,
}

impl Stage {
    /// All of them.
    pub const ALL: [Stage; 20] = [
        Stage::Load,
        Stage::Open,
        Stage::Header,
        Stage::Plan,
        Stage::Map,
        Stage::ReadAhead,
        Stage::Slot,
        Stage::Allocate,
        Stage::Pin,
        Stage::Read,
        Stage::Place,
        Stage::Cast,
        Stage::Queue,
        Stage::Copy,
        Stage::Kernel,
        Stage::Wait,
        Stage::Save,
        Stage::Gather,
        Stage::Write,
        Stage::Flush,
    ];

    /// As traces have it.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Load => "load",
            Stage::Open => "open",
            Stage::Header => "header",
            Stage::Plan => "plan",
            Stage::Map => "map",
            Stage::ReadAhead => "read ahead",
            Stage::Slot => "slot",
            Stage::Allocate => "allocate",
            Stage::Pin => "pin",
            Stage::Read => "read",
            Stage::Place => "place",
            Stage::Cast => "cast",
            Stage::Queue => "queue",
            Stage::Copy => "copy",
            Stage::Kernel => "kernel",
            Stage::Wait => "wait",
            Stage::Save => "save",
            Stage::Gather => "gather",
            Stage::Write => "write",
            Stage::Flush => "flush",
        }
    }
}

/// What is counted besides spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Ranges of files that readers were asked for.
    Reads,
    /// Copies that the driver was asked for.
    Copies,
    /// Kernels that the driver was asked for.
    Launches,
}

/// Memory of which the most at any time is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Host memory of the process's staging, in use or not.
    Staging,
    /// Device memory that callers lend to fillings.
    Scratch,
}

/// What a span says besides its bytes: an object of JSON, shared by many spans.
pub type Detail = Arc<Value>;

/// Where a span ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Track {
    /// Beside the threads, since a load may begin on one and end on another.
    Load,
    /// A thread of this process.
    Thread(usize),
    /// A stream of a GPU.
    CopyStream { ordinal: i32, copy_stream: usize },
}

/// A span that has ended; times are nanoseconds since some point in this process.
#[derive(Clone, Debug)]
struct Entry {
    stage: Stage,
    track: Track,
    begin: u64,
    end: u64,
    bytes: u64,
    detail: Option<Detail>,
}

/// How many profiles run: what every place that records looks at first.
static RUNNING_COUNT: AtomicUsize = AtomicUsize::new(0);
static RUNNING: RwLock<Vec<Arc<Recorder>>> = RwLock::new(Vec::new());
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Whether anybody profiles.
#[inline]
pub fn is_on() -> bool {
    RUNNING_COUNT.load(Ordering::Relaxed) != 0
}

/// Nanoseconds on the clock of all spans, which never goes back.
pub fn now() -> u64 {
    u64::try_from(START.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Something that a load is doing, until it is dropped.
#[must_use = "the span ends when it is dropped"]
pub struct Span {
    /// `None` while nobody profiles.
    begin: Option<u64>,
    stage: Stage,
    bytes: u64,
    detail: Option<Detail>,
}

/// Begins a span.
#[inline]
pub fn span(stage: Stage) -> Span {
    Span { begin: is_on().then(now), stage, bytes: 0, detail: None }
}

impl Span {
    /// What it is for, in bytes.
    pub fn bytes(mut self, bytes: impl TryInto<u64>) -> Span {
        self.bytes = bytes.try_into().unwrap_or(u64::MAX);
        self
    }

    /// What else there is to say, which is asked for only while somebody profiles.
    pub fn detail(mut self, detail: impl FnOnce() -> Detail) -> Span {
        if self.begin.is_some() {
            self.detail = Some(detail());
        }
        self
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(begin) = self.begin {
            let detail = self.detail.take();
            let track = if matches!(self.stage, Stage::Load | Stage::Save) {
                Track::Load
            } else {
                Track::Thread(thread::current())
            };
            record(&Entry { stage: self.stage, track, begin, end: now(), bytes: self.bytes, detail });
        }
    }
}

/// Records what a GPU has done, once its times are known.
pub fn device_span(stage: Stage, ordinal: i32, copy_stream: usize, begin: u64, end: u64, bytes: u64) {
    record(&Entry { stage, track: Track::CopyStream { ordinal, copy_stream }, begin, end, bytes, detail: None });
}

fn record(entry: &Entry) {
    each(|recorder| recorder.keep(entry));
}

/// Counts things.
#[inline]
pub fn count(what: Count, number: usize) {
    if is_on() {
        each(|recorder| recorder.count(what, number));
    }
}

/// Notes how much memory there is at this moment.
#[inline]
pub fn memory(what: Memory, bytes: impl TryInto<u64>) {
    if is_on() {
        let bytes = bytes.try_into().unwrap_or(u64::MAX);
        each(|recorder| recorder.memory(what, bytes));
    }
}

/// Notes which reader a file gets and why.
pub fn reader(path: &Path, file: &File, reader: &str, why: &str) {
    if is_on() {
        let fact = json!({
            "path": path.to_string_lossy(),
            "file_system": mount_type(file),
            "reader": reader,
            "why": why,
        });
        each(|recorder| recorder.reader(&fact));
    }
}

/// Notes an error that a caller gets.
pub fn error(error: &Error) {
    if is_on() {
        let (row, text) = (thread::current(), error.to_string());
        each(|recorder| recorder.error(row, &text));
    }
}

fn each(note: impl Fn(&Recorder)) {
    RUNNING.read().unwrap_or_else(PoisonError::into_inner).iter().for_each(|recorder| note(recorder));
}

/// Begins a profile of the whole process, any number of which may run at once, and returns its number. Each gets what
/// both begins and ends while it runs.
pub fn start() -> i64 {
    let recorder = Arc::new(Recorder::new());
    let id = recorder.id;
    let mut running = RUNNING.write().unwrap_or_else(PoisonError::into_inner);
    running.push(recorder);
    RUNNING_COUNT.store(running.len(), Ordering::Relaxed);
    id
}

/// Ends a profile and returns what it has recorded, the text of a Chrome trace.
///
/// # Errors
/// `invalid-argument` where no profile with this number runs.
pub fn stop(id: i64) -> Result<String> {
    let mut running = RUNNING.write().unwrap_or_else(PoisonError::into_inner);
    let index = running.iter().position(|recorder| recorder.id == id).ok_or_else(|| {
        let message = format!("no profile {id} runs; pass what profile_start returned, and stop each profile once");
        Error::new(Kind::InvalidArgument, message)
    })?;
    let recorder = running.remove(index);
    RUNNING_COUNT.store(running.len(), Ordering::Relaxed);
    drop(running);
    Ok(trace::text(&recorder, now()))
}
