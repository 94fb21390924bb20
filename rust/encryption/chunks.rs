//! Chunks of the data of a file, each of which is encrypted by itself.

use super::cipher::{Cipher, KeyedCipher, TAG_BYTES, Tag};
use super::file_key::FileKey;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::profile::{self, Stage};
use std::ops::Range;

/// Size of a chunk of new files in bytes.
///
/// It is the size of the staging slots on the CPU and a divisor of those of GPUs, so that a slot has whole chunks, which
/// stay in the cache of the core that decrypts them. A slice decrypts at most this many bytes too many at each end. The
/// codes take 16 bytes for each MiB.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Smallest size of a chunk that is accepted, in bytes.
pub const CHUNK_BYTES_MIN: u64 = 4 << 10;
/// Largest size of a chunk that is accepted, in bytes. Readers need memory for a whole chunk.
pub const CHUNK_BYTES_MAX: u64 = 4 << 20;

/// Returns the number of chunks of tensors with these sizes in bytes.
pub fn count(sizes: impl Iterator<Item = u64>, chunk_bytes: u64) -> u64 {
    sizes.fold(0, |count, bytes| count.saturating_add(bytes.div_ceil(chunk_bytes.max(1))))
}

/// Chunk of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Number of the chunk in the file.
    pub number: u64,
    /// Its bytes, from the start of the file.
    pub range: Range<u64>,
}

/// Chunks of a file, with the key to decrypt them.
#[derive(Debug)]
pub struct Chunks {
    cipher: KeyedCipher,
    chunk_bytes: u64,
    /// Tensors with bytes, in the order of the file.
    tensors: Vec<Tensor>,
    tags: Vec<u8>,
}

#[derive(Debug)]
struct Tensor {
    range: Range<u64>,
    /// Number of the first chunk.
    first: u64,
}

impl Chunks {
    /// Returns the chunks of tensors at these ranges of the file, in ascending order, with their authentication codes.
    ///
    /// # Errors
    /// `internal` if the cipher refuses its key.
    pub fn new(
        file_key: &FileKey,
        cipher: Cipher,
        chunk_bytes: u64,
        ranges: impl Iterator<Item = Range<u64>>,
        tags: Vec<u8>,
    ) -> Result<Chunks> {
        let mut next: u64 = 0;
        let tensor = |range: Range<u64>| {
            let first = next;
            next = next.saturating_add((range.end - range.start).div_ceil(chunk_bytes));
            Tensor { range, first }
        };
        let tensors = ranges.filter(|range| !range.is_empty()).map(tensor).collect();
        Ok(Chunks { cipher: file_key.data_cipher(cipher)?, chunk_bytes, tensors, tags })
    }

    /// Returns the size of all chunks but the last one of each tensor, in bytes.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Returns the chunk with the byte at `offset`, or `None` if no chunk has it.
    pub fn at(&self, offset: u64) -> Option<Chunk> {
        let index = self.tensors.partition_point(|tensor| tensor.range.end <= offset);
        let Tensor { range, first } = self.tensors.get(index).filter(|tensor| tensor.range.contains(&offset))?;
        let position = (offset - range.start) / self.chunk_bytes;
        let begin = range.start.saturating_add(position.saturating_mul(self.chunk_bytes));
        let end = begin.saturating_add(self.chunk_bytes).min(range.end);
        Some(Chunk { number: first.saturating_add(position), range: begin..end })
    }

    /// Decrypts a chunk in place. Data that is not authentic is overwritten with zeros.
    ///
    /// # Errors
    /// `integrity`, with the first byte of the chunk.
    pub fn decrypt(&self, chunk: &Chunk, data: &mut [u8]) -> Result<()> {
        let _span = profile::span(Stage::Cipher).bytes(data.len());
        let begin = to_usize(chunk.number).saturating_mul(TAG_BYTES);
        let tag = self.tags.get(begin..begin.saturating_add(TAG_BYTES)).and_then(|tag| Tag::try_from(tag).ok());
        let is_whole = to_u64(data.len()) == chunk.range.end - chunk.range.start;
        let no_tag = || Error::new(Kind::Internal, format!("no code for {} bytes of {chunk:?}", data.len()));
        let tag = tag.filter(|_| is_whole).ok_or_else(no_tag)?;
        if self.cipher.decrypt(chunk.number, &[], data, tag) {
            return Ok(());
        }
        let message = format!(
            "the {} bytes of chunk {}, or their authentication code, are not those that were encrypted; the file was \
             changed, or parts of files were exchanged",
            data.len(),
            chunk.number
        );
        Err(Error::new(Kind::Integrity, message).offset(chunk.range.start))
    }
}

/// Encrypts the chunks of a new file.
pub struct ChunkEncryptor {
    cipher: KeyedCipher,
    tags: Vec<u8>,
}

impl ChunkEncryptor {
    /// Begins with the first chunk. A key must encrypt only one file.
    ///
    /// # Errors
    /// `internal` if the cipher refuses its key.
    pub fn new(file_key: &FileKey, cipher: Cipher) -> Result<ChunkEncryptor> {
        Ok(ChunkEncryptor { cipher: file_key.data_cipher(cipher)?, tags: Vec::new() })
    }

    /// Encrypts the next chunk in place.
    ///
    /// # Errors
    /// `internal` if the cipher fails.
    pub fn encrypt(&mut self, data: &mut [u8]) -> Result<()> {
        let _span = profile::span(Stage::Cipher).bytes(data.len());
        let number = to_u64(self.tags.len() / TAG_BYTES);
        self.tags.extend(self.cipher.encrypt(number, &[], data)?);
        Ok(())
    }

    /// Returns the authentication codes of all chunks.
    pub fn tags(&self) -> &[u8] {
        &self.tags
    }
}
