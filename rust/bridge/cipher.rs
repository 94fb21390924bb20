//! Encryption in tensorizer's format.

use super::encryption_key::EncryptionKey;
use super::guard::guard;
use crate::encryption::secret::{Derivation, KEY_BYTES, Key, SALT_BYTES};
use crate::error::{Error, Kind, Result};
use crate::format::tensors::cipher;

/// Cipher with its key.
pub(super) struct Cipher {
    cipher: cipher::Cipher,
}

/// Returns the cipher with a key, which was derived from a string if the salt is not empty.
pub(super) fn new_cipher(key: &[u8], salt: &[u8], opslimit: u64, memlimit: u64) -> Result<Box<Cipher>> {
    guard(|| {
        let derivation = (!salt.is_empty()).then(|| derivation(salt, opslimit, memlimit)).transpose()?;
        Ok(Box::new(Cipher { cipher: cipher::Cipher::new(Key::new(key)?, derivation) }))
    })
}

/// Returns the cipher of a new file with the key of a user.
pub(super) fn cipher_of_key(key: &EncryptionKey) -> Result<Box<Cipher>> {
    guard(|| Ok(Box::new(Cipher { cipher: cipher::Cipher::for_new_file(key.key())? })))
}

/// Derives a key from a string into `key`.
pub(super) fn derive_key(string: &[u8], salt: &[u8], opslimit: u64, memlimit: u64, key: &mut [u8]) -> Result<()> {
    guard(|| {
        let derivation = derivation(salt, opslimit, memlimit)?;
        let bytes = key.len();
        let key = <&mut [u8; KEY_BYTES]>::try_from(key).map_err(|_| {
            let message = format!("the key has {bytes} bytes, but must have {KEY_BYTES}");
            Error::new(Kind::InvalidArgument, message)
        })?;
        key.copy_from_slice(derivation.key(string)?.secret());
        Ok(())
    })
}

impl Cipher {
    pub(super) fn cipher(&self) -> &cipher::Cipher {
        &self.cipher
    }
}

fn derivation(salt: &[u8], opslimit: u64, memlimit: u64) -> Result<Derivation> {
    let salt = salt.try_into().map_err(|_| {
        let message = format!("the salt has {} bytes, but must have {SALT_BYTES}", salt.len());
        Error::new(Kind::InvalidArgument, message)
    })?;
    let derivation = Derivation { opslimit, memlimit, salt };
    derivation.check()?;
    Ok(derivation)
}
