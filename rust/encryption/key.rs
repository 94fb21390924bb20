//! Keys of users, which wrap the keys of files.

use super::fill_random;
use super::secret::{Derivation, KEY_BYTES, Key, SALT_BYTES, check_limits, copied};
use super::wipe::with_wiped_stack;
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::os::local_file::open_regular;
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use crate::os::sigint::{POLL_INTERVAL, Watch};
use std::collections::VecDeque;
use std::fmt;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use zeroize::Zeroizing;

/// Size of a label in bytes.
pub const LABEL_BYTES: usize = 64;
/// Passes of Argon2id for new keys from passphrases.
pub const PASSES: u64 = 3;
/// Memory of Argon2id for new keys from passphrases, in bytes.
pub const MEMORY_BYTES: u64 = 256 << 20;

/// Number of bytes of a key file that are read: more than one with a key has.
const FILE_BYTES_MAX: usize = 4 << 10;
/// Upper bound for a passphrase in a file, in bytes.
pub const PASSPHRASE_BYTES_MAX: usize = 1024;
/// Line end that may follow a passphrase, besides a single line feed.
const LINE_END: &[u8] = b"\r\n";
/// Largest number of keys that are kept of one passphrase.
const DERIVED_MAX: usize = 64;

/// Key of a user.
#[derive(Clone)]
pub struct EncryptionKey {
    secret: Secret,
    label: String,
}

#[derive(Clone)]
enum Secret {
    /// With its derivation, if it was derived from a string.
    Key(Key, Option<Derivation>),
    /// With the key of the files of one save, and its derivation.
    Passphrase(Arc<Passphrase>, Option<(Derivation, Key)>),
}

struct Passphrase {
    text: Zeroizing<Vec<u8>>,
    passes: u64,
    memory_bytes: u64,
    /// Keys that were derived last, for the files that name their derivation.
    derived: PerProcess<Mutex<VecDeque<(Derivation, Key)>>>,
}

impl EncryptionKey {
    /// Copies a key. Fails with `invalid-argument` if it has another size than [`KEY_BYTES`].
    pub fn from_bytes(bytes: &[u8]) -> Result<EncryptionKey> {
        Ok(EncryptionKey::of(Secret::Key(Key::new(bytes)?, None)))
    }

    /// Copies a key that was derived from a string. New files name the derivation. Fails as
    /// [`from_bytes`](EncryptionKey::from_bytes).
    pub fn derived(bytes: &[u8], derivation: Derivation) -> Result<EncryptionKey> {
        Ok(EncryptionKey::of(Secret::Key(Key::new(bytes)?, Some(derivation))))
    }

    /// Reads a key from a local file: its bytes, or as many hexadecimal numbers and white space. Fails with
    /// `invalid-argument` if the file has something else; `io` and others if it cannot be read.
    pub fn from_file(path: &Path) -> Result<EncryptionKey> {
        let content = read_secret(path, FILE_BYTES_MAX, "cannot read the key")?;
        let bytes = if content.len() == KEY_BYTES { Some(content) } else { with_wiped_stack(|| parse_hex(&content)) };
        let invalid = || {
            let message = format!("a key has {KEY_BYTES} bytes, or as many hexadecimal numbers");
            Error::new(Kind::InvalidArgument, message).at(path)
        };
        EncryptionKey::from_bytes(&bytes.ok_or_else(invalid)?)
    }

    /// Reads a passphrase from a local file, of up to [`PASSPHRASE_BYTES_MAX`] bytes and a line end. New files have the
    /// limits [`PASSES`] and [`MEMORY_BYTES`]. Fails with `invalid-argument` if the passphrase is empty or too long;
    /// `io` and others if the file cannot be read.
    pub fn from_passphrase_file(path: &Path) -> Result<EncryptionKey> {
        let bytes_max = PASSPHRASE_BYTES_MAX + LINE_END.len();
        let content = read_secret(path, bytes_max + 1, "cannot read the passphrase")?;
        let line = content.strip_suffix(b"\n").unwrap_or(&content);
        let text = content.strip_suffix(LINE_END).unwrap_or(line);
        if text.len() > PASSPHRASE_BYTES_MAX {
            let message = format!("a passphrase in a file has at most {PASSPHRASE_BYTES_MAX} bytes");
            return Err(Error::new(Kind::InvalidArgument, message).at(path));
        }
        EncryptionKey::from_passphrase(text, PASSES, MEMORY_BYTES).map_err(|error| error.at(path))
    }

    /// Returns random bytes for [`from_bytes`](EncryptionKey::from_bytes).
    pub fn random() -> Result<Zeroizing<Vec<u8>>> {
        let mut bytes = Zeroizing::new(vec![0; KEY_BYTES]);
        fill_random(&mut bytes)?;
        Ok(bytes)
    }

    /// Returns the key of a passphrase, which is derived when it is first used. The limits, such as [`PASSES`] and
    /// [`MEMORY_BYTES`], are for new files. Fails with `invalid-argument` for an empty passphrase, or limits that
    /// readers refuse.
    pub fn from_passphrase(text: &[u8], passes: u64, memory_bytes: u64) -> Result<EncryptionKey> {
        if text.is_empty() {
            return Err(Error::new(Kind::InvalidArgument, "the passphrase is empty"));
        }
        check_limits(passes, memory_bytes).map_err(|message| Error::new(Kind::InvalidArgument, message))?;
        let passphrase = Passphrase { text: copied(text), passes, memory_bytes, derived: PerProcess::settings() };
        Ok(EncryptionKey::of(Secret::Passphrase(Arc::new(passphrase), None)))
    }

    fn of(secret: Secret) -> EncryptionKey {
        EncryptionKey { secret, label: String::new() }
    }

