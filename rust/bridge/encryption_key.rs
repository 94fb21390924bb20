//! Keys of encrypted safetensors files.

use super::guard::{guard, guard_with_log};
use crate::encryption::{key, keyring};
use crate::error::Result;
use crate::save::file_kernel::Linux;
use crate::save::rotate::rotate;
use crate::source::files::check_local;
use std::path::Path;
use std::time::Duration;

/// Key of a user.
pub(super) struct EncryptionKey(key::EncryptionKey);

/// Copies a key.
pub(super) fn encryption_key(bytes: &[u8], label: &str) -> Result<Box<EncryptionKey>> {
    guard(|| Ok(Box::new(EncryptionKey(key::EncryptionKey::from_bytes(bytes)?.with_label(label)?))))
}

/// Reads a key from a file.
pub(super) fn key_of_file(path: &str, label: &str) -> Result<Box<EncryptionKey>> {
    guard(|| {
        let path = check_local(Path::new(path))?;
        Ok(Box::new(EncryptionKey(key::EncryptionKey::from_file(&path)?.with_label(label)?)))
    })
}

/// Copies a passphrase.
pub(super) fn key_of_passphrase(
    text: &[u8],
    passes: u64,
    memory_bytes: u64,
    label: &str,
) -> Result<Box<EncryptionKey>> {
    guard(|| {
        let key = key::EncryptionKey::from_passphrase(text, passes, memory_bytes)?;
        Ok(Box::new(EncryptionKey(key.with_label(label)?)))
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
    /// Makes loads without a key, and saves that name its label, use this one.
    pub(super) fn register_key(&self) {
        keyring::register(&self.0);
    }

    pub(super) fn unregister_key(&self) {
        keyring::unregister(&self.0);
    }

    pub(super) fn key(&self) -> &key::EncryptionKey {
        &self.0
    }
}
