//! Digests with which a load compares the data of a checkpoint: from the files themselves, or from a manifest.

mod coverage;
mod listed;
mod signature_request;
mod unverified;

pub use self::coverage::{Compared, Cover, Coverage, Input};
pub use self::listed::read_manifest;
use self::listed::read_whole;
pub(crate) use self::listed::{check_length, digest_of, resolve_listed};
pub use self::signature_request::{SignatureRequest, signature_parts};
pub(super) use self::unverified::Unverified;

use super::tensor_headers::{self, TensorHash};
use crate::digest::groups::Groups;
use crate::digest::manifest::Manifest;
use crate::digest::{Algorithm, Digest, InputDigest};
use crate::error::{Error, Kind, Result};
use crate::format::digests::{DIGESTS_KEY, Digests};
use crate::format::encryption;
use crate::format::header::Header;
use crate::format::tensors;
use crate::num::to_u64;
use crate::os::retry::Check;
use crate::source::files::Files;
use crate::source::{Protection, Source, UnitSource};
use serde::Deserialize;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Origin of the digests of the Hugging Face Hub, for errors.
const HUB: &str = "the Hugging Face Hub";
/// Directory of the files in the Hub's cache, which have their SHA-256 as names. Snapshots link to them.
const HUB_BLOBS: &str = "blobs";

/// Request to verify the data of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Digests to compare.
    pub verify: Verify,
    /// Loads of tensors and parts of tensors that the digests do not cover.
    pub partial: Partial,
}

/// Loads of tensors and parts of tensors that no digest covers, although the data is to be verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Partial {
    /// Such a load is an error.
    #[default]
    Raise,
    /// Such a load returns data that was not compared.
    Allow,
}

impl Request {
    /// Reads a request: a text of [`Verify::read`], or one in a JSON object that says what partial loads do:
    /// `{"verify": {"source": "digests", "partial": "allow"}}`.
    pub fn read(text: &str) -> Result<Request> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Text {
            verify: Fields,
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Fields {
            source: String,
            partial: Partial,
        }
        if !begins_with_object(text, "verify") {
            return Ok(Request { verify: Verify::read(text)?, partial: Partial::default() });
        }
        let Text { verify: Fields { source, partial } } = parse_request(text)?;
        Ok(Request { verify: Verify::read(&source)?, partial })
    }
}

/// Returns whether a text is a JSON object whose first value is an object with this key. No manifest has such a value.
fn begins_with_object(text: &str, key: &str) -> bool {
    let value = text.strip_prefix('{').and_then(|text| text.trim_start().strip_prefix(&format!("{key:?}")));
    let value = value.and_then(|text| text.trim_start().strip_prefix(':'));
    value.is_some_and(|value| value.trim_start().starts_with('{'))
}

fn parse_request<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T> {
    let invalid = |error| Error::new(Kind::InvalidArgument, format!("the request to verify is not valid: {error}"));
    serde_json::from_str(text).map_err(invalid)
}

/// Digests with which the data of a checkpoint is compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Data are not verified.
    #[default]
    Nothing,
    /// With the digests that every file carries, or that the Hugging Face Hub states of it.
    Digests,
    /// With the digests of whole files.
    Manifest(Manifest),
}

impl Verify {
    /// Reads a text: nothing, `digests`, a manifest or a [`SignatureRequest`] in JSON, or the path or URL of a
    /// manifest. Fails with the errors of [`Manifest::parse`] and of opening the manifest; the errors of
    /// [`SignatureRequest`].
    pub fn read(text: &str) -> Result<Verify> {
        Ok(match text {
            "" => Verify::Nothing,
            "digests" => Verify::Digests,
            _ => match SignatureRequest::parse(text)? {
                Some(request) => Verify::Manifest(request.verify()?.manifest),
                None if text.starts_with('{') => Verify::Manifest(Manifest::parse(text.as_bytes())?),
                None => Verify::Manifest(read_manifest(Path::new(text))?),
            },
        })
    }

    /// Resolves paths to files. With a manifest, no index or directory can leave out files that it lists. Fails with
    /// `integrity` if an index differs from its digest, or files are missing.
    pub fn resolve<P: AsRef<Path>>(&self, paths: &[P], check: Check<'_>) -> Result<Files> {
        match self {
            Verify::Nothing | Verify::Digests => Files::resolve(paths, check),
            Verify::Manifest(manifest) => resolve_listed(paths, manifest, check),
        }
    }

