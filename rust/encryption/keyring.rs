//! Keys for encrypted files that a load opens without a key of its own: those that the program has registered, and the one
//! of the environment. Loads by operators, which take no keys, find theirs here.

use super::key::EncryptionKey;
use crate::error::Result;
use crate::options;
use crate::os::per_process::PerProcess;
use std::sync::{Mutex, MutexGuard, PoisonError};

static KEYS: PerProcess<Mutex<Vec<EncryptionKey>>> = PerProcess::settings();

fn lock() -> MutexGuard<'static, Vec<EncryptionKey>> {
    KEYS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a key for the loads of this process. A key that is registered already stays so.
pub fn register(key: &EncryptionKey) {
    let mut keys = lock();
    if !keys.iter().any(|known| known.is_same(key)) {
        keys.push(key.clone());
    }
}

/// Removes a key, unless it is not registered. Files that are open stay so.
pub fn unregister(key: &EncryptionKey) {
    lock().retain(|known| !known.is_same(key));
}

/// Returns all keys.
///
/// # Errors
/// Those of [`EncryptionKey::from_file`] for the file that `FST_ENCRYPTION_KEY_FILE` names.
pub fn keys() -> Result<Vec<EncryptionKey>> {
    let mut keys = lock().clone();
    if let Some(path) = options::encryption_key_file_from_env() {
        keys.push(EncryptionKey::from_file(&path)?);
    }
    Ok(keys)
}
