//! Encrypted chunks of the tensors of a file of CryptoTensors, each of which has a key of its own.

use crate::encryption::chunks::{CHUNK_BYTES, CHUNK_BYTES_MAX, Chunks, changed, no_tag, tag_of};
use crate::encryption::cipher::{KeyedCipher, NonceBytes, TAG_BYTES};
use crate::error::Result;
use crate::num::to_u64;
use crate::profile::{self, Stage};
use crate::units::{Unit, Units};
use std::ops::Range;

/// Cipher of one tensor.
#[derive(Debug)]
pub struct TensorCipher {
    cipher: KeyedCipher,
    /// Nonce of the first chunk.
    nonce: NonceBytes,
    chunk_bytes: u64,
    tags: Vec<u8>,
}

impl TensorCipher {
    /// Returns the cipher of a tensor of `tensor_bytes` bytes in chunks of `chunk_bytes`, at least 1. The last four bytes of
    /// a nonce are a big-endian number: that of the first chunk plus the number of the chunk in the tensor. Returns `None`
    /// unless there are a nonce and an authentication code for each chunk.
    pub fn new(
        cipher: KeyedCipher,
        nonce: NonceBytes,
        tags: Vec<u8>,
        chunk_bytes: u64,
        tensor_bytes: u64,
    ) -> Option<TensorCipher> {
        let cipher = TensorCipher { cipher, nonce, chunk_bytes, tags };
        let count = tensor_bytes.checked_div(chunk_bytes)? + u64::from(!tensor_bytes.is_multiple_of(chunk_bytes));
        let has_nonces = count.checked_sub(1).is_none_or(|last| cipher.nonce(last).is_some());
        let has_tags = count.checked_mul(to_u64(TAG_BYTES)) == Some(to_u64(cipher.tags.len()));
        (has_nonces && has_tags).then_some(cipher)
    }

    /// Returns the nonce of a chunk of the tensor, or `None` if there is no such nonce.
    fn nonce(&self, number: u64) -> Option<NonceBytes> {
        let mut nonce = self.nonce;
        let counter = nonce.last_chunk_mut::<4>()?;
        *counter = u32::from_be_bytes(*counter).checked_add(u32::try_from(number).ok()?)?.to_be_bytes();
        Some(nonce)
    }
}

/// Chunks of the tensors of a file.
#[derive(Debug)]
pub struct CryptoTensorsChunks {
    units: Units,
    /// Ciphers of the tensors with bytes, or `None` for one that is not encrypted.
    ciphers: Vec<Option<TensorCipher>>,
}

impl CryptoTensorsChunks {
    /// Returns the chunks of tensors at these ranges of the file, in ascending order, with the cipher of each, which is for
    /// as many bytes. `None` is for a tensor that is not encrypted.
    pub(super) fn new(tensors: Vec<(Range<u64>, Option<TensorCipher>)>) -> CryptoTensorsChunks {
        let (places, ciphers): (Vec<_>, Vec<_>) = tensors
            .into_iter()
            .filter(|(range, _)| !range.is_empty())
            .map(|(range, cipher)| ((range, cipher.as_ref().map_or(CHUNK_BYTES, |of| of.chunk_bytes)), cipher))
            .unzip();
        CryptoTensorsChunks { units: Units::new(places.into_iter(), CHUNK_BYTES_MAX), ciphers }
    }
}

impl Chunks for CryptoTensorsChunks {
    fn units(&self) -> &Units {
        &self.units
    }

    fn decrypt(&self, chunk: &Unit, data: &mut [u8]) -> Result<()> {
        let Some(of_tensor) = self.ciphers.get(chunk.tensor).ok_or_else(|| no_tag(chunk, data))? else { return Ok(()) };
        let _span = profile::span(Stage::Cipher).bytes(data.len());
        let nonce_and_tag = of_tensor.nonce(chunk.index).zip(tag_of(&of_tensor.tags, chunk.index));
        let (nonce, tag) = nonce_and_tag.filter(|_| chunk.fits(data)).ok_or_else(|| no_tag(chunk, data))?;
        let is_authentic = of_tensor.cipher.decrypt(nonce, &[], data, tag);
        if is_authentic { Ok(()) } else { Err(changed(chunk, chunk.index)) }
    }

    fn plain(&self) -> Option<u64> {
        let plain = self.ciphers.iter().position(Option::is_none)?;
        self.units.tensor(plain).map(|range| range.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encryption::cipher::Cipher;

    #[test]
    fn each_chunk_of_a_tensor_has_a_nonce_and_a_code() {
        let fits = |counter: u32, tags: usize, chunk_bytes, tensor_bytes| {
            let mut nonce = NonceBytes::default();
            nonce[8..].copy_from_slice(&counter.to_be_bytes());
            let cipher = Cipher::Aes256Gcm.keyed(&[0; 32]).unwrap();
            TensorCipher::new(cipher, nonce, vec![0; tags], chunk_bytes, tensor_bytes).is_some()
        };
        assert!(
            fits(0, 48, 100, 300) && fits(0, 48, 100, 201) && fits(u32::MAX, 16, 100, 100) && fits(u32::MAX, 0, 1, 0)
        );
        assert!(!fits(0, 48, 100, 301) && !fits(0, 48, 100, 200) && !fits(0, 47, 100, 300));
        assert!(fits(u32::MAX - 2, 48, 100, 300) && !fits(u32::MAX - 1, 48, 100, 300));
        assert!(
            !fits(0, 48, 0, 300) && !fits(0, 0, 0, 0) && !fits(0, 16, 1, u64::MAX) && fits(0, 16, u64::MAX, u64::MAX)
        );
    }
}
