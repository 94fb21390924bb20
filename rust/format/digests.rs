//! Digests that a safetensors file carries: of its header and of each tensor. They are one text of the metadata, which
//! `docs/integrity.md` specifies, so that every reader of safetensors accepts the file.
//!
//! A caller requests digests of a new file with the same key, whose value then begins with the algorithm's name. So a
//! copy of another file's metadata renews the digests. The length of the text is known before the digests are.

use super::Metadata;
use super::header::{Header, LENGTH_BYTES, LENGTH_SIZE, position_of, with_blank};
use crate::digest::groups::{self, GROUP_BYTES_MAX, GROUP_BYTES_MIN, Groups, TreeDigest};
use crate::digest::{Algorithm, DIGEST_BYTES, Digest};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use std::sync::Arc;

/// Key of the metadata.
pub const DIGESTS_KEY: &str = "fst.digests";

/// Number of hexadecimal digits of the header's digest.
const HEX_DIGITS: usize = 2 * DIGEST_BYTES;

/// Digests of the tensors of a file, whose header was compared with its own digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digests {
    algorithm: Algorithm,
    tensors: Vec<u8>,
    /// Groups of the tensors, if the file has their chaining values.
    groups: Option<Arc<Groups>>,
}

impl Digests {
    /// Decodes the digests of a file, and compares the header with its digest. `json` is the header that was parsed.
    /// Fails with `integrity` if the file has no digests, its header differs from them, or a tensor's digest does not
    /// follow from its chaining values; `malformed` if they are not what this module describes. The error has no path.
    pub fn read(header: &Header, json: &[u8]) -> Result<Digests> {
        let Some(text) = header.metadata().and_then(|metadata| metadata.get(DIGESTS_KEY)) else {
            let message = "the file carries no digests; save it with digests=\"blake3\", or verify it with a manifest \
                           of the digests of whole files";
            return Err(Error::new(Kind::Integrity, message));
        };
        let malformed = |what: &str| {
            let message = format!("the metadata {DIGESTS_KEY:?} are not valid: {what}");
            Error::new(Kind::Malformed, message).offset(LENGTH_BYTES)
        };
        let (name, rest) = text.split_once(':').ok_or_else(|| malformed("no \":\" follows an algorithm"))?;
        let algorithm = algorithm_of(name).ok_or_else(|| malformed("unknown algorithm"))?;
        let (hex, rest) = rest.split_once(':').ok_or_else(|| malformed("no \":\" follows the header's digest"))?;
        // Upper-case digits would be a change that no digest covers.
        let stated = Digest::from_hex(algorithm, hex).filter(|stated| stated.hex() == hex);
        let stated = stated.ok_or_else(|| malformed("no digest of the header in lower-case digits"))?;
        let decode = |encoded: &str, count: u64, what: &str| {
            if to_u64(encoded.len()) != encoded_bytes(count) {
                let message = format!("{count} {what} take {} characters, not {}", encoded_bytes(count), encoded.len());
                return Err(malformed(&message));
            }
            URL_SAFE_NO_PAD.decode(encoded).map_err(|error| malformed(&error.to_string()))
        };
        let (encoded, tree) = rest.split_once(':').map_or((rest, None), |(encoded, tree)| (encoded, Some(tree)));
        let tensors = decode(encoded, to_u64(header.entries().len()), "digests of tensors")?;
        let values = match tree.filter(|_| algorithm == Algorithm::Blake3) {
            Some(tree) => {
                let (size, encoded) =
                    tree.split_once(':').ok_or_else(|| malformed("no \":\" follows the group size"))?;
                let group_bytes = group_bytes(size).ok_or_else(|| malformed("no size of a group"))?;
                let count = groups::value_count(header.entries().map(|entry| entry.end - entry.begin), group_bytes);
                Some((group_bytes, decode(encoded, count, "chaining values")?))
            }
            None if tree.is_some() => return Err(malformed("the algorithm has no groups")),
            None => None,
        };
        let begin = position_of(json, text).ok_or_else(|| malformed("the text is not exactly once in the header"))?;
        let digits = begin + name.len() + 1;
        let found = digest_of(algorithm, json, digits);
        if found != stated {
            let message =
                format!("the digest of the header is {found}, but the file states {stated}; the file has changed");
            return Err(Error::new(Kind::Integrity, message).offset(0));
        }
        let tree = |(group_bytes, values): (u64, Vec<u8>)| {
            let ranges = header.entries().map(|entry| entry.begin..entry.end);
            Groups::new(group_bytes, ranges.zip(tensors.chunks_exact(DIGEST_BYTES)), &values).map_err(|position| {
                let message = "the digest does not follow from the chaining values of the groups; the file has changed";
                let error = Error::new(Kind::Integrity, message).offset(LENGTH_BYTES);
                error.tensor(header.get(position).map_or("", |entry| entry.name))
            })
        };
        let groups = values.map(tree).transpose()?.map(Arc::new);
        Ok(Digests { algorithm, tensors, groups })
    }

    /// Returns the groups of the tensors, if the file has their chaining values.
    pub fn groups(&self) -> Option<&Arc<Groups>> {
        self.groups.as_ref()
    }

    /// Returns the digest of the tensor at a position of [`Header::entries`].
    pub fn tensor(&self, position: usize) -> Option<Digest> {
        let begin = position.checked_mul(DIGEST_BYTES)?;
        let bytes = self.tensors.get(begin..begin.checked_add(DIGEST_BYTES)?)?;
        Digest::from_bytes(self.algorithm, bytes)
    }
}

