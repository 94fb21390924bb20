//! Keys of the process: keys that the program has registered, and keys of the environment. Loads without a key of their
//! own try all of them, and saves find one by its label. So operators, which take no keys, read and write encrypted files.

use super::key::EncryptionKey;
use super::key::LABEL_BYTES;
use crate::error::{Error, Kind, Result};
use crate::options;
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;

static KEYS: PerProcess<Mutex<Vec<EncryptionKey>>> = PerProcess::settings();

/// Passphrase of the environment that was read last, which has the keys that were derived of it.
static PASSPHRASE: PerProcess<Mutex<Option<EncryptionKey>>> = PerProcess::new(Mutex::default);

/// Registers a key for the loads and saves of this process. A key that is registered already, with this label, stays so.
pub fn register(key: &EncryptionKey) {
    let mut keys = KEYS.get().lock();
    if !keys.iter().any(|known| known.is_same(key) && known.label() == key.label()) {
        keys.push(key.clone());
    }
}

/// Removes a key, with all of its labels, unless it is not registered. Files that are open stay so.
pub fn unregister(key: &EncryptionKey) {
    KEYS.get().lock().retain(|known| !known.is_same(key));
}

/// Returns all keys. Fails with the errors of [`EncryptionKey::from_file`] for the file that `FST_ENCRYPTION_KEY_FILE`
/// names, and of [`EncryptionKey::from_passphrase_file`] for the file of `FST_ENCRYPTION_PASSPHRASE_FILE`.
pub fn keys() -> Result<Vec<EncryptionKey>> {
    let mut keys = KEYS.get().lock().clone();
    if let Some(path) = options::path_from_env("FST_ENCRYPTION_KEY_FILE") {
        keys.push(EncryptionKey::from_file(&path)?);
    }
    if let Some(path) = options::path_from_env("FST_ENCRYPTION_PASSPHRASE_FILE") {
        let read = EncryptionKey::from_passphrase_file(&path)?;
        let mut known = PASSPHRASE.get().lock();
        if !known.as_ref().is_some_and(|known| known.is_same(&read)) {
            *known = Some(read);
        }
        keys.extend(known.clone());
    }
    Ok(keys)
}

/// Returns the key with this label, for a new file. Fails with `invalid-argument` if no key or several have the label.
pub fn key_with_label(label: &str) -> Result<EncryptionKey> {
    let refused = |message: String| Error::new(Kind::InvalidArgument, message);
    if label.len() > LABEL_BYTES {
        let message = format!(
            "the encryption of a new file is requested with the label of a key, of at most {LABEL_BYTES} bytes"
        );
        return Err(refused(message));
    }
    let mut found = keys()?.into_iter().filter(|key| key.label() == label);
    let missing = || {
        refused(format!(
            "no key with the label {label:?} is registered, to encrypt the file with; register it with \
             EncryptionKey.register. FST_ENCRYPTION_KEY_FILE names a key without a label"
        ))
    };
    let key = found.next().ok_or_else(missing)?;
    if found.any(|other| !other.is_same(&key)) {
        return Err(refused(format!("several keys with the label {label:?} are registered; give each another label")));
    }
    Ok(key)
}
