//! Index file of a sharded checkpoint: `{"metadata": {...}, "weight_map": {"tensor name": "file name", ...}, ...}`.
//!
//! The file is parsed while it is read. Only the names in `weight_map` and the texts in `metadata` take memory, so the
//! rest of the file may hold anything.

use crate::error::{Error, Kind, Result};
use crate::remote::find::name::Name;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{BufRead, BufReader, Read};

const WEIGHT_MAP: &str = "weight_map";
const METADATA: &str = "metadata";
/// Key of the metadata that names the file with values that are not tensors. torch_ext/fst/_save/shards.py has the same.
pub const STATE: &str = "fst.state";

/// Sorted names of tensors by the name of their file.
type Shards = BTreeMap<Name, BTreeSet<String>>;

/// Content of an index.
pub(super) struct Index {
    /// Names of tensors by file.
    pub(super) shards: Shards,
    /// Texts, numbers and booleans of the metadata, as texts.
    pub(super) metadata: BTreeMap<String, String>,
    /// Name of the file with values that are not tensors.
    pub(super) state: Option<Name>,
}

/// Reads an index. Fails with `malformed`, without the path of the index; `io` if reading fails.
pub(super) fn read(file: impl Read) -> Result<Index> {
    let mut file = BufReader::new(file);
    let begin = file.fill_buf().map_err(|error| Error::new(Kind::Io, format!("cannot read: {error}")))?;
    // Editors of Windows put a mark before the text.
    let mark = if begin.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    file.consume(mark);
    let mut parser = serde_json::Deserializer::from_reader(file);
    let parsed = parser.deserialize_map(IndexVisitor).and_then(|index| parser.end().map(|()| index));
    parsed.map_err(|error| match error.classify() {
        Category::Io => Error::new(Kind::Io, format!("cannot read: {error}")),
        Category::Data => Error::new(Kind::Malformed, format!("the index is not valid: {error}")),
        _ => Error::new(Kind::Malformed, format!("the index is not JSON: {error}")),
    })
}

/// Parses the name of a file in the directory of the index. `owner` says what has it, for errors.
fn parse_name<E: serde::de::Error>(file: &str, owner: &str) -> std::result::Result<Name, E> {
    let refused = |why| E::custom(format!("{owner}: expected the name of a file beside the index, but {why}"));
    // A path may begin with the directory of the index.
    Name::parse(file.strip_prefix("./").unwrap_or(file)).map_err(refused)
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
                metadata = map.next_value::<Metadata>()?.0;
            } else if key != WEIGHT_MAP {
                map.next_value::<IgnoredAny>()?;
            } else if shards.replace(map.next_value::<WeightMap>()?.0).is_some() {
                return Err(A::Error::custom(format!("the key {WEIGHT_MAP:?} occurs twice")));
            }
        }
        let absent = || A::Error::custom(format!("expected an object {WEIGHT_MAP:?} of tensor names to file names"));
        let state = metadata.get(STATE).map(|file| parse_name(file, STATE)).transpose()?;
        Ok(Index { shards: shards.ok_or_else(absent)?, metadata, state })
    }
}

/// Metadata of an index. What is no object is ignored, as are its lists and objects.
struct Metadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let Content::Object(entries) = deserializer.deserialize_any(ContentVisitor { is_nested: false })? else {
            return Ok(Metadata(BTreeMap::new()));
        };
        Ok(Metadata(entries))
    }
}

/// Value of the metadata, or all of them.
enum Content {
    Text(String),
    Object(BTreeMap<String, String>),
    Ignored,
}

/// Visitor of the metadata, or of one value.
struct ContentVisitor {
    is_nested: bool,
}

impl<'de> DeserializeSeed<'de> for ContentVisitor {
    type Value = Content;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Content, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_str<E>(self, value: &str) -> std::result::Result<Content, E> {
        Ok(Content::Text(value.to_owned()))
    }
    fn visit_bool<E>(self, value: bool) -> std::result::Result<Content, E> {
        Ok(Content::Text(value.to_string()))
    }
    fn visit_u64<E>(self, value: u64) -> std::result::Result<Content, E> {
        Ok(Content::Text(value.to_string()))
    }
    fn visit_i64<E>(self, value: i64) -> std::result::Result<Content, E> {
        Ok(Content::Text(value.to_string()))
    }
    fn visit_f64<E>(self, value: f64) -> std::result::Result<Content, E> {
        Ok(Content::Text(value.to_string()))
    }
    fn visit_unit<E>(self) -> std::result::Result<Content, E> {
        Ok(Content::Ignored)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Content, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Content::Ignored)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Content, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if self.is_nested {
                map.next_value::<IgnoredAny>()?;
            } else if let Content::Text(value) = map.next_value_seed(ContentVisitor { is_nested: true })? {
                entries.insert(key, value);
            }
        }
        Ok(if self.is_nested { Content::Ignored } else { Content::Object(entries) })
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
            let FileName::Text(file) = map.next_value()? else {
                return Err(A::Error::custom(format!("tensor {name:?}: expected the name of a file beside the index")));
            };
            shards.entry(parse_name(&file, &format!("tensor {name:?}"))?).or_default().insert(name);
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
