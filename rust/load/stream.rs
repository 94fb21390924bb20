//! Streams of tensors, which load in the background while the caller uses the tensors that are ready.
//!
//! The caller submits batches, as many as it has memory for, and a thread runs them one after the other. For each
//! tensor the thread counts the copies that have not been started. After the last one the tensor is ready:
//!
//! ```text
//! caller  submit(a b c)   take a    take b   submit(d e)   take c  ...
//! thread       | chunk: a and half of b | rest of b, c |  chunk: d ...
//! ```
//!
//! The copies of a ready tensor have been started, but may be in flight. Taking the tensor makes the caller's stream
//! wait for them. The host does not wait.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::device::{Device, Scratch};
use crate::error::{Error, Kind, Result};
use crate::load::transfer::{Batch, Planner, Transfer, TransferObserver};
use crate::options::Options;
use crate::os::mutex::{Condvar, Mutex};
use crate::os::sigint::{POLL_INTERVAL, Watch};
use crate::plan::Chunk;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

/// Order in which tensors are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they were submitted.
    Submitted,
    /// As they become ready.
    Ready,
}

/// Fills destinations on one device in the background.
///
/// A stream that is dropped ends the load at the next chunk and waits for its copies, so that the caller may free the
/// tensors that it has not taken.
pub struct Stream<D: Device> {
    device: Arc<D>,
    planner: Planner<D>,
    shared: Arc<Shared<D::StreamEvent>>,
    thread: Option<JoinHandle<()>>,
}

/// State that the caller and the thread share.
struct Shared<E> {
    order: Order,
    /// Number of submitted copies of each tensor that have not been started.
    outstanding: Box<[AtomicUsize]>,
    state: Mutex<State<E>>,
    has_ready: Condvar,
    has_work: Condvar,
}

struct State<E> {
    batches: VecDeque<SubmittedBatch<E>>,
    /// Position of each submitted tensor in the order of submission.
    positions: BTreeMap<usize, usize>,
    submitted_count: usize,
    /// Ready tensors that have not been taken, by their turn, each with the event after its copies.
    ready: BTreeMap<usize, (usize, Arc<E>)>,
    ready_count: usize,
    taken_count: usize,
    /// The caller's current stream, once it was set.
    current: Option<u64>,
    /// Block of the batches that are submitted next.
    scratch: Scratch,
    /// The last event for which the current stream waits.
    waited: Option<Arc<E>>,
    is_closed: bool,
    /// Whether a SIGINT has ended the wait for the thread.
    is_interrupted: bool,
    has_ended: bool,
    failure: Option<Error>,
}

struct SubmittedBatch<E> {
    batch: Batch,
    scratch: Scratch,
    /// Event after the caller's work at the time of submission, which may still use the memory.
    after: E,
}

