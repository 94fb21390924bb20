//! Direct reads through io_uring, many at once: the disk writes straight into the slot while the thread sleeps.
//!
//! Direct reads begin and end at multiples of the file's alignment. The plan leaves room for this in the slot, so a
//! read and the rest of its first and last block need no requests of their own.

use super::ring::{Request, Ring, RingKernel};
use super::{ReadLimits, Reader};
use crate::error::{Error, Result};
use crate::num::to_u64;
use crate::options::Options;
use crate::os::huge_pages;
use crate::os::local_file::LocalFile;
use crate::os::mutex::Mutex;
use crate::os::retry::{self, Check};
use crate::os::sigint::Watch;
use crate::plan::Read;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of one request.
const REQUEST_BYTES: usize = 512 << 10;
/// Largest supported alignment, in bytes, which slots have.
const ALIGNMENT_MAX: u64 = 4 << 10;

/// Smallest file whose slots should be huge pages, in bytes. They may take milliseconds each to make.
const HUGE_PAGES_FILE_BYTES_MIN: u64 = 64 << 20;

/// Rings of a load, shared by its readers. A ring serves one worker at a time.
pub struct Rings<K: RingKernel> {
    kernel: K,
    workers: usize,
    queue_depth: usize,
    chunk_bytes: usize,
    spare: Mutex<Vec<K::Ring>>,
}

impl<K: RingKernel> Rings<K> {
    /// Creates an empty set of rings. Each ring is created when it is first needed.
    pub fn new(kernel: K, options: &Options) -> Self {
        let &Options { threads, queue_depth, chunk_bytes, .. } = options;
        Rings { kernel, workers: threads.max(1), queue_depth, chunk_bytes, spare: Mutex::default() }
    }

    /// Returns how many requests one worker may have in flight on a disk that accepts `disk_depth` at once.
    fn depth(&self, disk_depth: usize) -> usize {
        (self.queue_depth.min(disk_depth) / self.workers).max(1)
    }

    /// Returns the alignment of direct reads of a file, in bytes. The error is the reason why the file has no direct
    /// reads.
    pub fn alignment(&self, source: &LocalFile) -> std::result::Result<u64, String> {
        let alignment = self.kernel.alignment(source).unwrap_or(ALIGNMENT_MAX);
        if alignment == 0 {
            return Err("the file system supports reads through the page cache only".into());
        }
        if !ALIGNMENT_MAX.is_multiple_of(alignment) {
            return Err(format!("the file system requires direct reads to be aligned to {alignment} bytes"));
        }
        // A chunk whose first and last block are read in part must have room for more than these two.
        let chunk_bytes = to_u64(self.chunk_bytes);
        if chunk_bytes < alignment * 4 {
            return Err(format!("chunks of {chunk_bytes} bytes are too small for reads aligned to {alignment} bytes"));
        }
        Ok(alignment)
    }

    fn take(&self) -> io::Result<K::Ring> {
        if let Some(ring) = self.spare.lock().pop() {
            return Ok(ring);
        }
        self.kernel.ring(u32::try_from(self.depth(usize::MAX)).unwrap_or(u32::MAX))
    }
}

/// Reader that uses O_DIRECT and io_uring(7).
pub struct UringReader<K: RingKernel> {
    source: Arc<LocalFile>,
    file: File,
    alignment: u64,
    /// Requests that the disk accepts at once.
    disk_depth: usize,
    rings: Arc<Rings<K>>,
    buffered: Arc<dyn Reader>,
}

impl<K: RingKernel> UringReader<K> {
    /// Opens a file for direct reads, and tries one.
    ///
    /// `buffered` reads the same file. It serves reads without room for whole blocks, and bytes that the last block of
    /// the file does not bring. The error is the reason why the file has no direct reads.
    pub fn open(
        source: &Arc<LocalFile>,
        rings: &Arc<Rings<K>>,
        buffered: Arc<dyn Reader>,
    ) -> std::result::Result<Self, String> {
        let alignment = rings.alignment(source)?;
        let file =
            rings.kernel.open(source).map_err(|error| format!("cannot open the file for direct reads: {error}"))?;
        let disk_depth = rings.kernel.depth(source).unwrap_or(usize::MAX);
        let (source, rings) = (Arc::clone(source), Arc::clone(rings));
        let reader = UringReader { source, file, alignment, disk_depth, rings, buffered };
        reader.probe()?;
        Ok(reader)
    }

