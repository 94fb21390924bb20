//! Encryption of a safetensors file, as its header states it: a text of the metadata, and a tensor with the
//! authentication codes of all chunks. `docs/encryption.md` specifies the format.
//!
//! ```text
//! "__metadata__": {"fst.encryption": "1:<cipher>:<chunk_bytes>:<code of the header>:<key slot>:<key slot>"}
//! "fst.encryption.tags": {"dtype": "U8", "shape": [16 * chunks], "data_offsets": [..., end of the data]}
//! ```
//!
//! The length of the text is known before the header is, so that the last field can be written when all data is.
//!
//! A caller without a key of its own requests the encryption of a new file with the same key of the metadata, whose value
//! is then the label of a registered key.

use super::header::{Header, LENGTH_BYTES, LENGTH_SIZE, position_of, with_blank};
use crate::dtype::Dtype;
use crate::encryption::chunks::{
    CHUNK_BYTES, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, ChunkEncryptor, Chunks, SafetensorsChunks,
};
use crate::encryption::cipher::{Cipher, TAG_BYTES};
use crate::encryption::file_key::{CODE_BYTES, FileKey};
use crate::encryption::key::EncryptionKey;
use crate::encryption::slot::{self, SLOT_BYTES, SLOTS, Slot};
use crate::error::{Error, Kind, Result};
use crate::format::Metadata;
use crate::format::shard::{SHARD_KEY, Shard};
use crate::format::tensors::chunks::TensorsChunks;
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use crate::source::Source;
use crate::units;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use std::ops::Range;
use std::slice;

/// Key of the metadata.
pub const ENCRYPTION_KEY: &str = "fst.encryption";
/// Name of the tensor with the authentication codes.
pub const TAGS_NAME: &str = "fst.encryption.tags";

/// Keys of the metadata of a file of CryptoTensors, which encrypts tensors in a format of its own.
const CRYPTOTENSORS_KEYS: [&str; 2] = ["__crypto_keys__", "__encryption__"];

const VERSION: &str = "1";
const CODE_CHARS: usize = (CODE_BYTES * 8).div_ceil(6);
const SLOT_CHARS: usize = SLOT_BYTES * 8 / 6;
/// Number of characters of the code, the slots, and the separators between them.
const SECRETS_CHARS: usize = CODE_CHARS + SLOTS * (1 + SLOT_CHARS);

/// Text of the metadata of an encrypted file.
struct Stated {
    cipher: Cipher,
    chunk_bytes: u64,
    code: [u8; CODE_BYTES],
    slots: [Slot; SLOTS],
    /// Range of the code and the slots in the JSON of the header.
    secrets: Range<usize>,
}

/// Returns whether a header belongs to an encrypted file of any format, or claims to. [`open`] refuses files of
/// CryptoTensors.
pub fn is_encrypted(header: &Header) -> bool {
    is_own(header) || is_tensors(header) || is_cryptotensors(header)
}

/// Returns whether a header belongs to an encrypted `.tensors` file. All its tensors are encrypted, or none is.
fn is_tensors(header: &Header) -> bool {
    header.entries().next().and_then(|entry| entry.tensors).is_some_and(|entry| entry.is_encrypted)
}

/// Returns whether a header belongs to a file that fst has encrypted, or claims to.
fn is_own(header: &Header) -> bool {
    header.metadata().is_some_and(|metadata| metadata.contains_key(ENCRYPTION_KEY)) || header.find(TAGS_NAME).is_some()
}

/// Returns whether a header belongs to a file that CryptoTensors has encrypted, or claims to.
fn is_cryptotensors(header: &Header) -> bool {
    header.metadata().is_some_and(|metadata| CRYPTOTENSORS_KEYS.iter().any(|key| metadata.contains_key(*key)))
}

/// Open encrypted file.
pub struct Encrypted {
    /// Chunks of the data.
    pub chunks: Box<dyn Chunks>,
    /// Place of the file among the files of its save.
    pub shard: Option<Shard>,
}

