//! Files of CryptoTensors, version 1 and 2: safetensors files whose metadata say how tensors are encrypted. They are only
//! read. `docs/encryption.md` describes the format.
//!
//! ```text
//! "__metadata__": {
//!     "__crypto_keys__": {"version": "2", "chunk_size": 2097152, "enc": {"alg": "aes256gcm", "kid": ...}, "sign": ...}
//!     "__encryption__":  {<tensor>: {"wrapped_key", "key_iv", "key_tag", "base_iv", "tags"}}
//!     "__policy__":      {"local": <Rego>, "remote": <Rego>}
//!     "__signature__":   Ed25519 of the header without this entry and without the spaces at its end
//! }
//! ```
//!
//! Each value is a text, the first three with JSON in it. The associated data of all ciphers is empty, so that only the
//! signature binds names, dtypes, shapes and the keys of tensors to each other. It is therefore always verified, with a
//! public key of the caller.

pub mod chunks;

use super::header::{Entry, Header, LENGTH_BYTES, position_of};
use crate::encryption::cipher::{Cipher, KeyedCipher, NonceBytes, TAG_BYTES, Tag};
use crate::encryption::key::EncryptionKey;
use crate::encryption::secret::{KEY_BYTES, Key};
use crate::error::{Error, Kind, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chunks::{CryptoTensorsChunks, TensorCipher};
use serde::Deserialize;
use std::collections::BTreeMap;

const KEYS_KEY: &str = "__crypto_keys__";
const ENCRYPTION_KEY: &str = "__encryption__";
const POLICY_KEY: &str = "__policy__";
const SIGNATURE_KEY: &str = "__signature__";

/// Size of a chunk of version 2 if the file does not state one, in bytes.
const CHUNK_BYTES: u64 = 2 << 20;
/// Size of a signature in bytes.
const SIGNATURE_BYTES: usize = 64;
/// Rego of a file without a policy.
const NO_POLICY: &str = "package model\nallow = true";
/// Number of characters of a text of the file that an error shows.
const SHOWN_MAX: usize = 64;

/// Value of [`KEYS_KEY`].
#[derive(Deserialize)]
struct KeysText {
    version: String,
    chunk_size: Option<u64>,
    enc: KeyText,
    sign: KeyText,
}

/// Public fields of a key.
#[derive(Deserialize)]
struct KeyText {
    alg: String,
    kid: Option<String>,
}

/// Value of [`POLICY_KEY`].
#[derive(Deserialize)]
struct PolicyText {
    local: String,
    remote: String,
}

/// Encryption of a tensor, in base64. Version 1 has `iv` and `tag`, version 2 the others that may be missing.
#[derive(Deserialize)]
struct TensorText {
    wrapped_key: String,
    key_iv: String,
    key_tag: String,
    iv: Option<String>,
    tag: Option<String>,
    base_iv: Option<String>,
    tags: Option<String>,
}

/// Keys of the metadata without which no file is one of CryptoTensors.
pub(super) const RESERVED_KEYS: [&str; 2] = [KEYS_KEY, ENCRYPTION_KEY];

/// Returns whether a header is that of an encrypted file of CryptoTensors, or claims to be.
pub fn is_encrypted(header: &Header) -> bool {
    header.metadata().is_some_and(|metadata| RESERVED_KEYS.iter().any(|key| metadata.contains_key(*key)))
}

/// Returns the chunks of a file with a valid signature, and removes from the metadata what belongs to the encryption.
/// `json` is the header that was parsed.
///
/// # Errors
/// `malformed` if the header is not what this module describes; `invalid-argument` if the file has a policy or another
/// algorithm, or no key has a public key; `integrity` if no public key has signed the header, or the key is another one.
pub fn open(header: &mut Header, json: &[u8], keys: &[EncryptionKey]) -> Result<CryptoTensorsChunks> {
    let stated: KeysText = parse(header, KEYS_KEY)?;
    if !["1", "2"].contains(&stated.version.as_str()) {
        return Err(malformed(KEYS_KEY, &format!("version {} is unknown", shown(&stated.version))));
    }
    let trusted = signed_with(header, json, &stated, keys)?;
    check_policy(header)?;
    let cipher = cipher_of(&stated)?;
    let mut texts: BTreeMap<String, TensorText> = parse(header, ENCRYPTION_KEY)?;
    if let Some(name) = texts.keys().find(|name| header.find(name).is_none()) {
        return Err(malformed(ENCRYPTION_KEY, "it has a tensor that the file lacks").tensor(name.as_str()));
    }
    if texts.is_empty() {
        return Err(malformed(ENCRYPTION_KEY, "no tensor is encrypted"));
    }
    let wrapping = wrapping_cipher(cipher, &texts, &trusted)?.ok_or_else(|| other_key(&stated))?;
    let tensor = |entry: Entry<'_>| {
        let at = |error: Error| error.tensor(entry.name);
        let text = texts.remove(entry.name);
        let of_tensor = text.map(|text| text.cipher(&stated, cipher, &wrapping, entry.end - entry.begin)).transpose();
        Ok((entry.begin..entry.end, of_tensor.map_err(at)?))
    };
    let chunks = CryptoTensorsChunks::new(header.entries().map(tensor).collect::<Result<_>>()?);
    for key in [KEYS_KEY, ENCRYPTION_KEY, POLICY_KEY, SIGNATURE_KEY] {
        header.remove_metadata(key);
    }
    Ok(chunks)
}

