//! A load that goes on while its caller uses what has landed already.
//!
//! The caller submits fillings, as many as it wants to have memory for, and a
//! thread carries them out one after the other. Of each tensor the thread
//! counts the placements that have yet to be made; with the last one the tensor
//! has landed, and may be taken:
//!
//! ```text
//! caller  submit(a b c)   take a    take b   submit(d e)   take c  ...
//! thread       | chunk: a and half of b | rest of b, c |  chunk: d ...
//! ```
//!
//! Landed means that the copies have been started. Taking a tensor orders the
//! caller's stream behind them, and nobody waits for them on the host.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::device::{Device, Scratch};
use crate::error::{Error, Kind, Result};
use crate::load::transfer::{Batch, Planner, Transfer, TransferObserver};
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::plan::Chunk;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How long a waiting caller takes to notice a Ctrl-C, since a signal handler cannot wake it.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// In which order tensors are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they were submitted.
    Submitted,
    /// As they land.
    Ready,
}

/// Fills destinations of one device in the background.
///
/// Dropped, it ends the load at its next chunk and waits for the copies that run, so that the caller may free what it
/// has not taken.
pub struct Stream<D: Device> {
    device: Arc<D>,
    planner: Planner<D>,
    shared: Arc<Shared<D::StreamEvent>>,
    thread: Option<JoinHandle<()>>,
}

/// What the caller and the thread share.
struct Shared<M> {
    order: Order,
    /// For each wanted tensor, how many of its placements have been submitted and not yet been made.
    outstanding: Box<[AtomicUsize]>,
    state: Mutex<State<M>>,
    has_ready: Condvar,
    has_work: Condvar,
}

struct State<M> {
    batches: VecDeque<SubmittedBatch<M>>,
    /// For each wanted tensor that was submitted, how many were before it.
    positions: BTreeMap<usize, usize>,
    submitted_count: usize,
    /// What nobody has taken yet, with what it has to be ordered behind. The key is when its turn is.
    ready: BTreeMap<usize, (usize, Arc<M>)>,
    ready_count: usize,
    taken_count: usize,
    is_closed: bool,
    failure: Option<Error>,
}

struct SubmittedBatch<M> {
    batch: Batch,
    scratch: Scratch,
    /// Its memory may still be in use by what the caller had queued then.
    after: M,
}

impl<D: Device + 'static> Stream<D> {
    /// Opens a reader for every file of the checkpoint, and starts the thread.
    ///
    /// # Errors
    /// `io` where a reader cannot be opened, `out-of-memory` where there can be no thread.
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
        let counter = LandingCounter { device: Arc::clone(&device), shared: Arc::clone(&shared) };
        let transfer = Transfer::open_with(checkpoint, regions, Arc::clone(&device), options, counter)?;
        let planner = transfer.planner().clone();
        let thread = thread::Builder::new().name("fst stream".into()).spawn({
            let shared = Arc::clone(&shared);
            move || work(transfer, &shared)
        });
        let refused = |error| Error::new(Kind::OutOfMemory, format!("cannot start a thread: {error}"));
        Ok(Stream { device, planner, shared, thread: Some(thread.map_err(refused)?) })
    }

    /// What plans the fillings.
    pub fn planner(&self) -> &Planner<D> {
        &self.planner
    }

    /// The caller's current stream is this one from now on.
    ///
    /// # Errors
    /// Those of [`Device::set_stream`].
    pub fn set_stream(&self, stream: u64) -> Result<()> {
        self.device.set_stream(stream)
    }

    /// Lets the thread carry out a filling after those before it, behind what the caller has queued until now.
    /// Each of `tensors`, which are the batch's in the order of [`Order::Submitted`], is submitted at most once.
    ///
    /// # Safety
    /// Every destination is memory of the device, as long as it says, that nobody else uses until its tensor was
    /// taken or the stream is dropped. `scratch` is as long as the batch needs it, and nobody but other fillings uses
    /// it until all tensors of the batch were taken or the stream is dropped.
    ///
    /// # Errors
    /// `device`, from the driver; nothing was submitted then.
    pub unsafe fn submit(&self, tensors: &[usize], batch: Batch, scratch: Scratch) -> Result<()> {
        let after = self.device.record_caller()?;
        for tensor in batch.chunks().iter().flat_map(Chunk::tensors) {
            self.shared.outstanding(tensor)?.fetch_add(1, Ordering::Relaxed);
        }
        let nothing = Arc::new(self.device.record_copies()?);
        let mut state = self.shared.lock();
        for &tensor in tensors {
            let position = state.submitted_count;
            state.positions.insert(tensor, position);
            state.submitted_count += 1;
            if self.shared.outstanding(tensor)?.load(Ordering::Relaxed) == 0 {
                // It has no bytes.
                state.mark_ready(self.shared.order, tensor, &nothing);
            }
        }
        state.batches.push_back(SubmittedBatch { batch, scratch, after });
        self.shared.has_work.notify_one();
        Ok(())
    }

    /// The tensor whose turn is next, once it has landed. What the caller queues on its current stream from now on
    /// sees its bytes.
    ///
    /// # Errors
    /// Where it can land no more, that of the filling: those of [`Transfer::fill`]. `interrupted` after a Ctrl-C
    /// during the wait. `internal` when there is no next tensor.
    pub fn take(&self) -> Result<usize> {
        let mut watch = None;
        let mut state = self.shared.lock();
        let (tensor, event) = loop {
            let is_over = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
            let turn = state.taken_count;
            if let Some(ready) = state.ready.remove(&turn) {
                state.taken_count += 1;
                break ready;
            }
            if let Some(error) = &state.failure {
                return Err(error.clone());
            }
            if is_over {
                return Err(panicked());
            }
            if turn == state.submitted_count {
                return Err(Error::new(Kind::Internal, format!("of {turn} tensors there is no next one")));
            }
            watch.get_or_insert_with(Watch::begin).check()?;
            let waited = self.shared.has_ready.wait_timeout(state, POLL_INTERVAL);
            state = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        };
        drop(state);
        self.device.make_caller_wait(&event)?;
        Ok(tensor)
    }

    /// Waits for the last copy.
    ///
    /// # Errors
    /// What has failed and was not told yet.
    pub fn finish(mut self) -> Result<()> {
        self.end();
        self.shared.lock().failure.take().map_or(Ok(()), Err)
    }
}

