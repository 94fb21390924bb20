//! Threads and blocks of a writer.

use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::options::Options;
use crate::os::mutex::{Condvar, Mutex};
use crate::os::sigint::{POLL_INTERVAL, Watch};
use crate::profile::{self, Stage};
use crate::save::output::Output;
use crate::staging::Block;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Maximum number of threads. The caller fills blocks on one thread, so more would be idle.
const THREADS_MAX: usize = 4;
/// Maximum number of blocks of a writer. Blocks are few, since they are not part of the process's staging: a writer that
/// keeps a partly filled block while its caller computes would block other loads and saves.
const BLOCKS_MAX: usize = 8;
/// Disk space that is reserved ahead of the data, in bytes. Threads can write in parallel only while the file does not
/// grow.
const RESERVE_BYTES: u64 = 64 << 20;
/// Time that writes in progress get when the threads are stopped. A service would keep a part that arrives after the
/// abort of its upload.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// Write of the first `length` bytes of a block.
pub struct Job {
    pub block: Block,
    pub length: usize,
    pub offset: u64,
}

/// Threads that write blocks to one file or object. Dropping them stops them.
pub struct WriteThreads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    staging_bytes: usize,
}

struct Shared {
    output: Arc<Output>,
    state: Mutex<State>,
    /// Signals a new job or the end of all jobs.
    has_work: Condvar,
    /// Signals that a job is complete.
    has_changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Number of jobs that are submitted and not complete.
    open_count: usize,
    free: Vec<Block>,
    block_count: usize,
    reserved_bytes: u64,
    closed_at: Option<Instant>,
    failure: Option<Error>,
}

impl WriteThreads {
    /// Starts the threads.
    pub fn start(output: &Arc<Output>, options: &Options) -> Result<WriteThreads> {
        let shared = Arc::new(Shared {
            output: Arc::clone(output),
            state: Mutex::default(),
            has_work: Condvar::new(),
            has_changed: Condvar::new(),
        });
        let mut write_threads = WriteThreads { shared, threads: Vec::new(), staging_bytes: options.staging_bytes };
        for _ in 0..options.threads.clamp(1, THREADS_MAX) {
            let shared = Arc::clone(&write_threads.shared);
            match thread::Builder::new().name("fst write".into()).spawn(move || shared.work()) {
                Ok(thread) => write_threads.threads.push(thread),
                Err(error) if write_threads.threads.is_empty() => {
                    return Err(Error::new(Kind::OutOfMemory, format!("cannot start a thread: {error}")));
                }
                // A container may refuse more threads. The threads that have started do the work.
                Err(error) => tracing::debug!(%error, "cannot start as many threads as requested"),
            }
        }
        Ok(write_threads)
    }

    /// Returns a free block of at least `bytes` bytes, and waits for one if necessary.
    pub fn acquire(&self, bytes: usize) -> Result<Block> {
        let _span = profile::span(Stage::Slot);
        // A writer keeps the first part of an object to the end.
        let block_count_min = if self.shared.output.is_object() { 2 } else { 1 };
        let block_count_max = (self.staging_bytes / bytes.max(1)).clamp(block_count_min, BLOCKS_MAX);
        let mut watch = None;
        let mut state = self.shared.state.lock();
        loop {
            // The parts of a long object grow.
            let count = state.free.len();
            state.free.retain(|block| block.as_ref().len() >= bytes);
            state.block_count -= count - state.free.len();
            if state.free.is_empty() && state.block_count < block_count_max {
                state.block_count += 1;
                drop(state);
                return Block::allocate(bytes, None);
            }
            let watch = watch.get_or_insert_with(Watch::begin);
            if let Some(error) = &state.failure {
                return Err(error.clone());
            }
            if let Some(block) = state.free.pop() {
                return Ok(block);
            }
            watch.check()?;
            state = self.shared.has_changed.wait_timeout(state, POLL_INTERVAL);
        }
    }

    /// Submits the write of a block.
    pub fn submit(&self, job: Job) -> Result<()> {
        let mut state = self.shared.state.lock();
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        let end = job.offset.saturating_add(to_u64(job.length));
        if end > state.reserved_bytes {
            state.reserved_bytes = end.saturating_add(RESERVE_BYTES);
            let watch = Watch::begin();
            match self.shared.output.reserve(state.reserved_bytes, &|| watch.check()) {
                Err(error) if error.kind() == Kind::Interrupted => return Err(error),
                // The disk may still have enough space for the data. A write reports the error if it has not.
                Err(error) => tracing::debug!(%error, "cannot reserve space ahead of the data"),
                Ok(()) => {}
            }
        }
        state.open_count += 1;
        state.jobs.push_back(job);
        self.shared.has_work.notify_one();
        Ok(())
    }

    /// Waits until all jobs are complete.
    pub fn finish(&self) -> Result<()> {
        let watch = Watch::begin();
        let mut state = self.shared.state.lock();
        while state.failure.is_none() && state.open_count > 0 {
            watch.check()?;
            state = self.shared.has_changed.wait_timeout(state, POLL_INTERVAL);
        }
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// Waits for writes in progress, for writes to a server at most [`STOP_TIMEOUT`], and discards the others.
    pub fn stop(&mut self) {
        let mut state = self.shared.state.lock();
        state.closed_at.get_or_insert_with(Instant::now);
        state.jobs.clear();
        drop(state);
        self.shared.has_work.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a bug in fst, please report it: a thread of a writer panicked");
            }
        }
    }
}

impl Drop for WriteThreads {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn work(&self) {
        while let Some(job) = self.next() {
            let span = profile::span(Stage::Write).bytes(job.length);
            let written = self.output.write(job.block, job.length, job.offset, &|| self.check());
            drop(span);
            let mut state = self.state.lock();
            state.open_count -= 1;
            match written {
                Ok(Some(block)) => state.free.push(block),
                Ok(None) => state.block_count -= 1,
                Err(error) => {
                    state.block_count -= 1;
                    state.failure.get_or_insert(error);
                }
            }
            self.has_changed.notify_one();
        }
    }

    /// Fails if the threads were stopped and writes in progress have had their time.
    fn check(&self) -> Result<()> {
        match self.state.lock().closed_at {
            Some(closed_at) if closed_at.elapsed() > STOP_TIMEOUT => {
                Err(Error::new(Kind::Interrupted, "the writer was dropped"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the next job, or `None` if no job will follow or a write has failed.
    fn next(&self) -> Option<Job> {
        let is_idle = |state: &mut State| state.closed_at.is_none() && state.failure.is_none() && state.jobs.is_empty();
        let mut state = self.has_work.wait_while(self.state.lock(), is_idle);
        if state.failure.is_some() { None } else { state.jobs.pop_front() }
    }
}