/// Refuses a file with a policy.
fn check_policy(header: &Header) -> Result<()> {
    let policy: PolicyText = parse(header, POLICY_KEY)?;
    if [policy.local, policy.remote].iter().any(|text| text != NO_POLICY) {
        let message = "the file has an access policy of CryptoTensors, which fst does not evaluate; load it with \
                       CryptoTensors";
        return Err(Error::new(Kind::InvalidArgument, message).offset(LENGTH_BYTES));
    }
    Ok(())
}

/// Returns the cipher of the tensors and of their keys.
fn cipher_of(KeysText { enc, .. }: &KeysText) -> Result<Cipher> {
    match enc.alg.replace('-', "").to_ascii_lowercase().as_str() {
        "aes256gcm" => Ok(Cipher::Aes256Gcm),
        "chacha20poly1305" => Ok(Cipher::ChaCha20Poly1305),
        _ => {
            let message = format!(
                "the file is encrypted with {}; of CryptoTensors' algorithms, fst has aes256gcm and chacha20poly1305",
                shown(&enc.alg)
            );
            Err(Error::new(Kind::InvalidArgument, message).offset(LENGTH_BYTES))
        }
    }
}

/// Returns the keys that trust the owner of the signature.
fn signed_with<'a>(
    header: &Header,
    json: &[u8],
    stated: &KeysText,
    keys: &'a [EncryptionKey],
) -> Result<Vec<&'a EncryptionKey>> {
    let KeysText { enc, sign, .. } = stated;
    let pinning: Vec<_> = keys.iter().filter(|key| !key.signers().is_empty()).collect();
    if pinning.is_empty() {
        let message = format!(
            "the file is encrypted by CryptoTensors; give a key from a JWK Set, which has the secret key {} and the \
             public key of the signature, {}: EncryptionKey.from_file",
            described(enc),
            described(sign)
        );
        return Err(Error::new(Kind::InvalidArgument, message));
    }
    let text = text_of(header, SIGNATURE_KEY)?;
    let signature: [u8; SIGNATURE_BYTES] = decode(text).ok_or_else(|| malformed(SIGNATURE_KEY, "no signature"))?;
    let message = signed_bytes(json, text).ok_or_else(|| malformed(SIGNATURE_KEY, "it is not where it is written"))?;
    let has_signed = |key: &&EncryptionKey| key.signers().iter().any(|signer| signer.has_signed(&message, &signature));
    let trusted: Vec<_> = pinning.into_iter().filter(has_signed).collect();
    if trusted.is_empty() {
        let message = format!(
            "no public key that was given has signed the header; it was changed, or signed with another key: {}",
            described(sign)
        );
        return Err(Error::new(Kind::Integrity, message).offset(0));
    }
    Ok(trusted)
}

/// Returns the header as it was signed: without the entry of the signature, and without the spaces at the end.
///
/// Nothing else is removed. The parsed header has the signature among its metadata, so that the entry is there, and
/// parsing without it would give the same header.
fn signed_bytes(json: &[u8], signature: &str) -> Option<Vec<u8>> {
    let field = format!(",\"{SIGNATURE_KEY}\":\"{signature}\"");
    // The closing quote belongs to the field.
    let end = position_of(json, signature)? + signature.len() + 1;
    let (before, mut after) = json.split_at_checked(end)?;
    let before = before.strip_suffix(field.as_bytes())?;
    while let Some(trimmed) = after.strip_suffix(b" ") {
        after = trimmed;
    }
    Some([before, after].concat())
}

