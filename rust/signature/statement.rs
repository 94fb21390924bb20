//! Statements of in-toto about the files of a model: the payload of a signature.
//!
//! Format: <https://github.com/sigstore/model-transparency/blob/main/docs/model_signing_format.md>.

use super::Signed;
use super::bundle::{malformed, shown};
use crate::digest::manifest::{Manifest, normalized};
use crate::digest::{Algorithm, Digest, InputDigest};
use crate::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "https://model_signing/signature/v1.0";
/// Predicate of version 0.2 of the reference.
const OLD_PREDICATE_TYPE: &str = "https://model_signing/Digests/v0.1";
/// Name of a model that is a single file.
const SINGLE_FILE: &str = ".";

/// Byte ranges of a file, and their digests.
pub type Shards = Vec<(Range<u64>, Digest)>;

/// Content of a new signature.
#[derive(Serialize)]
pub struct Statement {
    #[serde(rename = "_type")]
    kind: &'static str,
    subject: [Subject; 1],
    #[serde(rename = "predicateType")]
    predicate_type: &'static str,
    predicate: Predicate,
}

#[derive(Deserialize, Serialize)]
struct Subject {
    name: String,
    digest: BTreeMap<String, String>,
}

#[derive(Deserialize, Serialize)]
struct Predicate {
    serialization: Serialization,
    resources: Vec<Resource>,
}

/// Method by which files became resources.
#[derive(Deserialize, Serialize)]
struct Serialization {
    method: Method,
    // The resources state it, too.
    #[serde(skip_deserializing)]
    hash_type: &'static str,
    // The caller who verifies decides about links, as in the reference.
    #[serde(skip_deserializing)]
    allow_symlinks: bool,
    #[serde(default)]
    ignore_paths: Vec<String>,
    // The reference writes a float. The names of the resources have the offsets.
    #[serde(skip_deserializing, skip_serializing_if = "Option::is_none")]
    shard_size: Option<u64>,
}

#[derive(Clone, Copy, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Method {
    /// One digest of each file.
    Files,
    /// Digests of byte ranges of files.
    Shards,
}

#[derive(Deserialize, Serialize)]
struct Resource {
    name: String,
    algorithm: String,
    digest: String,
}

impl Statement {
    /// Creates the statement about a model. `files` has the path of each file, relative to the directory of the model
    /// or `.` for a single file, and the digests of its shards, or of the whole file if `shard_bytes` is `None`.
    pub fn new(
        model: &str,
        mut files: Vec<(String, Shards)>,
        algorithm: Algorithm,
        shard_bytes: Option<u64>,
        ignored: Vec<String>,
        allow_symlinks: bool,
    ) -> Statement {
        // The order of the reference: by the parts of the path.
        files.sort_by(|(a, _), (b, _)| a.split('/').cmp(b.split('/')));
        let mut resources = Vec::new();
        let mut digests = Vec::new();
        for (file, shards) in files {
            for (range, digest) in shards {
                digests.extend(digest.bytes());
                let (name, algorithm) = match shard_bytes {
                    None => (file.clone(), algorithm.name().to_owned()),
                    Some(bytes) => {
                        let name = format!("{file}:{}:{}", range.start, range.end);
                        (name, format!("{}-sharded-{bytes}", algorithm.name()))
                    }
                };
                resources.push(Resource { name, algorithm, digest: digest.hex() });
            }
        }
        let method = if shard_bytes.is_some() { Method::Shards } else { Method::Files };
        let root = [("sha256".to_owned(), Algorithm::Sha256.digest(&digests).hex())].into();
        Statement {
            kind: STATEMENT_TYPE,
            subject: [Subject { name: model.to_owned(), digest: root }],
            predicate_type: PREDICATE_TYPE,
            predicate: Predicate {
                serialization: Serialization {
                    method,
                    hash_type: algorithm.name(),
                    allow_symlinks,
                    ignore_paths: ignored,
                    shard_size: shard_bytes,
                },
                resources,
            },
        }
    }

    /// Returns the text of the statement, which is the payload of a signature.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::new(Kind::Internal, error.to_string()))
    }

    /// Parses a statement whose signature was verified. Fails with `malformed` with the field. The error has no path.
    pub fn parse(json: &[u8]) -> Result<Signed> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Types {
            #[serde(rename = "_type")]
            kind: String,
            predicate_type: String,
        }
        let types: Types = parse(json)?;
        if types.kind != STATEMENT_TYPE {
            return Err(malformed(&format!("_type is {:?}, not {STATEMENT_TYPE:?}", shown(&types.kind))));
        }
        match types.predicate_type.as_str() {
            PREDICATE_TYPE => parse_current(json),
            OLD_PREDICATE_TYPE => parse_old(json),
            other => Err(malformed(&format!("predicateType is {:?}, not {PREDICATE_TYPE:?}", shown(other)))),
        }
    }
}