impl<D: Device> Stream<D> {
    fn end(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.has_work.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.shared.lock().failure.get_or_insert(panicked());
        }
    }
}

impl<D: Device> Drop for Stream<D> {
    fn drop(&mut self) {
        self.end();
    }
}

/// There is no panic that we know of.
fn panicked() -> Error {
    Error::new(Kind::Internal, "a bug in fst, please report it: the thread of a stream has panicked")
}

/// Carries out fillings until there will be no more or one fails.
fn work<D: Device>(mut transfer: Transfer<D, LandingCounter<D>>, shared: &Shared<D::StreamEvent>) {
    let mut work = || {
        while let Some(submitted) = shared.next_batch(|| transfer.release_staging())? {
            // SAFETY: the promise of whoever submitted it.
            unsafe { transfer.fill_after(&submitted.after, &submitted.batch, submitted.scratch) }?;
        }
        Ok(())
    };
    let worked = work().and_then(|()| transfer.finish());
    // Closing a stream interrupts it, which is no failure.
    if let Err(error) = worked
        && error.kind() != Kind::Interrupted
    {
        shared.lock().failure = Some(error);
        shared.has_ready.notify_all();
    }
}

impl<M> Shared<M> {
    fn lock(&self) -> MutexGuard<'_, State<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outstanding(&self, tensor: usize) -> Result<&AtomicUsize> {
        let missing = || Error::new(Kind::Internal, format!("there is no tensor {tensor}"));
        self.outstanding.get(tensor).ok_or_else(missing)
    }

    /// Waits for a filling, without holding on to staging meanwhile. `None` when the stream is closed.
    fn next_batch(&self, release_staging: impl FnOnce() -> Result<()>) -> Result<Option<SubmittedBatch<M>>> {
        let is_idle = |state: &mut State<M>| !state.is_closed && state.batches.is_empty();
        if is_idle(&mut self.lock()) {
            release_staging()?;
        }
        let waited = self.has_work.wait_while(self.lock(), is_idle);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        Ok(if state.is_closed { None } else { state.batches.pop_front() })
    }
}

impl<M> State<M> {
    fn mark_ready(&mut self, order: Order, tensor: usize, event: &Arc<M>) {
        let turn = match order {
            Order::Submitted => self.positions.get(&tensor).copied().unwrap_or(usize::MAX),
            Order::Ready => self.ready_count,
        };
        self.ready_count += 1;
        self.ready.insert(turn, (tensor, Arc::clone(event)));
    }
}

impl<M> Default for State<M> {
    fn default() -> Self {
        State {
            batches: VecDeque::new(),
            positions: BTreeMap::new(),
            submitted_count: 0,
            ready: BTreeMap::new(),
            ready_count: 0,
            taken_count: 0,
            is_closed: false,
            failure: None,
        }
    }
}

/// Counts what the workers have placed.
struct LandingCounter<D: Device> {
    device: Arc<D>,
    shared: Arc<Shared<D::StreamEvent>>,
}

impl<D: Device> TransferObserver for LandingCounter<D> {
    fn check(&self) -> Result<()> {
        if self.shared.lock().is_closed {
            return Err(Error::new(Kind::Interrupted, "the stream was closed"));
        }
        Ok(())
    }

    fn copies_started(&self, chunk: &Chunk) -> Result<()> {
        let mut ready = Vec::new();
        for tensor in chunk.tensors() {
            // Whoever makes the last placement sees the start of all the others' copies.
            if self.shared.outstanding(tensor)?.fetch_sub(1, Ordering::AcqRel) == 1 {
                ready.push(tensor);
            }
        }
        if !ready.is_empty() {
            let event = Arc::new(self.device.record_copies()?);
            let mut state = self.shared.lock();
            for tensor in ready {
                state.mark_ready(self.shared.order, tensor, &event);
            }
            self.shared.has_ready.notify_all();
        }
        Ok(())
    }
}