/// Returns the cipher of the first key that wraps the keys of tensors.
fn wrapping_cipher(
    cipher: Cipher,
    texts: &BTreeMap<String, TensorText>,
    keys: &[&EncryptionKey],
) -> Result<Option<KeyedCipher>> {
    for key in keys {
        let Some(secret) = key.for_slot(None)? else { continue };
        let wrapping = cipher.keyed(secret.secret())?;
        if let Some((name, text)) = texts.first_key_value()
            && text.unwrap(&wrapping).map_err(|error| error.tensor(name.as_str()))?.is_some()
        {
            return Ok(Some(wrapping));
        }
    }
    Ok(None)
}

impl TensorText {
    /// Decrypts the key of the tensor. Returns `None` if another key wraps it.
    fn unwrap(&self, wrapping: &KeyedCipher) -> Result<Option<Key>> {
        let invalid = || malformed(ENCRYPTION_KEY, "the wrapped key is not valid");
        let nonce: NonceBytes = decode(&self.key_iv).ok_or_else(invalid)?;
        let tag: Tag = decode(&self.key_tag).ok_or_else(invalid)?;
        let wrapped: [u8; KEY_BYTES] = decode(&self.wrapped_key).ok_or_else(invalid)?;
        let mut is_authentic = false;
        let key = Key::with(|key| {
            key.copy_from_slice(&wrapped);
            is_authentic = wrapping.decrypt(nonce, &[], key, tag);
            Ok(())
        })?;
        Ok(is_authentic.then_some(key))
    }

    /// Returns the cipher of a tensor.
    fn cipher(
        self,
        stated: &KeysText,
        cipher: Cipher,
        wrapping: &KeyedCipher,
        tensor_bytes: u64,
    ) -> Result<TensorCipher> {
        let missing = || malformed(ENCRYPTION_KEY, "a nonce or authentication codes are missing or not valid");
        let key = self.unwrap(wrapping)?.ok_or_else(|| other_key(stated))?;
        let (nonce, tags, chunk_bytes) = match &*stated.version {
            "1" => (self.iv, self.tag, tensor_bytes.max(1)),
            _ => (self.base_iv, self.tags, stated.chunk_size.unwrap_or(CHUNK_BYTES)),
        };
        let (nonce, tags) = nonce.zip(tags).ok_or_else(missing)?;
        // Tensors without bytes have nothing to authenticate. Version 1 gives them no nonce, and version 2 a code.
        let (nonce, tags) = match tensor_bytes {
            0 => (NonceBytes::default(), Vec::new()),
            _ => decode(&nonce).zip(STANDARD.decode(&tags).ok()).ok_or_else(missing)?,
        };
        let misfit = || malformed(ENCRYPTION_KEY, &format!("no nonce and code of {TAG_BYTES} bytes for each chunk"));
        TensorCipher::new(cipher.keyed(key.secret())?, nonce, tags, chunk_bytes, tensor_bytes).ok_or_else(misfit)
    }
}

fn text_of<'a>(header: &'a Header, key: &str) -> Result<&'a str> {
    let text = header.metadata().and_then(|metadata| metadata.get(key));
    text.map(String::as_str).ok_or_else(|| malformed(key, "the file is encrypted by CryptoTensors, but lacks them"))
}

fn parse<'a, T: Deserialize<'a>>(header: &'a Header, key: &str) -> Result<T> {
    serde_json::from_str(text_of(header, key)?).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        malformed(key, &format!("a field is missing or has another type: line {line}, column {column}"))
    })
}

fn decode<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    STANDARD.decode(text).ok()?.try_into().ok()
}

/// Returns the begin of a text of the file, for errors.
fn shown(text: &str) -> String {
    format!("{:?}", text.chars().take(SHOWN_MAX).collect::<String>())
}

fn described(key: &KeyText) -> String {
    key.kid.as_deref().map_or_else(|| "without an id".to_owned(), shown)
}

fn other_key(stated: &KeysText) -> Error {
    let message = format!("the file was encrypted with another key: {}", described(&stated.enc));
    Error::new(Kind::Integrity, message)
}

fn malformed(key: &str, what: &str) -> Error {
    Error::new(Kind::Malformed, format!("the metadata {key:?} are not valid: {what}")).offset(LENGTH_BYTES)
}
