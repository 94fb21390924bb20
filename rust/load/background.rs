//! Transfers whose batches a thread runs, while the caller allocates and submits the destinations of the next batch.
//!
//! To allocate many tensors on a GPU takes as long as to copy their bytes. A load therefore allocates them in windows,
//! each of which is a batch:
//!
//! ```text
//! caller  allocate 0 | allocate 1 | allocate 2 | ...        | wait
//! thread             |   fill 0     |   fill 1     | fill 2 ... |
//! ```

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::device::{Device, Scratch};
use crate::error::{Error, Kind, Result};
use crate::load::transfer::{Batch, Planner, Transfer, TransferObserver};
use crate::num::to_u64;
use crate::options::experiments::{self, Switch};
use crate::os::mutex::Mutex;
use crate::os::sigint::Watch;
use crate::plan::Chunk;
use crate::source::Source;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

/// Number of windows of a load of many tensors: the first one is allocated before any byte is copied.
const WINDOWS: usize = 8;

/// Loads of fewer tensors have one window. Windows cost about 1 ms, and save up to 1.5 us a tensor; see
/// docs/decisions/gpu-model.md.
const WINDOW_TENSORS_MIN: usize = 2000;

/// Loads of fewer bytes have one window. A GPU copies so many in 5 ms, beside which tensors are allocated.
const WINDOW_BYTES_MIN: u64 = 256 << 20;

/// A [`Transfer`] that also runs batches on a thread of its own.
///
/// Dropping it ends the thread at the next chunk and waits for the copies, so that the caller may free the destinations.
pub struct BackgroundTransfer<D: Device> {
    /// Dropped before the transfer.
    running: Option<Running<D::StreamEvent>>,
    transfer: Arc<Mutex<Transfer<D, Closable>>>,
    planner: Planner<D>,
    is_closed: Arc<AtomicBool>,
    has_windows: bool,
}

/// Thread that runs batches, and the queue of these.
struct Running<E> {
    batches: Option<Sender<SubmittedBatch<E>>>,
    /// `None` once it was joined.
    thread: Option<JoinHandle<Result<()>>>,
    is_closed: Arc<AtomicBool>,
}

struct SubmittedBatch<E> {
    /// Event after the caller's work at the time of submission, which may still use the memory.
    after: E,
    batch: Batch,
    scratch: Scratch,
}

/// Observer that ends a transfer on SIGINT, or when the transfer is dropped.
struct Closable {
    watch: Watch,
    is_closed: Arc<AtomicBool>,
}

impl TransferObserver for Closable {
    fn check(&self) -> Result<()> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(Error::new(Kind::Interrupted, "the transfer was dropped"));
        }
        self.watch.check()
    }

    fn check_interrupt(&self) -> Result<()> {
        self.watch.check()
    }

    fn copies_started(&self, _: &Chunk) -> Result<()> {
        Ok(())
    }
}

impl<D: Device> BackgroundTransfer<D> {
    /// Takes a transfer from the files of a checkpoint. It starts no thread.
    pub fn new(transfer: Transfer<D>, checkpoint: &Checkpoint) -> Self {
        let planner = transfer.planner().clone();
        let regions = planner.regions();
        // Digests of whole files need all bytes in one batch, and each window waits once for an object store.
        let is_possible = transfer.verifier().is_none()
            && checkpoint.sources().all(|source| matches!(source.stored(), Source::File(_)));
        let bytes = regions.iter().map(TensorRegion::bytes).fold(0, u64::saturating_add);
        let is_closed = Arc::new(AtomicBool::new(false));
        let closable = |watch| Closable { watch, is_closed: Arc::clone(&is_closed) };
        BackgroundTransfer {
            running: None,
            transfer: Arc::new(Mutex::new(transfer.map_observer(closable))),
            planner,
            is_closed,
            has_windows: is_possible && bytes >= WINDOW_BYTES_MIN,
        }
    }

    /// Returns the planner of the transfer's batches.
    pub fn planner(&self) -> &Planner<D> {
        &self.planner
    }

