//! Index file of a sharded checkpoint: `{"weight_map": {"tensor name": "file name", ...}, ...}`.
//!
//! The file is parsed while it is read. Only the names in `weight_map` take memory, so the rest of the file may hold
//! anything.

use crate::error::{Error, Kind, Result};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::error::Category;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{BufReader, Read};
use std::path::{Component, Path};

const WEIGHT_MAP: &str = "weight_map";

/// Sorted names of tensors by the name of their file.
type Shards = BTreeMap<String, BTreeSet<String>>;

/// Reads an index.
///
/// # Errors
/// `malformed`, without the path of the index; `io` if reading fails.
pub(super) fn read(file: impl Read) -> Result<Shards> {
    let mut parser = serde_json::Deserializer::from_reader(BufReader::new(file));
    let parsed = parser.deserialize_map(IndexVisitor).and_then(|shards| parser.end().map(|()| shards));
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
    type Value = Shards;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with an object {WEIGHT_MAP:?} of tensor names to file names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut shards = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != WEIGHT_MAP {
                map.next_value::<IgnoredAny>()?;
            } else if shards.replace(map.next_value::<WeightMap>()?.0).is_some() {
                return Err(A::Error::custom(format!("the key {WEIGHT_MAP:?} occurs twice")));
            }
        }
        shards
            .ok_or_else(|| A::Error::custom(format!("expected an object {WEIGHT_MAP:?} of tensor names to file names")))
    }
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