fn parse<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T> {
    serde_json::from_slice(json).map_err(|error| malformed(&format!("its payload is no statement: {error}")))
}

fn parse_current(json: &[u8]) -> Result<Signed> {
    #[derive(Deserialize)]
    struct Current {
        subject: [Subject; 1],
        predicate: Predicate,
    }
    let Current { subject: [subject], predicate } = parse(json)?;
    let Serialization { method, ignore_paths, .. } = predicate.serialization;
    let mut files = FileDigests::default();
    let mut digests = Vec::new();
    for Resource { name, algorithm, digest } in &predicate.resources {
        let (file, range) = match method {
            Method::Files => (name.as_str(), None),
            Method::Shards => {
                let (file, range) = shard(name).ok_or_else(|| {
                    malformed(&format!("the resource {:?} is not named as a path and two offsets", shown(name)))
                })?;
                (file, Some(range))
            }
        };
        let digest = digest_of(name, algorithm, digest, method)?;
        digests.extend(digest.bytes());
        files.add(file, range, digest)?;
    }
    if subject.digest.get("sha256") != Some(&Algorithm::Sha256.digest(&digests).hex()) {
        return Err(malformed("the digest of the subject is not that of all resources"));
    }
    Ok(Signed { manifest: files.manifest()?, ignored: ignore_paths })
}

fn parse_old(json: &[u8]) -> Result<Signed> {
    #[derive(Deserialize)]
    struct Old {
        subject: Vec<Subject>,
    }
    let mut files = FileDigests::default();
    for Subject { name, digest } in parse::<Old>(json)?.subject {
        let hex = digest.get("sha256").map_or("", String::as_str);
        files.add(&name, None, digest_of(&name, "sha256", hex, Method::Files)?)?;
    }
    Ok(Signed { manifest: files.manifest()?, ignored: Vec::new() })
}

/// Splits the name of a shard, `path:begin:end`.
fn shard(name: &str) -> Option<(&str, Range<u64>)> {
    let (rest, end) = name.rsplit_once(':')?;
    let (path, begin) = rest.rsplit_once(':')?;
    Some((path, begin.parse().ok()?..end.parse().ok()?))
}

fn digest_of(name: &str, algorithm: &str, hex: &str, method: Method) -> Result<Digest> {
    let known = match (method, algorithm.split_once("-sharded-")) {
        (Method::Files, None) => Algorithm::from_name(algorithm),
        (Method::Shards, Some((algorithm, _))) => Algorithm::from_name(algorithm),
        _ => None,
    };
    let known = known.ok_or_else(|| {
        malformed(&format!("the resource {:?} has the unknown algorithm {:?}", shown(name), shown(algorithm)))
    })?;
    let invalid = || malformed(&format!("the resource {:?} has no valid digest of {}", shown(name), known.name()));
    Digest::from_hex(known, hex).ok_or_else(invalid)
}

/// Digests of files, which may come as shards in any order.
#[derive(Default)]
struct FileDigests {
    whole: BTreeMap<String, InputDigest>,
    shards: BTreeMap<String, Shards>,
}

impl FileDigests {
    fn add(&mut self, name: &str, shard: Option<Range<u64>>, digest: Digest) -> Result<()> {
        let file = if name == SINGLE_FILE { Some(String::new()) } else { normalized(name) };
        let file = file.filter(|_| !name.starts_with('/')).ok_or_else(|| {
            malformed(&format!("the resource {:?} does not name a file inside a directory", shown(name)))
        })?;
        match shard {
            Some(range) => self.shards.entry(file).or_default().push((range, digest)),
            None => {
                if self.whole.insert(file, digest.into()).is_some() {
                    return Err(malformed(&format!("the resource {:?} occurs twice", shown(name))));
                }
            }
        }
        Ok(())
    }

    fn manifest(self) -> Result<Manifest> {
        let mut entries = self.whole;
        for (file, mut shards) in self.shards {
            let digest = InputDigest::from_shards(&mut shards).ok_or_else(|| {
                malformed(&format!("the shards of {:?} overlap, are empty or leave gaps", shown(&file)))
            })?;
            entries.insert(file, digest);
        }
        if entries.is_empty() {
            return Err(malformed("it has no digest of a file"));
        }
        if entries.len() > 1 && entries.contains_key("") {
            return Err(malformed("a model of several files has a file without a name"));
        }
        Ok(Manifest::signed(entries))
    }
}
