//! Reader that decrypts what another reader reads.
//!
//! A chunk of the encryption is decrypted as a whole. The chunks of a read are decrypted in place; of a chunk that is only
//! partly requested, at either end of a read, the reader decrypts a copy:
//!
//! ```text
//! chunks  |    0    |    1    |    2    |    3    |
//! read          [:::::---------:::::::::::::]
//!               copy   in place   copy
//! ```
//!
//! Columns of a matrix are read in slots of several rows each, and several slots may need parts of one chunk. So the reader
//! keeps the last copies, and a thread waits for a copy that another one decrypts.

use super::{ReadLimits, Reader, SlotBuffer};
use crate::encryption::chunks::{Chunk, Chunks};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use crate::plan::Read;
use crate::source::EncryptedSource;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of copies of chunks that a reader keeps: one for each thread that reads by default, at most.
const COPY_COUNT: usize = 16;

/// Reader of an encrypted file.
pub(super) struct DecryptedReader {
    /// Reader of the file as it is stored.
    reader: Arc<dyn Reader>,
    source: Arc<EncryptedSource>,
    /// Copies of chunks by their numbers. The one that was used last is at the end.
    copies: Mutex<VecDeque<(u64, Arc<Mutex<ChunkCopy>>)>>,
}

/// Copy of a chunk.
struct ChunkCopy {
    bytes: Vec<u8>,
    is_decrypted: bool,
}

/// Part of a piece: whole chunks, or a part of one.
enum Part<'a> {
    Whole(u64, &'a mut [u8]),
    Partial(Chunk, u64, &'a mut [u8]),
}

impl DecryptedReader {
    /// Creates a reader of `source`, whose bytes as they are stored come from `reader`.
    pub(super) fn new(reader: Arc<dyn Reader>, source: Arc<EncryptedSource>) -> Self {
        DecryptedReader { reader, source, copies: Mutex::default() }
    }

    /// Fills pieces of memory, in ascending order of their offsets.
    fn decrypt(&self, pieces: Vec<(u64, &mut [u8])>, check: Check<'_>) -> Result<()> {
        let chunks = &self.source.chunks;
        let (mut whole, mut partial) = (Vec::new(), Vec::new());
        for (offset, into) in pieces {
            for part in divide(chunks, offset, into)? {
                match part {
                    Part::Whole(offset, into) => whole.push((offset, into)),
                    Part::Partial(chunk, offset, into) => partial.push((chunk, offset, into)),
                }
            }
        }
        let at = |error: Error| error.at(self.source.stored.path());
        self.reader.scatter(whole.iter_mut().map(|(offset, into)| (*offset, &mut **into)).collect(), check)?;
        for (offset, into) in whole {
            decrypt_all(chunks, offset, into).map_err(at)?;
        }
        // Parts of the same chunk follow each other.
        for parts in partial.chunk_by_mut(|(one, ..), (two, ..)| one == two) {
            let Some((chunk, ..)) = parts.first() else { continue };
            let copy = self.copy_of(chunk);
            let mut copy = lock(&copy);
            if !copy.is_decrypted {
                copy.bytes.resize(to_usize(chunk.range.end - chunk.range.start), 0);
                self.reader.read(chunk.range.start, &mut copy.bytes, check)?;
                chunks.decrypt(chunk, &mut copy.bytes).map_err(at)?;
                copy.is_decrypted = true;
            }
            for (chunk, offset, into) in parts {
                let begin = to_usize(*offset - chunk.range.start);
                let from = copy.bytes.get(begin..begin.saturating_add(into.len()));
                into.copy_from_slice(from.ok_or_else(|| misfit(*offset))?);
            }
        }
        Ok(())
    }

    /// Returns the copy of a chunk, or a new one with the memory of the oldest.
    fn copy_of(&self, chunk: &Chunk) -> Arc<Mutex<ChunkCopy>> {
        let mut copies = lock(&self.copies);
        let known = copies.iter().position(|(number, _)| *number == chunk.number);
        let copy = match known.and_then(|index| copies.remove(index)) {
            Some((_, copy)) => copy,
            None => {
                let oldest = if copies.len() < COPY_COUNT { None } else { copies.pop_front() };
                // A thread may still use it, and keep its memory.
                let oldest = oldest.and_then(|(_, copy)| Arc::into_inner(copy));
                let oldest = oldest.map(|copy| copy.into_inner().unwrap_or_else(PoisonError::into_inner));
                let bytes = oldest.map_or_else(Vec::new, |copy| copy.bytes);
                Arc::new(Mutex::new(ChunkCopy { bytes, is_decrypted: false }))
            }
        };
        copies.push_back((chunk.number, Arc::clone(&copy)));
        copy
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reader for DecryptedReader {
    fn limits(&self) -> ReadLimits {
        ReadLimits { unit_bytes: self.source.chunks.chunk_bytes(), ..self.reader.limits() }
    }

    fn refusal(&self) -> Option<&str> {
        self.reader.refusal()
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        self.decrypt(vec![(offset, into)], check)
    }

    fn fill(&self, reads: &[Read], buffer: SlotBuffer<'_>, check: Check<'_>) -> Result<()> {
        self.decrypt(buffer.pieces(reads)?, check)
    }

    fn scatters(&self) -> bool {
        self.reader.scatters()
    }

    fn scatter(&self, pieces: Vec<(u64, &mut [u8])>, check: Check<'_>) -> Result<()> {
        self.decrypt(pieces, check)
    }
}

/// Divides memory for bytes from `offset` at the chunks that it covers only in part.
fn divide<'a>(chunks: &Chunks, offset: u64, into: &'a mut [u8]) -> Result<Vec<Part<'a>>> {
    let end = offset.saturating_add(to_u64(into.len()));
    let (mut at, mut rest) = (offset, into);
    let mut parts = Vec::new();
    while at < end {
        let chunk = chunks.at(at).ok_or_else(|| misfit(at))?;
        let is_whole = |chunk: &Chunk| chunk.range.end <= end;
        let mut stop = chunk.range.end.min(end);
        let is_partial = at > chunk.range.start || !is_whole(&chunk);
        // Whole chunks stay together, to be read at once.
        while !is_partial && stop < end {
            match chunks.at(stop).filter(is_whole) {
                Some(next) => stop = next.range.end,
                None => break,
            }
        }
        let (part, left) = rest.split_at_mut_checked(to_usize(stop - at)).ok_or_else(|| misfit(at))?;
        parts.push(if is_partial { Part::Partial(chunk, at, part) } else { Part::Whole(at, part) });
        (at, rest) = (stop, left);
    }
    Ok(parts)
}

/// Decrypts whole chunks in place.
fn decrypt_all(chunks: &Chunks, mut offset: u64, into: &mut [u8]) -> Result<()> {
    let mut rest = into;
    while !rest.is_empty() {
        let chunk = chunks.at(offset).ok_or_else(|| misfit(offset))?;
        let length = to_usize(chunk.range.end - chunk.range.start);
        let (data, left) = rest.split_at_mut_checked(length).ok_or_else(|| misfit(offset))?;
        chunks.decrypt(&chunk, data)?;
        (offset, rest) = (chunk.range.end, left);
    }
    Ok(())
}

fn misfit(offset: u64) -> Error {
    Error::new(Kind::Internal, format!("no chunk of the encryption has byte {offset}, or not all of it"))
}
