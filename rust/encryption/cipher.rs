//! Ciphers with associated data.

use super::secret::KEY_BYTES;
use super::wipe::{Wiped, with_wiped_stack};
use crate::error::{Error, Kind, Result};
use ring::aead::{self, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use std::fmt;
use std::sync::Arc;

/// Size of an authentication code in bytes.
pub const TAG_BYTES: usize = 16;

/// Authentication code.
pub type Tag = [u8; TAG_BYTES];

/// Cipher of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-256-GCM.
    Aes256Gcm,
    /// ChaCha20-Poly1305, which is faster on CPUs without AES instructions.
    ChaCha20Poly1305,
}

#[derive(Clone)]
pub(super) struct KeyedCipher(Arc<Wiped<LessSafeKey>>);

impl Cipher {
    /// All ciphers.
    pub const ALL: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];

    /// Returns the name in files.
    pub fn name(self) -> &'static str {
        match self {
            Cipher::Aes256Gcm => "aes-256-gcm",
            Cipher::ChaCha20Poly1305 => "chacha20-poly1305",
        }
    }

    /// Returns the cipher with this name.
    pub fn from_name(name: &str) -> Option<Cipher> {
        Cipher::ALL.into_iter().find(|cipher| cipher.name() == name)
    }

    /// Returns the cipher of new files: the one that this CPU has instructions for.
    pub fn preferred() -> Cipher {
        #[cfg(target_arch = "x86_64")]
        let has_aes = std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq");
        #[cfg(target_arch = "aarch64")]
        let has_aes = std::arch::is_aarch64_feature_detected!("aes");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let has_aes = false;
        if has_aes { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 }
    }

    pub(super) fn keyed(self, key: &[u8; KEY_BYTES]) -> Result<KeyedCipher> {
        let algorithm = match self {
            Cipher::Aes256Gcm => &aead::AES_256_GCM,
            Cipher::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
        };
        let refused = |_| Error::new(Kind::Internal, "the cipher refuses its key");
        let expand = || UnboundKey::new(algorithm, key).map(|key| Arc::new(Wiped::new(LessSafeKey::new(key))));
        with_wiped_stack(expand).map(KeyedCipher).map_err(refused)
    }
}

impl KeyedCipher {
    /// Encrypts data in place. `number` is unique for each call with the same key.
    pub(super) fn encrypt(&self, number: u64, associated: &[u8], data: &mut [u8]) -> Result<Tag> {
        let failed = || Error::new(Kind::Internal, "the cipher failed");
        let seal = || self.0.seal_in_place_separate_tag(nonce(number), Aad::from(associated), data);
        let tag = with_wiped_stack(seal).map_err(|_| failed())?;
        tag.as_ref().try_into().map_err(|_| failed())
    }

    /// Decrypts data in place and returns true. Overwrites data that is not authentic with zeros, and returns false.
    pub(super) fn decrypt(&self, number: u64, associated: &[u8], data: &mut [u8], tag: Tag) -> bool {
        let open =
            || self.0.open_in_place_separate_tag(nonce(number), Aad::from(associated), tag.into(), data, 0..).is_ok();
        let is_authentic = with_wiped_stack(open);
        if !is_authentic {
            data.fill(0);
        }
        is_authentic
    }
}

impl fmt::Debug for KeyedCipher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("KeyedCipher(hidden)")
    }
}

/// Returns a number as a little-endian nonce.
fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    for (target, byte) in nonce.iter_mut().zip(number.to_le_bytes()) {
        *target = byte;
    }
    Nonce::assume_unique_for_key(nonce)
}
