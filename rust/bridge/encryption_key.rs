//! Keys of encrypted safetensors files.

use super::guard::{guard, guard_with_log};
use crate::encryption::secret::{Derivation, KEY_BYTES, SALT_BYTES};
use crate::encryption::{key, keyring};
use crate::error::{Error, Kind, Result};
use crate::save::file_kernel::Linux;
use crate::save::rotate::rotate;
use crate::source::files::check_local;
use std::path::Path;
use std::time::Duration;

/// Key of a user.
pub(super) struct EncryptionKey(key::EncryptionKey);

/// Copies a key, or a passphrase, whose limits for new files are the passes and the memory in bytes. With a salt, too, the
/// secret is the key that was derived with them.
pub(super) fn encryption_key(secret: &[u8], label: &str, limits: &[i64], salt: &[u8]) -> Result<Box<EncryptionKey>> {
    guard(|| {
        let key = match (limits, salt) {
            ([], []) => key::EncryptionKey::from_bytes(secret)?,
            (_, []) => {
                let (passes, memory_bytes) = decode_limits(limits)?;
                key::EncryptionKey::from_passphrase(secret, passes, memory_bytes)?
            }
            _ => key::EncryptionKey::derived(secret, derivation(limits, salt)?)?,
        };
        Ok(Box::new(EncryptionKey(key.with_label(label)?)))
    })
}

/// Derives a key from a string into `key`.
pub(super) fn derive_key(string: &[u8], limits: &[i64], salt: &[u8], key: &mut [u8]) -> Result<()> {
    guard(|| {
        let derivation = derivation(limits, salt)?;
        let bytes = key.len();
        let key = <&mut [u8; KEY_BYTES]>::try_from(key).map_err(|_| {
            let message = format!("the key has {bytes} bytes, but must have {KEY_BYTES}");
            Error::new(Kind::InvalidArgument, message)
        })?;
        key.copy_from_slice(derivation.key(string)?.secret());
        Ok(())
    })
}

fn derivation(limits: &[i64], salt: &[u8]) -> Result<Derivation> {
    let (opslimit, memlimit) = decode_limits(limits)?;
    let salt = salt.try_into().map_err(|_| {
        let message = format!("the salt has {} bytes, but must have {SALT_BYTES}", salt.len());
        Error::new(Kind::InvalidArgument, message)
    })?;
    let derivation = Derivation { opslimit, memlimit, salt };
    derivation.check()?;
    Ok(derivation)
}

fn decode_limits(limits: &[i64]) -> Result<(u64, u64)> {
    let invalid = || Error::new(Kind::InvalidArgument, "the limits of a derivation are its passes and its memory");
    let &[passes, memory_bytes] = limits else { return Err(invalid()) };
    Ok((passes.cast_unsigned(), memory_bytes.cast_unsigned()))
}

/// Reads a key from a file.
pub(super) fn key_of_file(path: &str, label: &str) -> Result<Box<EncryptionKey>> {
    guard(|| {
        let path = check_local(Path::new(path))?;
        Ok(Box::new(EncryptionKey(key::EncryptionKey::from_file(&path)?.with_label(label)?)))
    })
}

/// Returns the key for the files of one save.
pub(super) fn key_for_save(key: &EncryptionKey) -> Result<Box<EncryptionKey>> {
    guard(|| Ok(Box::new(EncryptionKey(key.0.for_save()?))))
}

/// Makes the files that a path leads to open with another key.
pub(super) fn rotate_key(path: &str, old_key: &EncryptionKey, new_key: &EncryptionKey, limit_ms: i64) -> Result<bool> {
    let limit = u64::try_from(limit_ms).ok().map(Duration::from_millis);
    guard_with_log(|| rotate(&[path], old_key.key(), new_key.key(), &Linux, limit))
}

impl EncryptionKey {
    /// Makes loads without a key, and saves that name its label, use this one, or ends that.
    pub(super) fn set_registered(&self, is_registered: bool) {
        if is_registered {
            keyring::register(&self.0);
        } else {
            keyring::unregister(&self.0);
        }
    }

    pub(super) fn key(&self) -> &key::EncryptionKey {
        &self.0
    }
}