    /// Reads the first block. Whether direct reads are supported is known only after one has succeeded.
    fn probe(&self) -> std::result::Result<(), String> {
        #[repr(align(4096))]
        struct Block([u8; 4096]);
        let mut block = Box::new(Block([0; 4096]));
        let slot = 0..block.0.len();
        let aligned_read = AlignedRead { offset: 0, slot, requested: 0..self.source.length.min(ALIGNMENT_MAX) };
        let watch = Watch::begin();
        let outcome = self.read_aligned(&[aligned_read], &mut block.0, &|| watch.check()).map_err(|end| match end {
            End::Ring(error) => format!("no ring can be used: {error}"),
            End::Check(error) => error.to_string(),
        })?;
        match outcome.refusal.or(outcome.failure.map(|(_, error)| error)) {
            Some(error) => Err(format!("a direct read fails: {error}")),
            None if outcome.missing.is_empty() => Ok(()),
            None => Err("a direct read returns fewer bytes than requested".into()),
        }
    }

    /// Splits a read into aligned requests, or returns `None` if the slot has no room to widen it.
    fn aligned_reads(&self, read: &Read, bytes: &[u8]) -> Option<Vec<AlignedRead>> {
        let alignment = usize::try_from(self.alignment).ok()?;
        let requested = read.offset..read.offset.checked_add(to_u64(read.length))?;
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
            let offset = begin.checked_add(to_u64(done))?;
            let end = offset.checked_add(to_u64(length))?;
            let slot = slot_begin + done..slot_begin + done + length;
            Some(AlignedRead { offset, slot, requested: requested.start.max(offset)..requested.end.min(end) })
        });
        aligned_reads.collect()
    }

    /// Performs aligned reads. The kernel does not write to `bytes` after this has returned. Fails if no ring works, or
    /// the error of `check`. The bytes are undefined then.
    fn read_aligned(
        &self,
        aligned_reads: &[AlignedRead],
        bytes: &mut [u8],
        check: Check<'_>,
    ) -> std::result::Result<Outcome, End> {
        let mut ring = self.rings.take()?;
        match self.run(&mut ring, aligned_reads, bytes, check) {
            Ok(outcome) => {
                self.rings.spare.lock().push(ring);
                Ok(outcome)
            }
            Err(error) => {
                ring.settle();
                Err(error)
            }
        }
    }

    /// Submits aligned reads to a ring until all have completed. Fails with the errors of the ring, which may still
    /// have requests in flight then; the error of `check`.
    fn run(
        &self,
        ring: &mut K::Ring,
        aligned_reads: &[AlignedRead],
        bytes: &mut [u8],
        check: Check<'_>,
    ) -> std::result::Result<Outcome, End> {
        let depth = self.rings.depth(self.disk_depth);
        let mut outcome = Outcome::default();
        let mut queue: VecDeque<usize> = (0..aligned_reads.len()).collect();
        let mut in_flight = 0;
        loop {
            while in_flight < depth
                && outcome.failure.is_none()
                && let Some(index) = queue.pop_front()
            {
                let request = aligned_reads.get(index).and_then(|aligned_read| aligned_read.request(index, bytes));
                let request = request.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
                // SAFETY: the memory is part of `bytes`, which `read_aligned` borrows until every request has
                // completed or the ring has settled. The reader keeps the file open.
                unsafe { ring.push(&self.file, request) }?;
                in_flight += 1;
            }
            if in_flight == 0 {
                return Ok(outcome);
            }
            if let Err(error) = ring.wait()
                && !retry::prepare(&error, check)?
            {
                return Err(End::Ring(error));
            }
            while let Some((index, result)) = ring.completion() {
                in_flight -= 1;
                let missing = || io::Error::from(io::ErrorKind::InvalidData);
                let aligned_read = aligned_reads.get(index).ok_or_else(missing)?;
                match result {
                    Ok(count) => outcome.missing.extend(aligned_read.missing(count)),
                    Err(error) if retry::prepare(&error, check)? => queue.push_front(index),
                    // The file system refuses a read that it allowed in `probe`. The page cache serves every read.
                    Err(error) if is_refusal(&error) => {
                        outcome.missing.extend(aligned_read.missing(0));
                        outcome.refusal = Some(error);
                    }
                    Err(error) => outcome.fail(aligned_read.requested.start, error),
                }
            }
        }
    }
}