/// Opens an encrypted file, whose header is authentic, and removes from the header what belongs to the encryption.
/// `json` is the header that was parsed. Fails with `malformed` if the header is not what this module describes;
/// `integrity` if the file is not encrypted, has none of the keys, or the header was changed; `invalid-argument`
/// without keys, or for a file of CryptoTensors. The error has no path.
pub fn open(
    header: &mut Header,
    json: &[u8],
    source: &Source,
    keys: &[EncryptionKey],
    check: Check<'_>,
) -> Result<Encrypted> {
    if is_tensors(header) {
        return Ok(Encrypted { chunks: Box::new(TensorsChunks::open(header, source, keys)?), shard: None });
    }
    let Authentic { stated, file_key, tags, .. } = Authentic::new(header, json, source.length(), keys)?;
    header.remove(TAGS_NAME)?;
    header.remove_metadata(ENCRYPTION_KEY);
    let shard = header.metadata().and_then(|metadata| metadata.get(SHARD_KEY));
    let shard = shard.map(|text| Shard::parse(text)).transpose()?;
    header.remove_metadata(SHARD_KEY);
    let mut codes = vec![0; to_usize(tags.end - tags.start)];
    source.read(tags.start, &mut codes, check)?;
    let ranges = header.entries().map(|entry| entry.begin..entry.end);
    let chunks = SafetensorsChunks::new(&file_key, stated.cipher, stated.chunk_bytes, ranges, codes)?;
    Ok(Encrypted { chunks: Box::new(chunks), shard })
}

/// Encryption of a file whose header is authentic.
struct Authentic {
    stated: Stated,
    file_key: FileKey,
    /// Index of the slot of the key.
    slot: usize,
    /// Range of the authentication codes in the file.
    tags: Range<u64>,
}

