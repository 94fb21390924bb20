//! Captures of streams into graphs, and the calls that are illegal meanwhile.
//!
//! Work that is queued on a captured stream runs regardless. The subject is only which calls end a capture.

use crate::abi::{CaptureMode, Kind, Status};
use crate::driver::Driver;
use std::cell::Cell;
use std::thread::{self, ThreadId};

thread_local! {
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

/// `cuThreadExchangeStreamCaptureMode`: sets the mode of the calling thread and returns the one before.
pub fn exchange_mode(mode: CaptureMode) -> CaptureMode {
    MODE.replace(mode)
}

/// Capture that has begun and not ended.
#[derive(Debug)]
pub struct Capture {
    /// Captured stream, or `None` if the test uses no such stream.
    stream: Option<usize>,
    mode: CaptureMode,
    thread: ThreadId,
    is_valid: bool,
}

impl Capture {
    /// Returns whether the capture forbids potentially unsafe calls to a thread.
    fn forbids(&self, thread: ThreadId, mode: CaptureMode) -> bool {
        let is_own = self.thread == thread && self.mode != CaptureMode::Relaxed;
        let is_global = self.mode == CaptureMode::Global && mode == CaptureMode::Global;
        mode != CaptureMode::Relaxed && (is_own || is_global)
    }
}

impl Driver {
    /// `cuStreamBeginCapture_v2`.
    pub fn begin_capture(&mut self, stream: usize, mode: CaptureMode) -> Result<(), Status> {
        let stream = self.stream_for_work("a capture", stream)?;
        self.add_capture(Some(stream), mode);
        Ok(())
    }

    /// Begins a capture by the calling thread.
    pub fn add_capture(&mut self, stream: Option<usize>, mode: CaptureMode) {
        self.captures.push(Capture { stream, mode, thread: thread::current().id(), is_valid: true });
    }

    /// `cuStreamEndCapture`, without a graph.
    pub fn end_capture(&mut self, stream: usize) -> Result<(), Status> {
        let stream = self.stream_for_work("the end of a capture", stream)?;
        let found = self.captures.iter().position(|capture| capture.stream == Some(stream));
        let found = found.ok_or(Status::InvalidValue)?;
        let is_valid = self.captures.swap_remove(found).is_valid;
        is_valid.then_some(()).ok_or(Status::StreamCaptureInvalidated)
    }

    /// `cuStreamIsCapturing`: 0 without a capture, 1 during one, and 2 if it is invalid.
    pub fn capture_status(&mut self, stream: usize) -> Result<u32, Status> {
        let stream = self.resolve_stream("queried for its capture", stream)?;
        let found = self.captures.iter().find(|capture| capture.stream == Some(stream));
        Ok(found.map_or(0, |capture| if capture.is_valid { 1 } else { 2 }))
    }

    /// Ends the captures during which the calling thread may not make potentially unsafe calls, such as `call`.
    ///
    /// CUDA does not list these calls. Here they are all that neither queue work nor ask for a state that does not
    /// change.
    pub fn potentially_unsafe(&mut self, call: &str) -> Result<(), Status> {
        let (thread, mode) = (thread::current().id(), MODE.get());
        let mut is_legal = true;
        for capture in self.captures.iter_mut().filter(|capture| capture.forbids(thread, mode)) {
            capture.is_valid = false;
            is_legal = false;
        }
        if is_legal {
            return Ok(());
        }
        self.report(Kind::CaptureInvalidated, format!("{call} by a thread in the mode {mode:?}"));
        Err(Status::StreamCaptureUnsupported)
    }
}
