//! Chunks of the data of a file, each of which is encrypted by itself.

use super::cipher::{Cipher, KeyedCipher, TAG_BYTES, Tag};
use super::file_key::FileKey;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::profile::{self, Stage};
use crate::units::{Unit, Units};
use std::fmt;
use std::ops::Range;

/// Size of a chunk of new files in bytes.
///
/// It is the size of the staging slots on the CPU and a divisor of the slots of GPUs, so that a slot has whole chunks,
/// which stay in the cache of the core that decrypts them. A slice decrypts at most this many bytes too many at each
/// end. The codes take 16 bytes for each MiB.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Smallest size of a chunk that is accepted, in bytes.
pub const CHUNK_BYTES_MIN: u64 = 4 << 10;
/// Largest size of a chunk that is accepted in files of fst, in bytes. Readers need memory for a whole chunk.
pub const CHUNK_BYTES_MAX: u64 = 4 << 20;

/// Chunks of an encrypted file, with what decrypts them.
pub trait Chunks: fmt::Debug + Send + Sync {
    /// Returns the place of each chunk.
    fn units(&self) -> &Units;

    /// Decrypts a chunk in place. Data that is not authentic is overwritten with zeros. Fails with `integrity`, with
    /// the first byte of the chunk.
    fn decrypt(&self, chunk: &Unit, data: &mut [u8]) -> Result<()>;
}

/// Chunks of a safetensors file. All have the same size, but the last one of each tensor.
#[derive(Debug)]
pub struct SafetensorsChunks {
    cipher: KeyedCipher,
    units: Units,
    tags: Vec<u8>,
}

impl SafetensorsChunks {
    /// Returns the chunks of tensors at these ranges of the file, in ascending order, with their authentication codes.
    pub fn new(
        file_key: &FileKey,
        cipher: Cipher,
        chunk_bytes: u64,
        ranges: impl Iterator<Item = Range<u64>>,
        tags: Vec<u8>,
    ) -> Result<SafetensorsChunks> {
        let units = Units::new(ranges.map(|range| (range, chunk_bytes)), CHUNK_BYTES_MAX);
        Ok(SafetensorsChunks { cipher: file_key.data_cipher(cipher)?, units, tags })
    }
}

impl Chunks for SafetensorsChunks {
    fn units(&self) -> &Units {
        &self.units
    }

    fn decrypt(&self, chunk: &Unit, data: &mut [u8]) -> Result<()> {
        let _span = profile::span(Stage::Cipher).bytes(data.len());
        let tag = tag_of(&self.tags, chunk.number).filter(|_| chunk.fits(data)).ok_or_else(|| no_tag(chunk, data))?;
        let is_authentic = self.cipher.decrypt(chunk.number, &[], data, tag);
        if is_authentic { Ok(()) } else { Err(changed(chunk)) }
    }
}

/// Returns the authentication code with this number.
fn tag_of(tags: &[u8], number: u64) -> Option<Tag> {
    tags.as_chunks().0.get(to_usize(number)).copied()
}

/// Returns the error for data that is no chunk.
pub fn no_tag(chunk: &Unit, data: &[u8]) -> Error {
    Error::new(Kind::Internal, format!("no code for {} bytes of {chunk:?}", data.len()))
}

fn changed(chunk: &Unit) -> Error {
    let message = format!(
        "the {} bytes of chunk {}, or their authentication code, are not those that were encrypted; the file was changed, \
         or parts of files were exchanged",
        chunk.range.end - chunk.range.start,
        chunk.number
    );
    Error::new(Kind::Integrity, message).offset(chunk.range.start)
}

/// Encrypts the chunks of a new file.
pub struct ChunkEncryptor {
    cipher: KeyedCipher,
    tags: Vec<u8>,
}

impl ChunkEncryptor {
    /// Begins with the first chunk. A key must encrypt only one file.
    pub fn new(file_key: &FileKey, cipher: Cipher) -> Result<ChunkEncryptor> {
        Ok(ChunkEncryptor { cipher: file_key.data_cipher(cipher)?, tags: Vec::new() })
    }

    /// Encrypts the next chunk in place.
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