impl Authentic {
    /// Checks the header of a file of `file_bytes` bytes with the first key that opens it.
    fn new(header: &Header, json: &[u8], file_bytes: u64, keys: &[EncryptionKey]) -> Result<Authentic> {
        if is_cryptotensors(header) {
            let message = "the file is encrypted by CryptoTensors, which fst does not read; decrypt it with the package \
                           cryptotensors, and save it again: docs/encryption.md";
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        if !is_own(header) {
            let message = "the file is not encrypted, but a key was given; someone may have replaced it. Load the file \
                           without a key to accept it";
            return Err(Error::new(Kind::Integrity, message));
        }
        let stated = Stated::read(header, json)?;
        let tags = tags_range(header, stated.chunk_bytes, file_bytes)?;
        let (file_key, slot) = slot::unwrap(&stated.slots, keys, stated.cipher)?;
        if !file_key.has_code(&covered(json, &stated.secrets), &stated.code)? {
            let message = "the header was changed after the file was encrypted, or belongs to another file: names, \
                           dtypes, shapes, offsets, metadata or the cipher";
            return Err(Error::new(Kind::Integrity, message).offset(0));
        }
        Ok(Authentic { stated, file_key, slot, tags })
    }
}

/// Replacement of the key of a file.
#[derive(Debug)]
pub struct Rotation {
    /// Texts to write at bytes of the file. Each is on the disk before the next one is written: the slot of the new key,
    /// and an empty slot over the old key's slot.
    pub writes: [(u64, String); SLOTS],
}

impl Rotation {
    /// Wraps the key of a file with another key of a user. Fails with `invalid-argument` for a file in another format.
    pub fn new(
        header: &Header,
        json: &[u8],
        file_bytes: u64,
        old: &EncryptionKey,
        new: &EncryptionKey,
    ) -> Result<Rotation> {
        if is_tensors(header) {
            let message = "the key of a file in tensorizer's format cannot be replaced; write the file again";
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        let Authentic { stated, file_key, slot, .. } = Authentic::new(header, json, file_bytes, slice::from_ref(old))?;
        let offset = |slot: usize| {
            let begin = stated.secrets.start + CODE_CHARS + slot * (1 + SLOT_CHARS) + 1;
            LENGTH_BYTES.saturating_add(to_u64(begin))
        };
        let wrapped = slot::wrap(&file_key, new, stated.cipher)?;
        let write = |slot: usize, bytes: Slot| (offset(slot), URL_SAFE_NO_PAD.encode(bytes));
        Ok(Rotation { writes: [write(1 - slot, wrapped), write(slot, [0; SLOT_BYTES])] })
    }
}

fn tags_range(header: &Header, chunk_bytes: u64, file_bytes: u64) -> Result<Range<u64>> {
    let malformed =
        |message: String, offset: u64| Error::new(Kind::Malformed, message).tensor(TAGS_NAME).offset(offset);
    let missing = || malformed("the encrypted file lacks the tensor of its authentication codes".into(), LENGTH_BYTES);
    let tags = header.find(TAGS_NAME).ok_or_else(missing)?;
    let sizes = header.entries().filter(|entry| entry.name != TAGS_NAME).map(|entry| entry.end - entry.begin);
    let expected = tags_bytes(sizes, chunk_bytes);
    if tags.dtype != Dtype::U8 || tags.shape != [expected] || tags.end != file_bytes {
        let message = format!(
            "the authentication codes are {} {:?} up to byte {}, but must be {} [{expected}] up to the end at byte \
             {file_bytes}",
            tags.dtype,
            tags.shape,
            tags.end,
            Dtype::U8
        );
        return Err(malformed(message, tags.begin));
    }
    Ok(tags.begin..tags.end)
}

impl Stated {
    /// Parses the text. Checks each field, but nothing that needs a key.
    fn read(header: &Header, json: &[u8]) -> Result<Stated> {
        let malformed = |what: &str| {
            let message = format!("the metadata {ENCRYPTION_KEY:?} are not valid: {what}");
            Error::new(Kind::Malformed, message).offset(LENGTH_BYTES)
        };
        let text = header.metadata().and_then(|metadata| metadata.get(ENCRYPTION_KEY));
        let text = text.ok_or_else(|| malformed("the file has authentication codes, but no such text"))?;
        let fields: Vec<&str> = text.split(':').collect();
        let (version, fields) = fields.split_first().ok_or_else(|| malformed("no version"))?;
        if *version != VERSION {
            let version: String = version.chars().take(20).collect();
            return Err(malformed(&format!("version {version:?} is unknown; a newer fst may read it")));
        }
        let [cipher, chunk_bytes, code, first, second] = fields else {
            return Err(malformed("it must have 6 fields"));
        };
        let cipher = Cipher::from_name(cipher).ok_or_else(|| malformed("unknown cipher"))?;
        let is_canonical = |bytes: &u64| bytes.to_string() == *chunk_bytes && bytes.is_power_of_two();
        let chunk_bytes = chunk_bytes.parse().ok().filter(is_canonical);
        let chunk_bytes = chunk_bytes.filter(|bytes| (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(bytes));
        let chunk_bytes = chunk_bytes.ok_or_else(|| malformed("chunks of a size that is not accepted"))?;
        let code = decode(code).ok_or_else(|| malformed("no code of the header"))?;
        let slot = |text| decode(text).ok_or_else(|| malformed("no key slot"));
        let slots = [slot(first)?, slot(second)?];
        let end = position_of(json, text).ok_or_else(|| malformed("the text is not exactly once in the header"))?;
        let end = end + text.len();
        Ok(Stated { cipher, chunk_bytes, code, slots, secrets: end - SECRETS_CHARS..end })
    }
}

/// Encryption of a new file, until its header is written.
pub struct NewEncryption {
    file_key: FileKey,
    cipher: Cipher,
    slot: Slot,
}

impl NewEncryption {
    /// Returns the encryption of a file with a new key, which `key` wraps.
    pub fn new(key: &EncryptionKey, cipher: Cipher) -> Result<NewEncryption> {
        let file_key = FileKey::random()?;
        let slot = slot::wrap(&file_key, key, cipher)?;
        Ok(NewEncryption { file_key, cipher, slot })
    }

