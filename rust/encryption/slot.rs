//! Slots of a header, which have the key of the file, encrypted with the keys of users.

use super::cipher::{Cipher, KeyedCipher, TAG_BYTES};
use super::file_key::{FileKey, expand, expand_key, extract};
use super::fill_random;
use super::key::{EncryptionKey, LABEL_BYTES};
use super::secret::{Derivation, KEY_BYTES, Key, SALT_BYTES, check_limits};
use super::wipe::with_wiped_stack;
use crate::error::{Error, Kind, Result};

/// Size of a slot in bytes.
pub const SLOT_BYTES: usize = 192;
/// Number of slots in a header.
pub const SLOTS: usize = 2;

/// Encoded slot. An empty one has zeros.
pub type Slot = [u8; SLOT_BYTES];

const ID_BYTES: usize = 16;
const WRAP_SALT_BYTES: usize = 32;
/// Size of the part of a slot that is not encrypted, in bytes.
const CLEAR_BYTES: usize = SLOT_BYTES - KEY_BYTES - TAG_BYTES;

/// First bytes of slots.
const DIRECT: u8 = 1;
const DERIVED: u8 = 2;

/// Fields of a slot that are not secret.
struct Fields {
    derivation: Option<Derivation>,
    label: String,
    id: [u8; ID_BYTES],
    wrap_salt: [u8; WRAP_SALT_BYTES],
}

/// Encrypts the key of a file for the owners of a user key.
pub fn wrap(file_key: &FileKey, key: &EncryptionKey, cipher: Cipher) -> Result<Slot> {
    let (derivation, user_key) = key.for_new_file()?;
    let mut wrap_salt = [0; WRAP_SALT_BYTES];
    fill_random(&mut wrap_salt)?;
    with_wiped_stack(|| {
        let fields = Fields { derivation, label: key.label().to_owned(), id: id_of(&user_key)?, wrap_salt };
        let mut slot = fields.encode();
        let (clear, rest) = slot.split_at_mut(CLEAR_BYTES);
        let (encrypted, tag) = rest.split_at_mut(KEY_BYTES);
        encrypted.copy_from_slice(file_key.secret());
        tag.copy_from_slice(&wrapping(&user_key, &wrap_salt, cipher)?.encrypt(0, clear, encrypted)?);
        Ok(slot)
    })
}

/// Returns the cipher that wraps keys of files.
fn wrapping(user_key: &Key, wrap_salt: &[u8], cipher: Cipher) -> Result<KeyedCipher> {
    cipher.keyed(expand_key(&extract(wrap_salt, user_key.secret()), "wrap")?.secret())
}

/// Decrypts the key of a file with the first user key that opens a slot. Also returns the index of the slot.
///
/// A rotation that was interrupted leaves a slot that is not valid. It does not matter if another one opens. Fails with
/// `malformed` for an invalid slot, `integrity` if no slot is for a key or its slot was changed, `invalid-argument`
/// without keys.
pub fn unwrap(slots: &[Slot], keys: &[EncryptionKey], cipher: Cipher) -> Result<(FileKey, usize)> {
    let (mut others, mut failure) = (Vec::new(), None);
    for (index, slot) in slots.iter().enumerate() {
        let fields = match Fields::parse(slot) {
            Ok(Some(fields)) => fields,
            Ok(None) => continue,
            Err(what) => {
                failure.get_or_insert(malformed(index, &what));
                continue;
            }
        };
        let Some(user_key) = key_of(&fields, keys)? else {
            others.push(fields);
            continue;
        };
        let (clear, rest) = slot.split_at(CLEAR_BYTES);
        let (encrypted, tag) = rest.split_at(KEY_BYTES);
        let changed = || Error::new(Kind::Integrity, format!("key slot {index} was changed"));
        let tag = tag.try_into().map_err(|_| changed())?;
        let wrapping = with_wiped_stack(|| wrapping(&user_key, &fields.wrap_salt, cipher))?;
        let mut is_authentic = false;
        let file_key = Key::with(|key| {
            key.copy_from_slice(encrypted);
            is_authentic = wrapping.decrypt(0, clear, key, tag);
            Ok(())
        })?;
        if !is_authentic {
            failure.get_or_insert(changed());
            continue;
        }
        return Ok((FileKey::new(file_key), index));
    }
    Err(failure.unwrap_or_else(|| match keys {
        [] => Error::new(Kind::InvalidArgument, no_key(&others)),
        _ => Error::new(Kind::Integrity, other_key(&others, keys)),
    }))
}

/// Returns the secret of the key that a slot is for, if it is among these.
fn key_of(fields: &Fields, keys: &[EncryptionKey]) -> Result<Option<Key>> {
    for key in keys {
        if let Some(user_key) = key.for_slot(fields.derivation)?
            && id_of(&user_key)? == fields.id
        {
            return Ok(Some(user_key));
        }
    }
    Ok(None)
}

