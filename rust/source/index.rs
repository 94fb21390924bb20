//! Index file of a sharded checkpoint: `{"metadata": {...}, "weight_map": {"tensor name": "file name", ...}, ...}`.
//!
//! The file is parsed while it is read. Only the names in `weight_map` and the values in `metadata` take memory, so the
//! rest of the file may hold anything.

use crate::error::{Error, Kind, Result};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use serde_json::error::Category;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{BufReader, Read};
use std::path::{Component, Path};

const WEIGHT_MAP: &str = "weight_map";
const METADATA: &str = "metadata";

/// Sorted names of tensors by the name of their file.
type Shards = BTreeMap<String, BTreeSet<String>>;

/// Content of an index.
pub(super) struct Index {
    /// Names of tensors by file.
    pub(super) shards: Shards,
    /// Metadata as texts: a value that is no text is its JSON. Empty if the file has no object of metadata.
    pub(super) metadata: BTreeMap<String, String>,
}

/// Reads an index.
///
/// # Errors
/// `malformed`, without the path of the index; `io` if reading fails.
pub(super) fn read(file: impl Read) -> Result<Index> {
    let mut parser = serde_json::Deserializer::from_reader(BufReader::new(file));
    let parsed = parser.deserialize_map(IndexVisitor).and_then(|index| parser.end().map(|()| index));
    parsed.map_err(|error| match error.classify() {
        Category::Io => Error::new(Kind::Io, format!("cannot read: {error}")),
        Category::Data => Error::new(Kind::Malformed, format!("the index is not valid: {error}")),
        _ => Error::new(Kind::Malformed, format!("the index is not JSON: {error}")),
    })
}

/// Returns whether a file name stays inside the directory of the index.
fn is_inside(file: &str) -> bool {
    !file.is_empty() && Path::new(file).components().all(|part| matches!(part, Component::Normal(_)))
}

struct IndexVisitor;

impl<'de> Visitor<'de> for IndexVisitor {
    type Value = Index;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with an object {WEIGHT_MAP:?} of tensor names to file names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut shards = None;
        let mut metadata = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == METADATA {
                metadata = texts(map.next_value()?);
            } else if key != WEIGHT_MAP {
                map.next_value::<IgnoredAny>()?;
            } else if shards.replace(map.next_value::<WeightMap>()?.0).is_some() {
                return Err(A::Error::custom(format!("the key {WEIGHT_MAP:?} occurs twice")));
            }
        }
        let absent = || A::Error::custom(format!("expected an object {WEIGHT_MAP:?} of tensor names to file names"));
        Ok(Index { shards: shards.ok_or_else(absent)?, metadata })
    }
}

fn texts(metadata: Value) -> BTreeMap<String, String> {
    let Value::Object(entries) = metadata else { return BTreeMap::new() };
    let text = |value| if let Value::String(text) = value { text } else { value.to_string() };
    entries.into_iter().map(|(key, value)| (key, text(value))).collect()
}

struct WeightMap(Shards);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object {WEIGHT_MAP:?} of tensor names to file names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut shards = Shards::new();
        while let Some(name) = map.next_key::<String>()? {
            match map.next_value()? {
                FileName::Text(file) if is_inside(&file) => shards.entry(file).or_default().insert(name),
                _ => {
                    return Err(A::Error::custom(format!(
                        "tensor {name:?}: expected the name of a file beside the index"
                    )));
                }
            };
        }
        Ok(WeightMap(shards))
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum FileName {
    Text(String),
    Other(IgnoredAny),
}
