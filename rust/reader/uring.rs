//! Reads past the page cache, many at a time: the disk writes straight into
//! the slot, and the thread sleeps meanwhile.
//!
//! Such reads begin and end at multiples of the file's alignment. The plan
//! leaves the room in the slot, so the bytes around a read that nobody wants
//! come in the same request, and head and tail need none of their own.

use super::ring::{BUSY_WAIT, Request, Ring, RingKernel};
use super::{Reader, SlotBuffer};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::plan::Read;
use crate::source::Source;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// One request to the disk.
const REQUEST_BYTES: usize = 512 << 10;
/// The largest alignment there may be: where slots begin.
const ALIGNMENT_MAX: u64 = 4 << 10;

/// The rings of a load, which its readers share. A ring serves one worker at a time.
pub struct Rings<K: RingKernel> {
    kernel: K,
    workers: usize,
    queue_depth: usize,
    chunk_bytes: usize,
    spare: Mutex<Vec<K::Ring>>,
}

impl<K: RingKernel> Rings<K> {
    /// No ring yet; each is made when it is needed.
    pub fn new(kernel: K, options: &Options) -> Self {
        let &Options { threads, queue_depth, chunk_bytes, .. } = options;
        Rings { kernel, workers: threads.max(1), queue_depth, chunk_bytes, spare: Mutex::default() }
    }

    /// How many requests one worker may have at a source that takes `depth` at once.
    fn depth(&self, depth: usize) -> usize {
        (self.queue_depth.min(depth) / self.workers).max(1)
    }

    /// Multiples of how many bytes reads past the page cache want.
    ///
    /// # Errors
    /// Why there are none.
    pub fn alignment(&self, source: &Source) -> std::result::Result<u64, String> {
        let alignment = self.kernel.alignment(source).unwrap_or(ALIGNMENT_MAX);
        if alignment == 0 {
            return Err("the file system reads only through the page cache".into());
        }
        if !ALIGNMENT_MAX.is_multiple_of(alignment) {
            return Err(format!("the file system wants direct reads to be aligned to {alignment} bytes"));
        }
        // A chunk with a read at its begin and one at its end must still hold something besides.
        let chunk_bytes = u64::try_from(self.chunk_bytes).unwrap_or(u64::MAX);
        if chunk_bytes < alignment * 4 {
            return Err(format!("chunks of {chunk_bytes} bytes are too small for reads aligned to {alignment} bytes"));
        }
        Ok(alignment)
    }

    fn take(&self) -> io::Result<K::Ring> {
        if let Some(ring) = self.spare().pop() {
            return Ok(ring);
        }
        self.kernel.ring(u32::try_from(self.depth(usize::MAX)).unwrap_or(u32::MAX))
    }

    fn spare(&self) -> MutexGuard<'_, Vec<K::Ring>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reader with O_DIRECT through io_uring(7).
pub struct UringReader<K: RingKernel> {
    source: Arc<Source>,
    file: File,
    alignment: u64,
    depth: usize,
    rings: Arc<Rings<K>>,
    buffered: Arc<dyn Reader>,
}

impl<K: RingKernel> UringReader<K> {
    /// Opens the file for direct reads, and tries one. `buffered` reads the same file, and serves what direct reads
    /// cannot: single bytes, and what the file's last read did not bring.
    ///
    /// # Errors
    /// Why there are no such reads of this file here.
    pub fn open(
        source: &Arc<Source>,
        rings: &Arc<Rings<K>>,
        buffered: Arc<dyn Reader>,
    ) -> std::result::Result<Self, String> {
        let alignment = rings.alignment(source)?;
        let file =
            rings.kernel.open(source).map_err(|error| format!("cannot open the file for direct reads: {error}"))?;
        let depth = rings.depth(rings.kernel.depth(source).unwrap_or(usize::MAX));
        let reader =
            UringReader { source: Arc::clone(source), file, alignment, depth, rings: Arc::clone(rings), buffered };
        reader.probe()?;
        Ok(reader)
    }