    /// Returns the encryptor of the data.
    pub fn chunk_encryptor(&self) -> Result<ChunkEncryptor> {
        ChunkEncryptor::new(&self.file_key, self.cipher)
    }

    /// Adds to the metadata of the file a text as long as the encryption's.
    #[must_use]
    pub fn reserve(&self, metadata: Metadata) -> Metadata {
        let mut metadata = metadata.unwrap_or_default();
        metadata.insert(ENCRYPTION_KEY.to_owned(), self.blank());
        Some(metadata)
    }

    /// Writes the text to the header of the file, in the place that [`reserve`](NewEncryption::reserve) has kept.
    pub fn seal(&self, header: &mut [u8]) -> Result<()> {
        let no_place = || Error::new(Kind::Internal, "the header has no place for the encryption");
        let (_, json) = header.split_at_mut_checked(LENGTH_SIZE).ok_or_else(no_place)?;
        let blank = self.blank();
        let end = position_of(json, &blank).ok_or_else(no_place)? + blank.len();
        let secrets = end - SECRETS_CHARS..end;
        let code = self.file_key.header_code(&covered(json, &secrets))?;
        let mut text = URL_SAFE_NO_PAD.encode(code);
        for slot in [self.slot, [0; SLOT_BYTES]] {
            text.push(':');
            URL_SAFE_NO_PAD.encode_string(slot, &mut text);
        }
        let place = json.get_mut(secrets).filter(|place| place.len() == text.len()).ok_or_else(no_place)?;
        place.copy_from_slice(text.as_bytes());
        Ok(())
    }

    fn blank(&self) -> String {
        format!("{VERSION}:{}:{CHUNK_BYTES}:{}", self.cipher.name(), blank_secrets())
    }
}

/// Returns the size of the authentication codes of tensors with these sizes in bytes.
pub(super) fn tags_bytes(sizes: impl Iterator<Item = u64>, chunk_bytes: u64) -> u64 {
    units::count(sizes, chunk_bytes).saturating_mul(to_u64(TAG_BYTES))
}

/// Returns whether the metadata of a new file request its encryption.
pub fn is_requested(metadata: &Metadata) -> bool {
    metadata.as_ref().is_some_and(|metadata| metadata.contains_key(ENCRYPTION_KEY))
}

/// Takes the label of the registered key that a new file is to be encrypted with from its metadata, if they request that.
pub fn take_request(metadata: &mut Metadata) -> Option<String> {
    metadata.as_mut()?.remove(ENCRYPTION_KEY)
}

/// Refuses metadata that request the encryption of a file that cannot be encrypted.
pub fn check_metadata(metadata: &Metadata) -> Result<()> {
    if is_requested(metadata) {
        let message =
            format!("the metadata {ENCRYPTION_KEY:?} request a file that is encrypted; save it with save_file");
        return Err(Error::new(Kind::InvalidArgument, message));
    }
    let is_reserved = |key: &&&str| metadata.as_ref().is_some_and(|metadata| metadata.contains_key(**key));
    if let Some(key) = CRYPTOTENSORS_KEYS.iter().find(is_reserved) {
        let message =
            format!("the metadata key {key:?} marks files of CryptoTensors, which loads refuse; use another key");
        return Err(Error::new(Kind::InvalidArgument, message));
    }
    Ok(())
}

/// Returns the code and the slots with `A` for each of their characters.
fn blank_secrets() -> String {
    let slots = format!(":{}", "A".repeat(SLOT_CHARS)).repeat(SLOTS);
    "A".repeat(CODE_CHARS) + &slots
}

/// Returns the bytes before the data that the code of the header covers, with blanks for the code and the slots.
fn covered(json: &[u8], secrets: &Range<usize>) -> Vec<u8> {
    with_blank(json, secrets, &blank_secrets())
}

fn decode<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok()
}
