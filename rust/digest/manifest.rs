//! Manifests: digests of whole files, by name.
//!
//! A manifest is a JSON object `{"model.safetensors": "sha256:..."}`, or the lines that `sha256sum` and `b3sum --tag`
//! print. An entry describes every file whose path ends in its name, so that a manifest may be used with a copy of the
//! files, or with their URLs. A signature contains a manifest, too.

use super::{Algorithm, Digest, InputDigest};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// Maximum size of a manifest in bytes: enough for the names of about 300,000 files.
pub const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// Digests of files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// Digests by name. Names have no `.` parts.
    entries: BTreeMap<String, InputDigest>,
    /// Whether a signature states the digests.
    is_signed: bool,
}

impl Manifest {
    /// Parses a manifest.
    ///
    /// # Errors
    /// `malformed` with the byte or line, without the path.
    ///
    /// ```
    /// use fst::digest::manifest::Manifest;
    /// let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    /// let json = Manifest::parse(format!(r#"{{"a/b.safetensors": "sha256:{hex}"}}"#).as_bytes()).unwrap();
    /// let text = Manifest::parse(format!("{hex}  ./a/b.safetensors\n").as_bytes()).unwrap();
    /// assert_eq!(json, text);
    /// assert!(json.find("/models/a/b.safetensors").is_some());
    /// assert!(json.find("/models/b.safetensors").is_none());
    /// ```
    pub fn parse(bytes: &[u8]) -> Result<Manifest> {
        let malformed = |message: String| Error::new(Kind::Malformed, message);
        if to_u64(bytes.len()) > MANIFEST_BYTES_MAX {
            return Err(malformed(format!("a manifest has at most {MANIFEST_BYTES_MAX} bytes, not {}", bytes.len())));
        }
        let text = std::str::from_utf8(bytes)
            .map_err(|error| malformed("the manifest is not UTF-8".into()).offset(to_u64(error.valid_up_to())))?;
        let manifest = if text.trim_start().starts_with('{') { parse_json(text) } else { parse_lines(text) }?;
        if manifest.entries.is_empty() {
            return Err(malformed("the manifest has no digest".into()));
        }
        Ok(manifest)
    }

    /// Returns the manifest that a signature states. The name of its only file may be empty, for any file.
    pub fn signed(entries: BTreeMap<String, InputDigest>) -> Manifest {
        Manifest { entries, is_signed: true }
    }

    /// Returns what states the digests, for errors.
    pub fn origin(&self) -> &'static str {
        if self.is_signed { "the signature" } else { "the manifest" }
    }

    /// Returns what to say about a file without a digest.
    pub fn missing(&self) -> &'static str {
        if self.is_signed {
            "the signature has no digest of the file"
        } else {
            "the manifest has no digest of the file; give it a line of sha256sum for the file"
        }
    }

    /// Returns the digest of the file at a path or URL: the digest of the longest name in which the path ends.
    pub fn find(&self, path: &str) -> Option<&InputDigest> {
        self.find_entry(path).map(|(_, digest)| digest)
    }

    /// Returns the name and the digest of the file at a path or URL.
    pub fn find_entry(&self, path: &str) -> Option<(&str, &InputDigest)> {
        let mut rest = path.trim_start_matches("./").trim_start_matches('/');
        loop {
            if let Some((name, digest)) = self.entries.get_key_value(rest) {
                return Some((name, digest));
            }
            if rest.is_empty() {
                return None;
            }
            rest = rest.split_once('/').map_or("", |(_, rest)| rest);
        }
    }

    /// Iterates over the names and digests.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&str, &InputDigest)> {
        self.entries.iter().map(|(name, digest)| (name.as_str(), digest))
    }

    fn add(&mut self, name: &str, digest: Digest) -> std::result::Result<(), String> {
        let name = normalized(name).ok_or_else(|| format!("{name:?} does not name a file inside a directory"))?;
        match self.entries.get(&name) {
            Some(other) if *other != digest.into() => Err(format!("{name:?} has two digests, one of them {digest}")),
            _ => {
                self.entries.insert(name, digest.into());
                Ok(())
            }
        }
    }
}

/// Returns a relative path without `.` parts, or `None` if it does not name a file inside a directory.
pub fn normalized(name: &str) -> Option<String> {
    let parts: Vec<&str> = name.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    (!parts.is_empty() && !parts.contains(&"..")).then(|| parts.join("/"))
}

fn parse_json(text: &str) -> Result<Manifest> {
    let mut parser = serde_json::Deserializer::from_str(text);
    let parsed = parser.deserialize_map(ManifestVisitor).and_then(|manifest| parser.end().map(|()| manifest));
    parsed.map_err(|error| Error::new(Kind::Malformed, format!("the manifest is not valid: {error}")))
}

struct ManifestVisitor;

impl<'de> Visitor<'de> for ManifestVisitor {
    type Value = Manifest;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of file names and digests such as \"sha256:...\"")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Manifest, A::Error> {
        let mut manifest = Manifest::default();
        while let Some((name, text)) = map.next_entry::<String, String>()? {
            let invalid =
                || A::Error::custom(format!("{text:?} is not \"sha256:\" or another algorithm and its digits"));
            manifest.add(&name, text.parse().map_err(|()| invalid())?).map_err(A::Error::custom)?;
        }
        Ok(manifest)
    }
}

/// Parses lines `<digits>  <name>`, with a `*` before the name of a binary file, or `SHA256 (<name>) = <digits>`. A
/// backslash before a line says that its name has escapes.
fn parse_lines(text: &str) -> Result<Manifest> {
    let mut manifest = Manifest::default();
    for (number, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let located = |message: String| Error::new(Kind::Malformed, format!("line {}: {message}", number + 1));
        let (is_escaped, line) = line.strip_prefix('\\').map_or((false, line), |line| (true, line));
        let parsed = parse_tagged(line).or_else(|| parse_plain(line));
        let (name, digest) = parsed.ok_or_else(|| {
            located("expected 64 digits and a file name, as sha256sum prints them, or a JSON object".into())
        })?;
        let name = if is_escaped { unescape(name) } else { name.to_owned() };
        manifest.add(&name, digest).map_err(located)?;
    }
    Ok(manifest)
}

fn parse_tagged(line: &str) -> Option<(&str, Digest)> {
    let (tag, rest) = line.split_once(" (")?;
    let (name, hex) = rest.rsplit_once(") = ")?;
    let algorithm = match tag {
        "SHA256" => Algorithm::Sha256,
        "BLAKE3" => Algorithm::Blake3,
        "BLAKE2b" => Algorithm::Blake2b,
        _ => return None,
    };
    Some((name, Digest::from_hex(algorithm, hex.trim_end())?))
}

fn parse_plain(line: &str) -> Option<(&str, Digest)> {
    let (hex, name) = line.split_once(' ')?;
    let name = name.strip_prefix([' ', '*'])?;
    let digest = match hex.split_once(':') {
        Some(_) => hex.parse().ok()?,
        None => Digest::from_hex(Algorithm::Sha256, hex)?,
    };
    Some((name, digest))
}

fn unescape(name: &str) -> String {
    let mut plain = String::with_capacity(name.len());
    let mut characters = name.chars();
    while let Some(character) = characters.next() {
        match (character, character == '\\') {
            (_, true) => match characters.next() {
                Some('n') => plain.push('\n'),
                Some('r') => plain.push('\r'),
                Some(other) => plain.push(other),
                None => plain.push('\\'),
            },
            (other, false) => plain.push(other),
        }
    }
    plain
}