    /// Whether all of it works is only known once it has.
    fn probe(&self) -> std::result::Result<(), String> {
        #[repr(align(4096))]
        struct Block([u8; 4096]);
        let mut block = Box::new(Block([0; 4096]));
        let slot = 0..block.0.len();
        let aligned_read = AlignedRead { offset: 0, slot, requested: 0..self.source.length.min(ALIGNMENT_MAX) };
        let answers =
            self.ask(&[aligned_read], &mut block.0).map_err(|error| format!("no ring can be used: {error}"))?;
        match answers.refusal.or(answers.failure.map(|(_, error)| error)) {
            Some(error) => Err(format!("a direct read fails: {error}")),
            None if answers.missing.is_empty() => Ok(()),
            None => Err("a direct read brings less than was asked for".into()),
        }
    }

    /// The pieces of a read, or `None` where the slot has no room to widen it.
    fn aligned_reads(&self, read: &Read, bytes: &[u8]) -> Option<Vec<AlignedRead>> {
        let alignment = usize::try_from(self.alignment).ok()?;
        let requested = read.offset..read.offset.checked_add(u64::try_from(read.length).ok()?)?;
        let begin = requested.start - requested.start % self.alignment;
        let before = usize::try_from(requested.start - begin).ok()?;
        let slot_begin = read.slot_begin.checked_sub(before)?;
        let length = before.checked_add(read.length)?.checked_next_multiple_of(alignment)?;
        let is_aligned = bytes.as_ptr().addr().is_multiple_of(alignment) && slot_begin.is_multiple_of(alignment);
        if !is_aligned || slot_begin.checked_add(length)? > bytes.len() {
            return None;
        }
        let aligned_reads = (0..length).step_by(REQUEST_BYTES).map(|done| {
            let length = REQUEST_BYTES.min(length - done);
            let offset = begin.checked_add(u64::try_from(done).ok()?)?;
            let end = offset.checked_add(u64::try_from(length).ok()?)?;
            let slot = slot_begin + done..slot_begin + done + length;
            Some(AlignedRead { offset, slot, requested: requested.start.max(offset)..requested.end.min(end) })
        });
        aligned_reads.collect()
    }

    /// Has the kernel read the pieces. It writes to `bytes` no more when this returns.
    ///
    /// # Errors
    /// When there is no ring that works, and nothing is known of the pieces.
    fn ask(&self, aligned_reads: &[AlignedRead], bytes: &mut [u8]) -> io::Result<Answers> {
        let mut ring = self.rings.take()?;
        match self.converse(&mut ring, aligned_reads, bytes) {
            Ok(answers) => {
                self.rings.spare().push(ring);
                Ok(answers)
            }
            Err(error) => {
                ring.settle();
                Err(error)
            }
        }
    }

    /// # Errors
    /// Those of the ring, which may still have requests then.
    fn converse(&self, ring: &mut K::Ring, aligned_reads: &[AlignedRead], bytes: &mut [u8]) -> io::Result<Answers> {
        let mut answers = Answers::default();
        let mut todo: VecDeque<usize> = (0..aligned_reads.len()).collect();
        let mut asked = 0;
        loop {
            while asked < self.depth
                && answers.failure.is_none()
                && let Some(index) = todo.pop_front()
            {
                let request = aligned_reads.get(index).and_then(|aligned_read| aligned_read.request(index, bytes));
                let request = request.ok_or(io::ErrorKind::InvalidInput)?;
                // SAFETY: the memory is a part of `bytes`, which `ask` has until every request has been answered or
                // the ring has settled. The file is open for as long as we live.
                unsafe { ring.push(&self.file, request) }?;
                asked += 1;
            }
            if asked == 0 {
                return Ok(answers);
            }
            let mut is_busy = false;
            match ring.wait() {
                Err(error) if is_for_now(&error) => is_busy = !is_interrupted(&error),
                waited => waited?,
            }
            while let Some((index, result)) = ring.answer() {
                asked -= 1;
                let aligned_read = aligned_reads.get(index).ok_or(io::ErrorKind::InvalidData)?;
                match result {
                    Ok(count) => answers.missing.extend(aligned_read.missing(count)),
                    Err(error) if is_for_now(&error) => {
                        is_busy |= !is_interrupted(&error);
                        todo.push_front(index);
                    }
                    // What the probe was allowed is refused here; the page cache takes every read.
                    Err(error) if is_refusal(&error) => {
                        answers.missing.extend(aligned_read.missing(0));
                        answers.refusal = Some(error);
                    }
                    Err(error) => answers.fail(aligned_read.requested.start, error),
                }
            }
            if is_busy {
                thread::sleep(BUSY_WAIT);
            }
        }
    }

