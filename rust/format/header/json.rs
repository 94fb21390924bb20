//! Parses JSON into an unchecked header: checks the types of values and that no key occurs twice.

use super::{DIMENSIONS_MAX, Header, LENGTH_BYTES, Record, to_u64};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::METADATA_KEY;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// Parses the JSON of a header. Offsets in errors count from the start of the file.
pub(super) fn parse(json: &[u8]) -> Result<Header> {
    let malformed = |offset: usize, message: String| {
        Error::new(Kind::Malformed, message).offset(LENGTH_BYTES.saturating_add(to_u64(offset)))
    };
    let text =
        std::str::from_utf8(json).map_err(|error| malformed(error.valid_up_to(), "the header is not UTF-8".into()))?;
    if let Some(zero) = json.iter().position(|&byte| byte == 0) {
        let message =
            "the header ends in zeros, as an interrupted download or copy leaves it; copy or download the file again";
        return Err(malformed(zero, message.to_owned()));
    }
    if !text.trim_ascii_start().starts_with('{') {
        return Err(malformed(0, "the header must be a JSON object and begin with '{'".into()));
    }
    let mut failed_name = None;
    let mut parser = serde_json::Deserializer::from_str(text);
    let parsed = parser.deserialize_map(HeaderVisitor { failed_name: &mut failed_name });
    let parsed = parsed.and_then(|header| parser.end().map(|()| header));
    parsed.map_err(|error| {
        let message = format!("the header is not valid safetensors: {}", without_position(&error));
        let fault = malformed(offset_of(text, &error), message);
        match failed_name.take() {
            Some(name) => fault.tensor(name),
            None => fault,
        }
    })
}

/// Converts the line and column of a `serde_json` error to a byte offset.
fn offset_of(text: &str, error: &serde_json::Error) -> usize {
    let lines = text.split_inclusive('\n').take(error.line().saturating_sub(1));
    lines.map(str::len).sum::<usize>().saturating_add(error.column().saturating_sub(1)).min(text.len())
}

fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => text.get(..end).unwrap_or(&text).to_owned(),
        None => text,
    }
}

/// String of the header, borrowed if it has no escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

struct HeaderVisitor<'a> {
    /// Tensor at which parsing failed, which an error of `serde_json` cannot hold.
    failed_name: &'a mut Option<String>,
}

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = Header;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensor names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut header = Header::default();
        let mut metadata = None;
        while let Some(Key(key)) = map.next_key()? {
            if key == METADATA_KEY {
                if metadata.is_some() {
                    return Err(A::Error::custom(format!("the key {METADATA_KEY:?} occurs twice")));
                }
                metadata = Some(map.next_value_seed(MetadataSeed)?);
            } else {
                let name_begin = header.names.len();
                header.names.push_str(&key);
                let name = name_begin..header.names.len();
                match map.next_value_seed(RecordSeed { name, sizes: &mut header.sizes }) {
                    Ok(record) => header.records.push(record),
                    Err(error) => {
                        *self.failed_name = Some(key.into_owned());
                        return Err(error);
                    }
                }
            }
        }
        header.metadata = metadata.flatten();
        Ok(header)
    }
}

struct MetadataSeed;

impl<'de> DeserializeSeed<'de> for MetadataSeed {
    type Value = Option<BTreeMap<String, String>>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Self::Value, D::Error> {
        // Some writers store `null` for missing metadata.
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed {
    type Value = Option<BTreeMap<String, String>>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{METADATA_KEY} to be an object of strings")
    }
    fn visit_unit<E>(self) -> std::result::Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        while let Some(Key(key)) = map.next_key()? {
            let Key(value) = map.next_value()?;
            if metadata.insert(key.clone().into_owned(), value.into_owned()).is_some() {
                return Err(A::Error::custom(format!("the key {key:?} occurs twice in {METADATA_KEY}")));
            }
        }
        Ok(Some(metadata))
    }
}

/// Parses one tensor. Appends its shape to the array of all shapes.
struct RecordSeed<'a> {
    name: Range<usize>,
    sizes: &'a mut Vec<u64>,
}

impl<'de> DeserializeSeed<'de> for RecordSeed<'_> {
    type Value = Record;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for RecordSeed<'_> {
    type Value = Record;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(Key(key)) = map.next_key()? {
            let is_duplicate = match &*key {
                "dtype" => {
                    let Key(name) = map.next_value()?;
                    let known = Dtype::from_name(&name)
                        .ok_or_else(|| A::Error::custom(format!("{name:?} is not a dtype of the format")))?;
                    dtype.replace(known).is_some()
                }
                "shape" => {
                    let begin = self.sizes.len();
                    map.next_value_seed(Numbers { into: self.sizes, count_max: DIMENSIONS_MAX })?;
                    shape.replace(begin..self.sizes.len()).is_some()
                }
                "data_offsets" => {
                    let mut numbers = Vec::with_capacity(2);
                    map.next_value_seed(Numbers { into: &mut numbers, count_max: 2 })?;
                    offsets.replace(numbers).is_some()
                }
                // A later version of the format may add fields.
                _ => {
                    map.next_value_seed(Ignored)?;
                    false
                }
            };
            if is_duplicate {
                return Err(A::Error::custom(format!("the key {key:?} occurs twice")));
            }
        }
        let missing = |field: &str| A::Error::custom(format!("the field {field:?} is missing"));
        let dtype = dtype.ok_or_else(|| missing("dtype"))?;
        let shape = shape.ok_or_else(|| missing("shape"))?;
        let offsets: Vec<u64> = offsets.ok_or_else(|| missing("data_offsets"))?;
        let [begin, end] = offsets.try_into().map_err(|_| A::Error::custom("data_offsets must be two numbers"))?;
        Ok(Record { dtype, begin, end, name: self.name, shape, tensors: None })
    }
}

/// List of at most `count_max` unsigned numbers, appended to `into`.
struct Numbers<'a> {
    into: &'a mut Vec<u64>,
    count_max: usize,
}

impl<'de> DeserializeSeed<'de> for Numbers<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Numbers<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {} numbers", self.count_max)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<(), A::Error> {
        let mut count = 0;
        while let Some(number) = list.next_element::<u64>()? {
            count += 1;
            if count > self.count_max {
                return Err(A::Error::invalid_length(count, &self));
            }
            self.into.push(number);
        }
        Ok(())
    }
}

/// Any value, which is skipped. Unlike `serde::de::IgnoredAny`, it is subject to the recursion limit of `serde_json`.
struct Ignored;

impl<'de> DeserializeSeed<'de> for Ignored {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Ignored {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }
    fn visit_unit<E>(self) -> std::result::Result<(), E> {
        Ok(())
    }
    fn visit_bool<E>(self, _: bool) -> std::result::Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> std::result::Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> std::result::Result<(), E> {
        Ok(())
    }
    fn visit_f64<E>(self, _: f64) -> std::result::Result<(), E> {
        Ok(())
    }
    fn visit_str<E>(self, _: &str) -> std::result::Result<(), E> {
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<(), A::Error> {
        while list.next_element_seed(Ignored)?.is_some() {}
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        while map.next_key_seed(Ignored)?.is_some() {
            map.next_value_seed(Ignored)?;
        }
        Ok(())
    }
}
