//! Bytes that wait to be written to the cache, and the thread that writes them.
//!
//! The thread starts with the first bytes and ends when none wait. Bytes for which the queue has no room are dropped, so
//! that a disk that is slower than the network does not slow the load down. The next load pulls them and adds them.

use super::part::Part;
use crate::num::{to_u64, to_usize};
use crate::os::mutex::{Condvar, Mutex};
use crate::os::per_process::PerProcess;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Upper bound for the memory of the bytes that wait, in bytes.
const QUEUE_BYTES_MAX: usize = 64 << 20;
/// Bytes that are flushed to the disk together.
const BATCH_BYTES: usize = 32 << 20;
/// Longest time for which the end of the process waits for the disk.
const EXIT_TIMEOUT: Duration = Duration::from_secs(30);

static QUEUE: PerProcess<Queue> = PerProcess::new(Queue::default);

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    written: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Piece>,
    /// Memory of the pieces that wait or are being written, in bytes.
    bytes: usize,
    /// Memory of pieces that were written, for the next ones.
    free: Vec<Vec<u8>>,
    is_running: bool,
}

struct Piece {
    part: Arc<Part>,
    offset: u64,
    bytes: Vec<u8>,
}

impl Queue {}

/// Copies the bytes of a range into the queue, or drops them if it is full. `bytes` are all of the range, in parts.
pub(in crate::remote) fn add<'a>(part: &Arc<Part>, range: Range<u64>, bytes: impl Iterator<Item = &'a [u8]>) {
    if !part.wants(&range) {
        return;
    }
    let length = to_usize(range.end - range.start);
    let queue = QUEUE.get();
    let mut state = queue.state.lock();
    if state.bytes.saturating_add(length) > QUEUE_BYTES_MAX {
        tracing::debug!(?range, "the disk of the cache is slower than the load; dropped a copy");
        return;
    }
    state.bytes += length;
    let mut memory = state.free.pop().unwrap_or_default();
    drop(state);
    memory.clear();
    memory.reserve(length);
    bytes.for_each(|bytes| memory.extend_from_slice(bytes));
    let mut state = queue.state.lock();
    state.waiting.push_back(Piece { part: Arc::clone(part), offset: range.start, bytes: memory });
    if !state.is_running {
        write_at_exit();
        let started = thread::Builder::new().name("fst-cache".into()).spawn(|| run(QUEUE.get()));
        state.is_running = started.is_ok();
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start the thread that writes the cache");
            state.waiting.clear();
            state.bytes = 0;
        }
    }
}

fn run(queue: &Queue) {
    loop {
        let mut state = queue.state.lock();
        if state.waiting.is_empty() {
            state.is_running = false;
            state.free.clear();
            drop(state);
            queue.written.notify_all();
            return;
        }
        let mut batch: Vec<Piece> = Vec::new();
        let mut bytes = 0;
        while bytes < BATCH_BYTES
            && let Some(piece) = state.waiting.pop_front()
        {
            bytes += piece.bytes.len();
            batch.push(piece);
        }
        drop(state);
        write(queue, batch);
    }
}

/// Writes pieces, gives their memory back as they are written, and flushes them together.
fn write(queue: &Queue, batch: Vec<Piece>) {
    let mut written: Vec<(Arc<Part>, Vec<Range<u64>>)> = Vec::new();
    for Piece { part, offset, bytes } in batch {
        match part.write(offset, &bytes) {
            Ok(()) => {
                let range = offset..offset.saturating_add(to_u64(bytes.len()));
                match written.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &part)) {
                    Some((_, ranges)) => ranges.push(range),
                    None => written.push((part, vec![range])),
                }
            }
            Err(error) => part.fail(&error),
        }
        let mut state = queue.state.lock();
        state.bytes -= bytes.len();
        state.free.push(bytes);
    }
    for (part, ranges) in written {
        if let Err(error) = part.keep(&ranges) {
            part.fail(&error);
        }
    }
}

/// Waits until everything that was added is on the disk.
pub fn flush() {
    wait(None);
}

fn wait(timeout: Option<Duration>) {
    let begin = Instant::now();
    let queue = QUEUE.get();
    let mut state = queue.state.lock();
    while state.is_running && timeout.is_none_or(|timeout| begin.elapsed() < timeout) {
        let step = Duration::from_millis(100);
        state = queue.written.wait_timeout(state, step);
    }
}

/// Makes the end of the process wait for the disk. What the queue holds is then at most a second's work.
fn write_at_exit() {
    extern "C" fn at_exit() {
        wait(Some(EXIT_TIMEOUT));
    }
    static IS_REGISTERED: AtomicBool = AtomicBool::new(false);
    if !IS_REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the function lives as long as the library, which is never unloaded, and takes no argument.
        if unsafe { libc::atexit(at_exit) } != 0 {
            tracing::debug!("the end of the process does not wait for the cache");
        }
    }
}