    fn buffered(&self, reads: &[Read], buffer: &mut SlotBuffer<'_>) -> Result<()> {
        self.buffered.fill(reads, SlotBuffer { id: buffer.id, bytes: buffer.bytes })
    }
}

impl<K: RingKernel> Reader for UringReader<K> {
    fn alignment(&self) -> u64 {
        self.alignment
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.buffered.read(offset, into)
    }

    fn fill(&self, reads: &[Read], mut buffer: SlotBuffer<'_>) -> Result<()> {
        let aligned_reads: Option<Vec<_>> = reads.iter().map(|read| self.aligned_reads(read, buffer.bytes)).collect();
        let Some(aligned_reads) = aligned_reads else { return self.buffered(reads, &mut buffer) };
        let aligned_reads = aligned_reads.concat();
        let answers = match self.ask(&aligned_reads, buffer.bytes) {
            Ok(answers) => answers,
            Err(error) => {
                tracing::info!(path = %self.source.path.display(), %error, "no ring; read through the page cache");
                return self.buffered(reads, &mut buffer);
            }
        };
        // The error to tell is that of the first byte that could not be read.
        let failed = answers.failure.as_ref().map_or(u64::MAX, |(offset, _)| *offset);
        let mut missing: Vec<Read> = answers.missing.into_iter().filter(|read| read.offset < failed).collect();
        missing.sort_by_key(|read| read.offset);
        self.buffered(&missing, &mut buffer)?;
        match answers.failure {
            None => Ok(()),
            Some((offset, error)) => Err(Error::from_io(error, &self.source.path, "cannot read").offset(offset)),
        }
    }
}

/// A part of a read, widened to the alignment: one request.
#[derive(Clone, Debug)]
struct AlignedRead {
    /// The first byte in the file.
    offset: u64,
    /// Where the piece lies in the slot.
    slot: Range<usize>,
    /// Which bytes of the file somebody wants of it.
    requested: Range<u64>,
}

impl AlignedRead {
    fn request(&self, tag: usize, bytes: &mut [u8]) -> Option<Request> {
        let memory = bytes.get_mut(self.slot.clone())?;
        let length = u32::try_from(memory.len()).ok()?;
        Some(Request { tag, offset: self.offset, memory: memory.as_mut_ptr(), length })
    }

    /// The wanted bytes that are not among the first `count`. At the end of the file there are none.
    fn missing(&self, count: usize) -> Option<Read> {
        let begin = self.requested.start.max(self.offset.saturating_add(u64::try_from(count).unwrap_or(u64::MAX)));
        let length = usize::try_from(self.requested.end.checked_sub(begin)?).ok().filter(|&length| length > 0)?;
        let slot_begin = self.slot.start + usize::try_from(begin - self.offset).ok()?;
        Some(Read { offset: begin, slot_begin, length })
    }
}

/// What the kernel said of some pieces.
#[derive(Default)]
struct Answers {
    /// What did not come though nothing failed: the end of the file, which the last request reaches beyond, or a file
    /// that has become shorter.
    missing: Vec<Read>,
    /// Why the file system has not read a piece that is missing.
    refusal: Option<io::Error>,
    /// The first byte that could not be read, and why.
    failure: Option<(u64, io::Error)>,
}

impl Answers {
    fn fail(&mut self, offset: u64, error: io::Error) {
        if self.failure.as_ref().is_none_or(|(first, _)| offset < *first) {
            self.failure = Some((offset, error));
        }
    }
}

fn is_interrupted(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Interrupted
}

/// Whether the same may go well the next time.
fn is_for_now(error: &io::Error) -> bool {
    is_interrupted(error) || matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy)
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::INVAL | Errno::OPNOTSUPP))
}