impl<D: Device> Stream<D> {
    /// Opens a transfer from the files of a checkpoint, and starts the thread.
    ///
    /// # Errors
    /// `io` if a reader cannot be opened, `out-of-memory` if the thread cannot be started, `invalid-argument` if only the
    /// digests of whole files are known, which cannot be compared before tensors are taken.
    pub fn open(
        checkpoint: &Checkpoint,
        regions: Arc<[TensorRegion]>,
        device: Arc<D>,
        options: Options,
        order: Order,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            order,
            outstanding: regions.iter().map(|_| AtomicUsize::new(0)).collect(),
            state: Mutex::new(State::default()),
            has_ready: Condvar::new(),
            has_work: Condvar::new(),
        });
        let counter = ReadyCounter { device: Arc::clone(&device), shared: Arc::clone(&shared) };
        checkpoint.check_streamable()?;
        let transfer = Transfer::open_with(checkpoint, regions, Arc::clone(&device), options, counter)?;
        let planner = transfer.planner().clone();
        let thread = thread::Builder::new().name("fst stream".into()).spawn({
            let shared = Arc::clone(&shared);
            move || run(transfer, &shared)
        });
        let refused = |error| Error::new(Kind::OutOfMemory, format!("cannot start a thread: {error}"));
        Ok(Stream { device, planner, shared, thread: Some(thread.map_err(refused)?) })
    }

    /// Returns the planner of the stream's batches.
    pub fn planner(&self) -> &Planner<D> {
        &self.planner
    }

    /// Sets the caller's current stream, on the caller's thread.
    ///
    /// # Errors
    /// `invalid-argument` if the stream cannot be used, `device` from the driver.
    pub fn set_stream(&self, stream: u64) -> Result<()> {
        self.device.set_stream(stream)?;
        let mut state = self.shared.state.lock();
        if state.current != Some(stream) {
            state.current = Some(stream);
            state.waited = None;
        }
        Ok(())
    }

    /// Sets the block that the batches submitted from now on share.
    ///
    /// # Safety
    /// The block must be memory of the device. Until all tensors of these batches are taken or the stream is dropped,
    /// only the stream may use the block, besides work that the caller queued before the first of them was submitted.
    pub unsafe fn set_scratch(&self, scratch: Scratch) {
        self.shared.state.lock().scratch = scratch;
    }

    /// Queues a batch, which runs after the batches before it and after the caller's work that is queued now.
    ///
    /// `tensors` are the tensors of the batch, in the order of [`Order::Submitted`]. Each is submitted at most once.
    ///
    /// # Safety
    /// Every destination must be memory of the device, of the planned size, that nothing else uses until its tensor is
    /// taken or the stream is dropped.
    ///
    /// # Errors
    /// `device`, from the driver; `internal` if the block of [`Stream::set_scratch`] is too small. Nothing is submitted
    /// then.
    pub unsafe fn submit(&self, tensors: &[usize], batch: Batch) -> Result<()> {
        let scratch = self.shared.state.lock().scratch;
        let after = self.device.record_caller()?;
        for tensor in batch.chunks().iter().flat_map(Chunk::tensors) {
            self.shared.outstanding(tensor)?.fetch_add(1, Ordering::Relaxed);
        }
        // Tensors without bytes are ready.
        let is_empty = |&tensor: &usize| Ok(self.shared.outstanding(tensor)?.load(Ordering::Relaxed) == 0);
        let empty = tensors.iter().map(is_empty).collect::<Result<Vec<bool>>>()?;
        let event = if empty.contains(&true) { Some(Arc::new(self.device.record_copies()?)) } else { None };
        let mut state = self.shared.state.lock();
        for (&tensor, is_empty) in tensors.iter().zip(empty) {
            let position = state.submitted_count;
            state.positions.insert(tensor, position);
            state.submitted_count += 1;
            if let Some(event) = event.as_ref().filter(|_| is_empty) {
                state.mark_ready(self.shared.order, tensor, event);
            }
        }
        state.batches.push_back(SubmittedBatch { batch, scratch, after });
        self.shared.has_work.notify_one();
        Ok(())
    }

    /// Waits until the next tensor is ready and returns its index. The caller's stream waits for its copies.
    ///
    /// # Errors
    /// The error of a batch that failed: the errors of [`Transfer::fill`]. `interrupted` after a SIGINT during the wait.
    /// `internal` if no tensor is left.
    pub fn take(&self) -> Result<usize> {
        let mut watch = None;
        let mut state = self.shared.state.lock();
        let (tensor, event) = loop {
            let has_ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
            let turn = state.taken_count;
            if let Some(ready) = state.ready.remove(&turn) {
                state.taken_count += 1;
                break ready;
            }
            if let Some(error) = &state.failure {
                return Err(error.clone());
            }
            if has_ended {
                return Err(panicked());
            }
            if turn == state.submitted_count {
                return Err(Error::new(Kind::Internal, format!("all {turn} submitted tensors were taken")));
            }
            // The thread ends its waits, too, even after the wait of this call.
            state.is_interrupted |= watch.get_or_insert_with(Watch::begin).check().is_err();
            if state.is_interrupted {
                return Err(interrupted());
            }
            state = self.shared.has_ready.wait_timeout(state, POLL_INTERVAL);
        };
        // Tensors of one chunk share an event.
        if state.waited.as_ref().is_none_or(|waited| !Arc::ptr_eq(waited, &event)) {
            drop(state);
            self.device.make_caller_wait(&event)?;
            self.shared.state.lock().waited = Some(event);
        }
        Ok(tensor)
    }

    /// Ends the stream and waits for all copies.
    pub fn finish(mut self) -> Result<()> {
        let ended = self.end();
        self.shared.state.lock().failure.take().map_or(ended, Err)
    }

    /// Ends the thread, which waits for the copies. A SIGINT ends its wait.
    fn end(&mut self) -> Result<()> {
        let watch = Watch::begin();
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        self.shared.has_work.notify_one();
        while !state.has_ended && !self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            state.is_interrupted |= watch.check().is_err();
            state = self.shared.has_ready.wait_timeout(state, POLL_INTERVAL);
        }
        drop(state);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.shared.state.lock().failure.get_or_insert(panicked());
        }
        watch.check()
    }
}

