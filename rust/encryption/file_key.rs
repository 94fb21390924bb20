//! Key of one file, from which the keys of its data and of its header follow.

use super::cipher::{Cipher, KeyedCipher};
use super::fill_random;
use super::secret::{KEY_BYTES, Key};
use super::wipe::with_wiped_stack;
use crate::error::{Error, Kind, Result};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use ring::hmac::{self, HMAC_SHA256};
use std::fmt;

/// Size of the code of a header in bytes.
pub const CODE_BYTES: usize = 32;

/// Begin of all texts for which keys are derived.
const CONTEXT: &str = "fst.encryption 1";

/// Key of one file.
pub struct FileKey(Key);

impl FileKey {
    /// Returns a new random key.
    pub fn random() -> Result<FileKey> {
        Key::with(|key| fill_random(key)).map(FileKey)
    }

    pub(super) fn new(key: Key) -> FileKey {
        FileKey(key)
    }

    pub(super) fn secret(&self) -> &[u8; KEY_BYTES] {
        self.0.secret()
    }

    pub(super) fn data_cipher(&self, cipher: Cipher) -> Result<KeyedCipher> {
        with_wiped_stack(|| {
            cipher.keyed(expand_key(&extract(&[], self.secret()), &format!("data {}", cipher.name()))?.secret())
        })
    }

    /// Returns the code of a header.
    pub fn header_code(&self, header: &[u8]) -> Result<[u8; CODE_BYTES]> {
        let code = with_wiped_stack(|| self.header_key().map(|key| hmac::sign(&key, header)))?;
        code.as_ref().try_into().map_err(|_| underivable())
    }

    /// Returns whether a header has this code, in a time that does not depend on the code.
    pub fn has_code(&self, header: &[u8], code: &[u8; CODE_BYTES]) -> Result<bool> {
        with_wiped_stack(|| Ok(hmac::verify(&self.header_key()?, header, code).is_ok()))
    }

    fn header_key(&self) -> Result<hmac::Key> {
        let key = expand_key(&extract(&[], self.secret()), "header")?;
        Ok(hmac::Key::new(HMAC_SHA256, key.secret()))
    }
}

impl fmt::Debug for FileKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("FileKey(hidden)")
    }
}

/// Length of a derived key.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

pub(super) fn extract(salt: &[u8], key: &[u8]) -> Prk {
    Salt::new(HKDF_SHA256, salt).extract(key)
}

pub(super) fn expand_key(prk: &Prk, used_for: &str) -> Result<Key> {
    Key::with(|key| expand(prk, used_for, key))
}

pub(super) fn expand(prk: &Prk, used_for: &str, into: &mut [u8]) -> Result<()> {
    let info = format!("{CONTEXT} {used_for}");
    let info = [info.as_bytes()];
    prk.expand(&info, Length(into.len())).and_then(|derived| derived.fill(into)).map_err(|_| underivable())
}

fn underivable() -> Error {
    Error::new(Kind::Internal, "no key can be derived")
}
