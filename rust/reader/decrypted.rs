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

use super::{ReadLimits, Reader, SlotBuffer};
use crate::encryption::chunks::{Chunk, Chunks};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use crate::plan::Read;
use crate::source::EncryptedSource;
use std::sync::{Arc, Mutex, PoisonError};

/// Reader of an encrypted file.
pub(super) struct DecryptedReader {
    /// Reader of the file as it is stored.
    reader: Arc<dyn Reader>,
    source: Arc<EncryptedSource>,
    /// Memory for copies of chunks, which reads take and give back.
    copies: Mutex<Vec<Vec<u8>>>,
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
        let mut copy = self.take_copy();
        let mut copied: Option<Chunk> = None;
        for (chunk, offset, into) in partial {
            let length = to_usize(chunk.range.end - chunk.range.start);
            // Parts of the same chunk follow each other.
            if copied.as_ref() != Some(&chunk) {
                copy.resize(length, 0);
                self.reader.read(chunk.range.start, &mut copy, check)?;
                chunks.decrypt(&chunk, &mut copy).map_err(at)?;
            }
            let begin = to_usize(offset - chunk.range.start);
            let from = copy.get(begin..begin.saturating_add(into.len())).ok_or_else(|| misfit(offset))?;
            into.copy_from_slice(from);
            copied = Some(chunk);
        }
        self.copies.lock().unwrap_or_else(PoisonError::into_inner).push(copy);
        Ok(())
    }

    fn take_copy(&self) -> Vec<u8> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }
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