    /// Returns the digests that the data of a file with this header must have.
    pub(super) fn stated(&self, source: &Source, header: &Header, json: &[u8]) -> Result<Stated> {
        match self {
            Verify::Nothing => Ok(Stated::Nothing),
            // The hashes cover names, dtypes and shapes, too, which are not authentic in an encrypted file.
            Verify::Digests if json.starts_with(tensors::MAGIC) => {
                Ok(Stated::Hashes(tensor_headers::hashes(source, header).map_err(|error| error.at(source.path()))?))
            }
            // It needs a key, not digests.
            Verify::Digests if encryption::is_encrypted(header) => Ok(Stated::Nothing),
            Verify::Digests => {
                if let Some(digest) = hub_digest(source, header) {
                    return Ok(Stated::of_file(digest, header, json, HUB));
                }
                let digests = Digests::read(header, json).map_err(|error| error.at(source.path()))?;
                let grouped = |groups: &Arc<Groups>| {
                    let protection = Protection::Hashed(Arc::clone(groups));
                    Source::Units(Arc::new(UnitSource { stored: source.clone(), protection }))
                };
                let grouped = digests.groups().map(grouped);
                Ok(Stated::Tensors(digests, grouped))
            }
            Verify::Manifest(manifest) => {
                Ok(Stated::of_file(digest_of(source, manifest)?, header, json, manifest.origin()))
            }
        }
    }
}

/// Returns the SHA-256 that the Hugging Face Hub states of a file without digests: in the entity tag of an object, or the
/// name that the file has in the Hub's cache.
fn hub_digest(source: &Source, header: &Header) -> Option<InputDigest> {
    if header.metadata().is_some_and(|metadata| metadata.contains_key(DIGESTS_KEY)) {
        return None;
    }
    let digest = |hex: &str| Digest::from_hex(Algorithm::Sha256, hex).map(InputDigest::from);
    match source {
        Source::Object(object) => digest(object.hub_sha256()?),
        Source::File(file) => {
            let blob = fs::canonicalize(&file.path).ok()?;
            let is_cached = blob.parent().and_then(Path::file_name).is_some_and(|directory| directory == HUB_BLOBS);
            digest(blob.file_name()?.to_str().filter(|_| is_cached)?)
        }
        Source::Units(_) => None,
    }
}

/// Digests that the data of one file must have.
#[derive(Debug)]
pub(super) enum Stated {
    /// The file is not verified.
    Nothing,
    /// Digest of each tensor, and the file as loads of parts of tensors read it, if the digests cover parts.
    Tensors(Digests, Option<Source>),
    /// Hash of each tensor of a `.tensors` file.
    Hashes(Vec<TensorHash>),
    /// Digest of the whole file, the bytes before its data, and what states the digest. It is compared before the first
    /// load if a load does not see all bytes of the file.
    File { digest: InputDigest, header: Arc<[u8]>, origin: &'static str, is_first: bool },
}

impl Stated {
    /// Returns the digest of a whole file, of which `json` is the header.
    fn of_file(digest: InputDigest, header: &Header, json: &[u8], origin: &'static str) -> Stated {
        // Loads see the decrypted bytes of an encrypted file, and no headers between the tensors of a `.tensors` file.
        let is_tensors = json.starts_with(tensors::MAGIC);
        let is_first = is_tensors || encryption::is_encrypted(header);
        let length = to_u64(json.len()).to_le_bytes();
        let before = if is_tensors { &[] } else { length.as_slice() };
        Stated::File { digest, header: [before, json].concat().into(), origin, is_first }
    }

    fn is_first(&self) -> bool {
        matches!(self, Stated::File { is_first: true, .. })
    }

    /// Returns the file as loads of parts of its tensors read it, if the digests cover parts.
    fn groups(&self) -> Option<&Source> {
        match self {
            Stated::Tensors(_, groups) => groups.as_ref(),
            Stated::Nothing | Stated::Hashes(_) | Stated::File { .. } => None,
        }
    }
}