impl Fields {
    fn encode(&self) -> Slot {
        let mut bytes = Vec::with_capacity(SLOT_BYTES);
        bytes.extend([if self.derivation.is_some() { DERIVED } else { DIRECT }, 0, 0, 0]);
        let derivation = self.derivation.unwrap_or(Derivation { opslimit: 0, memlimit: 0, salt: [0; SALT_BYTES] });
        bytes.extend(u32::try_from(derivation.opslimit).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(derivation.memlimit.to_le_bytes());
        bytes.extend(derivation.salt);
        let end = bytes.len() + LABEL_BYTES;
        bytes.extend(self.label.as_bytes());
        bytes.resize(end, 0);
        bytes.extend(self.id);
        bytes.extend(self.wrap_salt);
        let mut slot = [0; SLOT_BYTES];
        for (target, byte) in slot.iter_mut().zip(bytes) {
            *target = byte;
        }
        slot
    }

    /// Parses a slot. Returns `None` for an empty one, and the message of an error for an invalid one.
    fn parse(slot: &Slot) -> std::result::Result<Option<Fields>, String> {
        if slot.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        let mut rest = slot.as_slice();
        let kind = take::<4>(&mut rest)?;
        let passes = u64::from(u32::from_le_bytes(take(&mut rest)?));
        let memory_bytes = u64::from_le_bytes(take(&mut rest)?);
        let salt = take::<SALT_BYTES>(&mut rest)?;
        let derivation = match kind {
            [DIRECT, 0, 0, 0] if (passes, memory_bytes, salt) == (0, 0, [0; SALT_BYTES]) => None,
            [DERIVED, 0, 0, 0] => {
                check_limits(passes, memory_bytes)?;
                Some(Derivation { opslimit: passes, memlimit: memory_bytes, salt })
            }
            _ => return Err("unknown sort of key".to_owned()),
        };
        let label = take::<LABEL_BYTES>(&mut rest)?;
        let end = label.iter().position(|&byte| byte == 0).unwrap_or(LABEL_BYTES);
        let (label, padding) = label.split_at(end);
        let label = std::str::from_utf8(label).map_err(|_| "the label is not UTF-8")?.to_owned();
        if padding.iter().any(|&byte| byte != 0) {
            return Err("bytes follow the label".to_owned());
        }
        Ok(Some(Fields { derivation, label, id: take(&mut rest)?, wrap_salt: take(&mut rest)? }))
    }
}

fn take<const BYTES: usize>(rest: &mut &[u8]) -> std::result::Result<[u8; BYTES], String> {
    let (taken, left) = rest.split_first_chunk::<BYTES>().ok_or("the slot is cut off")?;
    *rest = left;
    Ok(*taken)
}

fn id_of(key: &Key) -> Result<[u8; ID_BYTES]> {
    let mut id = [0; ID_BYTES];
    with_wiped_stack(|| expand(&extract(&[], key.secret()), "id", &mut id))?;
    Ok(id)
}

fn malformed(index: usize, what: &str) -> Error {
    Error::new(Kind::Malformed, format!("key slot {index} is not valid: {what}"))
}

/// Error of a load without keys.
pub const NO_KEY: &str = "the file is encrypted; give its key as encryption_key, register it with EncryptionKey.register, \
                          or name its file in FST_ENCRYPTION_KEY_FILE or FST_ENCRYPTION_PASSPHRASE_FILE";

/// Returns the error of a load without keys, with those that would open the file.
fn no_key(slots: &[Fields]) -> String {
    format!("{NO_KEY}{}", if slots.is_empty() { String::new() } else { format!(": key {}", described(slots)) })
}

/// Returns why no slot was opened.
fn other_key(others: &[Fields], keys: &[EncryptionKey]) -> String {
    if others.is_empty() {
        return "the file has no key slot".to_owned();
    }
    let are_derived = others.iter().all(|fields| fields.derivation.is_some());
    let are_direct = others.iter().all(|fields| fields.derivation.is_none());
    let hint = if are_direct && keys.iter().all(EncryptionKey::is_passphrase) {
        "; the file has no key of a passphrase"
    } else if are_derived && !keys.iter().any(EncryptionKey::is_passphrase) {
        "; the file has a key of a passphrase"
    } else {
        ""
    };
    let ids = described(others);
    format!("the file was encrypted with another key, or its key slots were changed: key {ids}{hint}")
}

fn described(slots: &[Fields]) -> String {
    let described = |fields: &Fields| {
        let id: String = fields.id.iter().map(|byte| format!("{byte:02x}")).collect();
        match fields.label.as_str() {
            "" => format!("{id} without a label"),
            label => format!("{id} with the label {label:?}"),
        }
    };
    slots.iter().map(described).collect::<Vec<_>>().join(" or ")
}
