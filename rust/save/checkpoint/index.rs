//! Index of a new checkpoint.

use crate::error::{Error, Kind, Result};
use crate::source::replaced::SAVE_KEY;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::iter::once;

/// Content of a checkpoint whose files are complete.
#[derive(Debug, Deserialize)]
pub struct Content {
    /// Names of the tensors in each file.
    pub tensors: Vec<Vec<String>>,
    /// Size of all tensors in bytes.
    pub bytes: u64,
    /// Metadata of the index.
    pub metadata: BTreeMap<String, String>,
    /// Parts of objects that all processes have sent: the index of the object, and the index and the id of the part.
    pub parts: Vec<(usize, usize, String)>,
}

/// Returns an index that maps each tensor to the name of its file.
pub(super) fn text(files: &[String], content: &Content, token: &str) -> Result<String> {
    #[derive(Serialize)]
    struct Index<'a> {
        metadata: Metadata<'a>,
        #[serde(serialize_with = "in_order")]
        weight_map: Vec<(&'a String, &'a String)>,
    }
    #[derive(Serialize)]
    struct Metadata<'a> {
        total_size: u64,
        #[serde(flatten)]
        texts: BTreeMap<&'a str, &'a str>,
    }
    fn in_order<S: Serializer>(entries: &[(&String, &String)], serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(entries.iter().copied())
    }
    let texts = content.metadata.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let metadata = Metadata { total_size: content.bytes, texts: texts.chain(once((SAVE_KEY, token))).collect() };
    let shards = content.tensors.iter().zip(files);
    let weight_map = shards.flat_map(|(names, file)| names.iter().map(move |name| (name, file))).collect();
    let text = serde_json::to_string_pretty(&Index { metadata, weight_map });
    let text = text.map_err(|error| Error::new(Kind::Internal, error.to_string()))?;
    // Readers may decode the file by the locale of their process.
    Ok(text.chars().fold(String::with_capacity(text.len()), |mut ascii, character| {
        match character.is_ascii() {
            true => ascii.push(character),
            false => character.encode_utf16(&mut [0; 2]).iter().for_each(|unit| _ = write!(ascii, "\\u{unit:04x}")),
        }
        ascii
    }))
}
