//! Encryption of the data of a file while it is written.
//!
//! A chunk is encrypted as a whole, so its bytes are gathered first, over several calls of the caller if necessary.

use crate::device::Fetch;
use crate::encryption::chunks::{CHUNK_BYTES, ChunkEncryptor};
use crate::encryption::cipher::Cipher;
use crate::encryption::key::EncryptionKey;
use crate::error::{Error, Kind, Result};
use crate::format::Metadata;
use crate::format::encryption::NewEncryption;
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use crate::save::memory::SourceMemory;
use crate::staging::Block;

/// Encryption of a file, with the chunk that is gathered.
pub(super) struct Encryptor {
    encryption: NewEncryption,
    chunks: ChunkEncryptor,
    chunk: Block,
    /// Number of gathered bytes of the chunk.
    filled: usize,
    /// Number of bytes of the current tensor that are not gathered.
    left_bytes: u64,
}

impl Encryptor {
    /// Begins a file with a new key, which `key` wraps.
    pub(super) fn begin(key: &EncryptionKey) -> Result<Encryptor> {
        let encryption = NewEncryption::new(key, Cipher::preferred())?;
        let chunks = encryption.chunk_encryptor()?;
        let chunk = Block::allocate(to_usize(CHUNK_BYTES), None)?;
        Ok(Encryptor { encryption, chunks, chunk, filled: 0, left_bytes: 0 })
    }

    /// Returns the metadata with place for the encryption's.
    pub(super) fn reserve(&self, metadata: Metadata) -> Metadata {
        self.encryption.reserve(metadata)
    }

    /// Begins a tensor.
    pub(super) fn add(&mut self, bytes: u64) {
        self.left_bytes = bytes;
    }

    /// Gathers bytes of the tensor up to the end of a chunk. Returns their number, and the encrypted chunk if it is
    /// complete.
    pub(super) fn take(
        &mut self,
        source: &dyn SourceMemory,
        address: u64,
        bytes: u64,
        check: Check<'_>,
    ) -> Result<(u64, Option<&[u8]>)> {
        let too_many = || Error::new(Kind::Internal, format!("{bytes} bytes exceed the tensor"));
        self.chunk.pin(|memory| source.pin(memory));
        let length = (to_usize(CHUNK_BYTES) - self.filled).min(to_usize(bytes.min(self.left_bytes)));
        if length == 0 {
            return Err(too_many());
        }
        source.fetch(&mut self.chunk, &[Fetch { address, slot_begin: self.filled, length }], check)?;
        self.filled += length;
        self.left_bytes -= to_u64(length);
        if self.filled < to_usize(CHUNK_BYTES) && self.left_bytes > 0 {
            return Ok((to_u64(length), None));
        }
        let chunk = self.chunk.bytes_mut().get_mut(..self.filled).ok_or_else(too_many)?;
        self.chunks.encrypt(chunk)?;
        self.filled = 0;
        Ok((to_u64(length), Some(chunk)))
    }

    /// Returns the authentication codes of all chunks.
    pub(super) fn tags(&self) -> &[u8] {
        self.chunks.tags()
    }

    /// Writes the text of the encryption to the header.
    pub(super) fn seal(&self, header: &mut [u8]) -> Result<()> {
        self.encryption.seal(header)
    }
}