    /// Returns the windows in which the caller should allocate the tensors and submit them: the number of tensors before the
    /// end of each. `order` has the index of each tensor in the order of the files.
    pub fn window_ends(&self, order: &[usize]) -> Vec<usize> {
        let all = vec![order.len()];
        if !self.has_windows || order.len() < 2 {
            return all;
        }
        let (count, mib) = (experiments::value(Switch::Windows), experiments::value(Switch::WindowMib));
        match (count, mib) {
            (None, Some(mib)) => self.ends_by_bytes(order, to_u64(mib) << 20),
            (None, None) if order.len() < WINDOW_TENSORS_MIN => all,
            _ => {
                let tensors = order.len().div_ceil(count.unwrap_or(WINDOWS));
                (1..).map(|window| (window * tensors).min(order.len())).take(order.len().div_ceil(tensors)).collect()
            }
        }
    }

    /// Returns windows of at least `bytes` bytes, twice as many and so on.
    fn ends_by_bytes(&self, order: &[usize], bytes: u64) -> Vec<usize> {
        let (mut ends, mut least, mut window_bytes) = (Vec::new(), bytes, 0_u64);
        for (end, index) in (1..).zip(order) {
            window_bytes += self.planner.regions().get(*index).map_or(0, TensorRegion::bytes);
            if window_bytes >= least || end == order.len() {
                ends.push(end);
                (least, window_bytes) = (least.saturating_mul(2), 0);
            }
        }
        ends
    }

    /// Queues a batch for the thread. It runs after the batches before it and after the caller's work that is queued now.
    ///
    /// # Safety
    /// Every destination must be memory of the device, of the planned size, that nothing else uses until the transfer has
    /// finished or is dropped. This applies to `scratch`, too, which has at least the size that the batch needs. Later
    /// batches may use the same block, if each of them is given the whole block.
    pub unsafe fn submit(&mut self, batch: Batch, scratch: Scratch) -> Result<()> {
        if self.running.is_none() {
            match self.start() {
                Ok(running) => self.running = Some(running),
                Err(error) => {
                    tracing::debug!(%error, "cannot start a thread, so the caller runs the batch");
                    // SAFETY: the caller's promise.
                    return unsafe { self.fill(&batch, scratch) };
                }
            }
        }
        let submitted = SubmittedBatch { after: self.planner.record_caller()?, batch, scratch };
        let batches = self.running.as_ref().and_then(|running| running.batches.as_ref());
        match batches.map(|batches| batches.send(submitted)) {
            Some(Ok(())) => Ok(()),
            // The thread has ended with an error.
            _ => self.join(),
        }
    }

    fn start(&self) -> io::Result<Running<D::StreamEvent>> {
        let (batches, queue) = mpsc::channel::<SubmittedBatch<D::StreamEvent>>();
        let transfer = Arc::clone(&self.transfer);
        let run = move || {
            queue.iter().try_for_each(|SubmittedBatch { after, batch, scratch }| {
                // SAFETY: the promise of the caller that submitted the batch.
                unsafe { transfer.lock().fill_after(&after, &batch, scratch) }
            })
        };
        let thread = thread::Builder::new().name("fst transfer".into()).spawn(run)?;
        Ok(Running { batches: Some(batches), thread: Some(thread), is_closed: Arc::clone(&self.is_closed) })
    }

    /// Waits until the thread has run its batches. The caller's stream waits for their copies.
    fn join(&mut self) -> Result<()> {
        let Some(mut running) = self.running.take() else { return Ok(()) };
        running.join()?;
        self.transfer.lock().make_caller_wait()
    }

    /// Runs a batch on the caller's thread, after the thread's batches.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Transfer::fill`].
    ///
    /// # Errors
    /// The errors of [`Transfer::fill`], also of batches before.
    pub unsafe fn fill(&mut self, batch: &Batch, scratch: Scratch) -> Result<()> {
        self.join()?;
        // SAFETY: the caller's promise.
        unsafe { self.transfer.lock().fill(batch, scratch) }
    }

    /// Waits for all batches and copies.
    pub fn finish(mut self) -> Result<()> {
        self.join()?;
        let in_use = || Error::new(Kind::Internal, "the thread of a transfer has not ended");
        let transfer = Arc::into_inner(self.transfer).ok_or_else(in_use)?;
        transfer.into_inner().finish()
    }
}

impl<E> Running<E> {
    fn join(&mut self) -> Result<()> {
        self.batches = None;
        let panicked = |_| Err(Error::new(Kind::Internal, "the thread of a transfer has panicked"));
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap_or_else(panicked))
    }
}

impl<E> Drop for Running<E> {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.is_closed.store(true, Ordering::Relaxed);
            if let Err(error) = self.join() {
                tracing::debug!(%error, "while ending a failed load");
            }
        }
    }
}