/// Returns the algorithm of the digests that the metadata of a new file request, or `None` if they request none. Fails
/// with `invalid-argument` for an unknown algorithm.
pub fn requested(metadata: &Metadata) -> Result<Option<Algorithm>> {
    let Some(text) = metadata.as_ref().and_then(|metadata| metadata.get(DIGESTS_KEY)) else { return Ok(None) };
    let name = text.split_once(':').map_or(text.as_str(), |(name, _)| name);
    let unknown = || {
        let name: String = name.chars().take(20).collect();
        Error::new(Kind::InvalidArgument, format!("the digests are {name:?}, but must be \"blake3\" or \"sha256\""))
    };
    algorithm_of(name).map(Some).ok_or_else(unknown)
}

/// Removes digests that were copied from the metadata of another file, in place of which an encrypted file has
/// authentication codes. A request stays.
pub fn remove_copied(metadata: &mut Metadata) {
    if let Some(metadata) = metadata
        && metadata.get(DIGESTS_KEY).is_some_and(|text| text.contains(':'))
    {
        metadata.remove(DIGESTS_KEY);
    }
}

/// Returns the algorithm with this name, if files carry its digests.
fn algorithm_of(name: &str) -> Option<Algorithm> {
    Algorithm::from_name(name).filter(|algorithm| algorithm.digest_bytes() == DIGEST_BYTES)
}

/// Returns the metadata of a file with tensors of these sizes in bytes, with a text as long as the requested digests.
pub fn reserve(metadata: &Metadata, sizes: impl Iterator<Item = u64> + Clone) -> Result<Metadata> {
    let Some(algorithm) = requested(metadata)? else { return Ok(metadata.clone()) };
    let mut metadata = metadata.clone();
    if let Some(text) = metadata.as_mut().and_then(|metadata| metadata.get_mut(DIGESTS_KEY)) {
        *text = blank(algorithm, sizes);
    }
    Ok(metadata)
}

/// Writes digests to the header of a file, in the place that [`reserve`] has kept: the digests of the tensors in the
/// order of the data with their chaining values, and the digest of the header.
pub fn seal(header: &mut [u8], algorithm: Algorithm, tensors: &[TreeDigest]) -> Result<()> {
    let no_place = || Error::new(Kind::Internal, format!("the header has no place for {} digests", tensors.len()));
    let (_, json) = header.split_at_mut_checked(LENGTH_SIZE).ok_or_else(no_place)?;
    let sizes = tensors.iter().map(|tensor| tensor.length);
    let begin = position_of(json, &blank(algorithm, sizes.clone())).ok_or_else(no_place)?;
    let encode = |bytes: Vec<u8>| URL_SAFE_NO_PAD.encode(bytes);
    let digests = encode(tensors.iter().flat_map(|tensor| tensor.digest.bytes()).copied().collect());
    let mut value = format!("{}:{}:{digests}", algorithm.name(), "0".repeat(HEX_DIGITS));
    if algorithm == Algorithm::Blake3 {
        let group_bytes = groups::group_bytes_of(sizes);
        let values = tensors.iter().flat_map(|tensor| tensor.values_of(group_bytes)).flatten().collect();
        value += &format!(":{group_bytes}:{}", encode(values));
    }
    let place = json.get_mut(begin..begin + value.len()).ok_or_else(no_place)?;
    place.copy_from_slice(value.as_bytes());
    let digits = begin + algorithm.name().len() + 1;
    let digest = digest_of(algorithm, json, digits);
    json.get_mut(digits..digits + HEX_DIGITS).ok_or_else(no_place)?.copy_from_slice(digest.hex().as_bytes());
    Ok(())
}

/// Returns the text for tensors of these sizes, with zeros for all digests and chaining values.
fn blank(algorithm: Algorithm, sizes: impl Iterator<Item = u64> + Clone) -> String {
    let zeros = |count: u64| "A".repeat(to_usize(encoded_bytes(count)));
    let count = to_u64(sizes.clone().count());
    let text = format!("{}:{}:{}", algorithm.name(), "0".repeat(HEX_DIGITS), zeros(count));
    if algorithm != Algorithm::Blake3 {
        return text;
    }
    let group_bytes = groups::group_bytes_of(sizes.clone());
    format!("{text}:{group_bytes}:{}", zeros(groups::value_count(sizes, group_bytes)))
}

/// Returns the number of characters of `count` digests or chaining values.
fn encoded_bytes(count: u64) -> u64 {
    count.saturating_mul(8 * to_u64(DIGEST_BYTES)).div_ceil(6)
}

/// Returns the size of a group in bytes, if it is accepted.
fn group_bytes(text: &str) -> Option<u64> {
    let bytes: u64 = text.parse().ok()?;
    let is_accepted = bytes.is_power_of_two() && (GROUP_BYTES_MIN..=GROUP_BYTES_MAX).contains(&bytes);
    // Without signs and leading zeros.
    (is_accepted && bytes.to_string() == text).then_some(bytes)
}

/// Returns the digest of a header, with `0` for the digits of the digest, which begin at `digits`.
fn digest_of(algorithm: Algorithm, json: &[u8], digits: usize) -> Digest {
    algorithm.digest(&with_blank(json, &(digits..digits + HEX_DIGITS), &"0".repeat(HEX_DIGITS)))
}
