//! Index file of a sharded checkpoint: `{"weight_map": {"tensor name": "file name", ...}, ...}`.
//!
//! The file is parsed while it is read. Only the names in `weight_map` take memory, so the rest of the file may hold
//! anything.

use crate::error::{Error, Kind, Result};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
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
    let mut failed_name = None;
    let mut parser = serde_json::Deserializer::from_reader(BufReader::new(file));
    let parsed =
        IndexSeed { failed_name: &mut failed_name }.deserialize(&mut parser).and_then(|map| parser.end().map(|()| map));
    parsed.map_err(|error| {
        let fault = match error.classify() {
            serde_json::error::Category::Io => Error::new(Kind::Io, format!("cannot read: {error}")),
            serde_json::error::Category::Data => {
                Error::new(Kind::Malformed, format!("the index is not valid: {error}"))
            }
            _ => Error::new(Kind::Malformed, format!("the index is not JSON: {error}")),
        };
        match failed_name {
            Some(name) => fault.tensor(name),
            None => fault,
        }
    })
}

/// Returns whether a file name stays inside the directory of the index.
fn is_inside(file: &str) -> bool {
    !file.is_empty() && Path::new(file).components().all(|part| matches!(part, Component::Normal(_)))
}

struct IndexSeed<'a> {
    /// Tensor at which parsing failed, which an error of `serde_json` cannot hold.
    failed_name: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for IndexSeed<'_> {
    type Value = Shards;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for IndexSeed<'_> {
    type Value = Shards;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with an object {WEIGHT_MAP:?} of tensor names to file names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut shards = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != WEIGHT_MAP {
                map.next_value::<IgnoredAny>()?;
            } else if shards.replace(map.next_value_seed(WeightMapSeed { failed_name: self.failed_name })?).is_some() {
                return Err(A::Error::custom(format!("the key {WEIGHT_MAP:?} occurs twice")));
            }
        }
        shards
            .ok_or_else(|| A::Error::custom(format!("expected an object {WEIGHT_MAP:?} of tensor names to file names")))
    }
}

struct WeightMapSeed<'a> {
    failed_name: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for WeightMapSeed<'_> {
    type Value = Shards;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMapSeed<'_> {
    type Value = Shards;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object {WEIGHT_MAP:?} of tensor names to file names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut shards = Shards::new();
        while let Some(name) = map.next_key::<String>()? {
            let file = match map.next_value_seed(FileSeed) {
                Ok(file) => file,
                Err(error) => {
                    *self.failed_name = Some(name);
                    return Err(error);
                }
            };
            shards.entry(file).or_default().insert(name);
        }
        Ok(shards)
    }
}

/// Name of a file beside the index.
struct FileSeed;

impl<'de> DeserializeSeed<'de> for FileSeed {
    type Value = String;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for FileSeed {
    type Value = String;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a file beside the index")
    }
    fn visit_str<E: serde::de::Error>(self, file: &str) -> std::result::Result<Self::Value, E> {
        match is_inside(file) {
            true => Ok(file.to_owned()),
            false => Err(E::invalid_value(serde::de::Unexpected::Str(file), &self)),
        }
    }
}