impl<D: Device> Drop for Stream<D> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::debug!(%error, "while ending a stream");
        }
    }
}

fn interrupted() -> Error {
    Error::new(Kind::Interrupted, "ended by SIGINT (Ctrl-C); the stream is closed")
}

fn panicked() -> Error {
    Error::new(Kind::Internal, "a bug in fst, please report it: the thread of a stream has panicked")
}

/// Runs batches until the stream is closed or a batch fails.
fn run<D: Device>(mut transfer: Transfer<D, ReadyCounter<D>>, shared: &Shared<D::StreamEvent>) {
    let mut run_batches = || {
        while let Some(submitted) = shared.next_batch(|| transfer.release_staging())? {
            // SAFETY: the promise of the caller that submitted the batch.
            unsafe { transfer.fill_after(&submitted.after, &submitted.batch, submitted.scratch) }?;
        }
        Ok(())
    };
    let result = run_batches().and_then(|()| transfer.finish());
    // A stream that is closed interrupts its transfer, which is not a failure.
    let mut state = shared.state.lock();
    state.failure = result.err().filter(|error| error.kind() != Kind::Interrupted);
    state.has_ended = true;
    shared.has_ready.notify_all();
}

impl<E> Shared<E> {
    fn outstanding(&self, tensor: usize) -> Result<&AtomicUsize> {
        let missing = || Error::new(Kind::Internal, format!("the stream has no tensor {tensor}"));
        self.outstanding.get(tensor).ok_or_else(missing)
    }

    /// Waits for a batch, and releases staging memory meanwhile. Returns `None` when the stream is closed.
    fn next_batch(&self, release_staging: impl FnOnce() -> Result<()>) -> Result<Option<SubmittedBatch<E>>> {
        let is_idle = |state: &mut State<E>| !state.is_closed && state.batches.is_empty();
        if is_idle(&mut self.state.lock()) {
            release_staging()?;
        }
        let mut state = self.has_work.wait_while(self.state.lock(), is_idle);
        Ok(if state.is_closed { None } else { state.batches.pop_front() })
    }
}

impl<E> State<E> {
    fn mark_ready(&mut self, order: Order, tensor: usize, event: &Arc<E>) {
        let turn = match order {
            Order::Submitted => self.positions.get(&tensor).copied().unwrap_or(usize::MAX),
            Order::Ready => self.ready_count,
        };
        self.ready_count += 1;
        self.ready.insert(turn, (tensor, Arc::clone(event)));
    }
}

impl<E> Default for State<E> {
    fn default() -> Self {
        State {
            batches: VecDeque::new(),
            positions: BTreeMap::new(),
            submitted_count: 0,
            ready: BTreeMap::new(),
            ready_count: 0,
            taken_count: 0,
            current: None,
            scratch: Scratch::default(),
            waited: None,
            is_closed: false,
            is_interrupted: false,
            has_ended: false,
            failure: None,
        }
    }
}

/// Counts started copies, and marks tensors ready.
struct ReadyCounter<D: Device> {
    device: Arc<D>,
    shared: Arc<Shared<D::StreamEvent>>,
}

impl<D: Device> TransferObserver for ReadyCounter<D> {
    fn check(&self) -> Result<()> {
        let state = self.shared.state.lock();
        // After the last tensor, the copies and digests of the batch must still be waited for, and may fail.
        if state.is_interrupted || (state.is_closed && state.taken_count < state.submitted_count) {
            return Err(Error::new(Kind::Interrupted, "the stream was closed"));
        }
        Ok(())
    }

    fn check_interrupt(&self) -> Result<()> {
        if self.shared.state.lock().is_interrupted { Err(interrupted()) } else { Ok(()) }
    }

    fn copies_started(&self, chunk: &Chunk) -> Result<()> {
        let mut ready = Vec::new();
        for tensor in chunk.tensors() {
            // AcqRel: the thread that starts the last copy of a tensor sees that all others were started.
            if self.shared.outstanding(tensor)?.fetch_sub(1, Ordering::AcqRel) == 1 {
                ready.push(tensor);
            }
        }
        if !ready.is_empty() {
            let event = Arc::new(self.device.record_copies()?);
            let mut state = self.shared.state.lock();
            for tensor in ready {
                state.mark_ready(self.shared.order, tensor, &event);
            }
            self.shared.has_ready.notify_all();
        }
        Ok(())
    }
}