    /// Returns the key with a label, which new files show to everybody. Fails with `invalid-argument` if it is longer
    /// than [`LABEL_BYTES`] or contains a NUL.
    pub fn with_label(self, label: &str) -> Result<EncryptionKey> {
        if label.len() > LABEL_BYTES || label.contains('\0') {
            let message = format!("the label of a key has at most {LABEL_BYTES} bytes, and no NUL");
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        Ok(EncryptionKey { label: label.to_owned(), ..self })
    }

    /// Returns the label.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Returns the key for the files of one save, which share one salt if the key is from a passphrase: deriving takes
    /// longer than writing a small file.
    pub fn for_save(&self) -> Result<EncryptionKey> {
        let secret = match &self.secret {
            Secret::Key(..) => self.secret.clone(),
            Secret::Passphrase(passphrase, _) => {
                Secret::Passphrase(Arc::clone(passphrase), Some(passphrase.new_key()?))
            }
        };
        Ok(EncryptionKey { secret, label: self.label.clone() })
    }

    /// Returns the secret key for a new file, and its derivation from a passphrase. It has a new salt, unless the key is
    /// one [`for_save`](EncryptionKey::for_save).
    pub(crate) fn for_new_file(&self) -> Result<(Option<Derivation>, Key)> {
        let (derivation, key) = match &self.secret {
            Secret::Key(key, derivation) => return Ok((*derivation, key.clone())),
            Secret::Passphrase(_, Some(of_save)) => of_save.clone(),
            Secret::Passphrase(passphrase, None) => passphrase.new_key()?,
        };
        Ok((Some(derivation), key))
    }

    /// Returns the secret key of a slot with this derivation, or `None` if the slot is for another sort of key.
    pub(super) fn for_slot(&self, derivation: Option<Derivation>) -> Result<Option<Key>> {
        if self.is_passphrase() == derivation.is_some() { self.for_tensors(derivation) } else { Ok(None) }
    }

    /// Returns the secret key of a `.tensors` file, which was derived from a passphrase if `derivation` is there. `None` if
    /// it was not, and this is a passphrase. The file does not say whether a key that is given is its own.
    pub fn for_tensors(&self, derivation: Option<Derivation>) -> Result<Option<Key>> {
        match (&self.secret, derivation) {
            (Secret::Key(key, _), _) => Ok(Some(key.clone())),
            (Secret::Passphrase(passphrase, _), Some(derivation)) => passphrase.key(derivation).map(Some),
            (Secret::Passphrase(..), None) => Ok(None),
        }
    }

    /// Returns whether both keys open the same files.
    pub(super) fn is_same(&self, other: &EncryptionKey) -> bool {
        match (&self.secret, &other.secret) {
            (Secret::Key(key, _), Secret::Key(other, _)) => is_equal(key.secret(), other.secret()),
            (Secret::Passphrase(passphrase, _), Secret::Passphrase(other, _)) => {
                is_equal(&passphrase.text, &other.text)
            }
            _ => false,
        }
    }

    pub(super) fn is_passphrase(&self) -> bool {
        matches!(self.secret, Secret::Passphrase(..))
    }
}

/// Reads the first bytes of a file without copies of them elsewhere in memory.
fn read_secret(path: &Path, bytes_max: usize, doing: &'static str) -> Result<Zeroizing<Vec<u8>>> {
    let (file, _) = open_regular(path)?;
    let mut content = Zeroizing::new(Vec::with_capacity(bytes_max));
    let read = file.take(to_u64(bytes_max)).read_to_end(&mut content);
    read.map(|_| content).map_err(|error| Error::from_io(error, path, doing))
}

/// Compares secrets in a time that does not depend on where they differ.
fn is_equal(first: &[u8], second: &[u8]) -> bool {
    let is_equal = || first.iter().zip(second).fold(0, |bits, (a, b)| bits | (a ^ b)) == 0;
    first.len() == second.len() && with_wiped_stack(is_equal)
}

/// Returns the bytes of a key in hexadecimal numbers with white space around them.
fn parse_hex(text: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let digit = |&byte: &u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let text = text.trim_ascii();
    // Collecting would grow the vector, and leave copies of its beginning in memory.
    let mut key = Zeroizing::new(vec![0; KEY_BYTES]);
    for (byte, pair) in key.iter_mut().zip(text.chunks(2)) {
        let [high, low] = pair else { return None };
        *byte = digit(high)? << 4 | digit(low)?;
    }
    (text.len() == 2 * KEY_BYTES).then_some(key)
}

impl Passphrase {
    /// Derives a key with a new salt and the limits of new files. No file that was read has an influence on it.
    fn new_key(&self) -> Result<(Derivation, Key)> {
        let mut salt = [0; SALT_BYTES];
        fill_random(&mut salt)?;
        let derivation = Derivation { opslimit: self.passes, memlimit: self.memory_bytes, salt };
        Ok((derivation, self.key(derivation)?))
    }

    /// Derives a key, or returns the one that was derived before. Threads wait for the one that derives, whose key may be
    /// theirs.
    fn key(&self, derivation: Derivation) -> Result<Key> {
        let watch = Watch::begin();
        let derived = self.derived.get();
        let mut derived = loop {
            if let Some(derived) = derived.try_lock() {
                break derived;
            }
            thread::sleep(POLL_INTERVAL);
            watch.check()?;
        };
        if let Some((_, key)) = derived.iter().find(|(known, _)| *known == derivation) {
            return Ok(key.clone());
        }
        let key = derivation.key(&self.text)?;
        derived.truncate(DERIVED_MAX - 1);
        derived.push_front((derivation, key.clone()));
        Ok(key)
    }
}

impl fmt::Debug for EncryptionKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "EncryptionKey({:?}, hidden)", self.label)
    }
}
