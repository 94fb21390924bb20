//! Properties of a delta, which the metadata of its index states.

use super::{CHECKSUMS, Encoding, checksum_from_name};
use crate::digest::Algorithm;
use crate::error::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Key whose presence makes a checkpoint a delta.
const ENCODING: &str = "delta_encoding";
const VERSION: &str = "version";
const BASE_VERSION: &str = "base_version";
const CHECKSUM: &str = "checksum_format";
const COMPRESSION: &str = "compression_format";
/// Only compression of frames.
const ZSTD: &str = "zstd";

/// Versions and encoding of a delta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Version that the delta changes, if it states one.
    pub base_version: Option<String>,
    /// Version that it results in.
    pub version: String,
    /// Encoding of its changes.
    pub encoding: Encoding,
    /// Algorithm of its checksums, if it has any.
    pub checksum: Option<Algorithm>,
}

/// Returns whether the metadata of an index belong to a delta.
pub fn is_delta(metadata: &BTreeMap<String, String>) -> bool {
    metadata.contains_key(ENCODING)
}

/// Returns the version that the metadata of the index of a delta or of a whole checkpoint states.
pub fn version(metadata: &BTreeMap<String, String>) -> Option<&str> {
    metadata.get(VERSION).map(String::as_str)
}

impl Properties {
    /// Reads the metadata of the index at a path. Fails with `malformed` if it belongs to no delta, or states
    /// something unknown.
    pub fn read(path: &Path, metadata: &BTreeMap<String, String>) -> Result<Properties> {
        let malformed = |message: String| Error::new(Kind::Malformed, message).at(path);
        if !is_delta(metadata) {
            let message = format!("not a delta, but a full checkpoint: its index has no metadata {ENCODING:?}");
            return Err(malformed(message));
        }
        let value = |key: &str| {
            let absent = || malformed(format!("the metadata of the index has no {key:?}, which a delta must state"));
            metadata.get(key).map(String::as_str).ok_or_else(absent)
        };
        let unknown = |key: &str, known: &[&str]| {
            let is = metadata.get(key).map_or("", String::as_str);
            malformed(format!("the metadata of the index states {key:?}: {is:?}; known are {}", known.join(", ")))
        };
        let compression = value(COMPRESSION)?;
        if compression != ZSTD {
            return Err(unknown(COMPRESSION, &[ZSTD]));
        }
        let encodings = Encoding::OF_FRAMES;
        let encoding = Encoding::from_name(value(ENCODING)?, &encodings);
        Ok(Properties {
            base_version: Some(value(BASE_VERSION)?.to_owned()),
            version: value(VERSION)?.to_owned(),
            encoding: encoding.ok_or_else(|| unknown(ENCODING, &encodings.map(Encoding::name)))?,
            checksum: Some(
                checksum_from_name(value(CHECKSUM)?)
                    .ok_or_else(|| unknown(CHECKSUM, &CHECKSUMS.map(Algorithm::name)))?,
            ),
        })
    }

    /// Returns whether the delta may change tensors that have this version, if any. A sparse patch numbers versions: it
    /// fits the number of its base version, and tensors whose version is no number.
    pub fn fits(&self, held: Option<&str>) -> bool {
        let Some(base) = self.base_version.as_deref() else { return true };
        if held == Some(base) || self.checksum.is_some() {
            return held == Some(base);
        }
        match (number(base), held.and_then(number)) {
            (Some(base), Some(held)) => base == held,
            _ => true,
        }
    }
}

fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}