impl<K: RingKernel> Reader for UringReader<K> {
    fn limits(&self) -> ReadLimits {
        ReadLimits { concurrency: self.disk_depth, ..ReadLimits::direct(self.alignment) }
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        self.buffered.read(offset, into, check)
    }

    fn fill(&self, reads: &[Read], slot: &mut [u8], check: Check<'_>) -> Result<()> {
        let aligned_reads: Option<Vec<_>> = reads.iter().map(|read| self.aligned_reads(read, slot)).collect();
        let Some(aligned_reads) = aligned_reads else { return self.buffered.fill(reads, slot, check) };
        if self.source.length >= HUGE_PAGES_FILE_BYTES_MIN {
            huge_pages::advise_for_disk(slot);
        }
        let outcome = match self.read_aligned(&aligned_reads.concat(), slot, check) {
            Ok(outcome) => outcome,
            Err(End::Check(error)) => return Err(error),
            Err(End::Ring(error)) => {
                let path = self.source.path.display();
                tracing::info!(%path, %error, "no ring; reads this chunk through the page cache");
                return self.buffered.fill(reads, slot, check);
            }
        };
        // The first byte that could not be read determines the error.
        let failed = outcome.failure.as_ref().map_or(u64::MAX, |(offset, _)| *offset);
        let mut missing: Vec<Read> = outcome.missing.into_iter().filter(|read| read.offset < failed).collect();
        missing.sort_by_key(|read| read.offset);
        self.buffered.fill(&missing, slot, check)?;
        match outcome.failure {
            None => Ok(()),
            Some((offset, error)) => Err(Error::from_io(error, &self.source.path, "cannot read").offset(offset)),
        }
    }
}

/// Part of a read, widened to whole blocks: one request.
#[derive(Clone, Debug)]
struct AlignedRead {
    /// First byte in the file.
    offset: u64,
    /// Bytes of the slot.
    slot: Range<usize>,
    /// Requested bytes of the file, without the rest of the blocks.
    requested: Range<u64>,
}

impl AlignedRead {
    fn request(&self, tag: usize, bytes: &mut [u8]) -> Option<Request> {
        let memory = bytes.get_mut(self.slot.clone())?;
        let length = u32::try_from(memory.len()).ok()?;
        Some(Request { tag, offset: self.offset, memory: memory.as_mut_ptr(), length })
    }

    /// Returns the requested bytes that are not among the first `count`, or `None` if there are none.
    fn missing(&self, count: usize) -> Option<Read> {
        let begin = self.requested.start.max(self.offset.saturating_add(to_u64(count)));
        let length = usize::try_from(self.requested.end.checked_sub(begin)?).ok().filter(|&length| length > 0)?;
        let slot_begin = self.slot.start + usize::try_from(begin - self.offset).ok()?;
        Some(Read { offset: begin, slot_begin, length })
    }
}

/// Reason why aligned reads ended early.
enum End {
    /// The ring does not work.
    Ring(io::Error),
    /// The caller's check failed.
    Check(Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> End {
        End::Ring(error)
    }
}

impl From<Error> for End {
    fn from(error: Error) -> End {
        End::Check(error)
    }
}

/// Outcome of aligned reads.
#[derive(Default)]
struct Outcome {
    /// Bytes that a completed request did not return: past the end of the file, which the last block may exceed, or
    /// refused.
    missing: Vec<Read>,
    /// Error with which the file system refused a read.
    refusal: Option<io::Error>,
    /// First byte that could not be read, and the error.
    failure: Option<(u64, io::Error)>,
}

impl Outcome {
    fn fail(&mut self, offset: u64, error: io::Error) {
        if self.failure.as_ref().is_none_or(|(first, _)| offset < *first) {
            self.failure = Some((offset, error));
        }
    }
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::INVAL | Errno::OPNOTSUPP))
}
