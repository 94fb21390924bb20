//! Sparse patches of trainers: safetensors files with positions and values of the elements that change.
//!
//! TRL writes `NAME.indices` and `NAME.values`, and in a later version `NAME.idx` and `NAME.val`.

use super::Encoding;
use super::properties::Properties;
use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

const FORMAT: &str = "format";
const SPARSE_PATCH: &str = "sparse_weight_patch";
const FORMAT_VERSION: &str = "version";
/// Only version of the format.
const FIRST: &str = "1";
const SPARSE: &str = "sparse";
const ENCODING: &str = "encoding";
const VERSION: &str = "model_version";
const BASE_VERSION: &str = "prev_model_version";
const CHANGED: &str = "changed_params";

/// Ends of the names of positions and of values.
const ENDINGS: [(&str, &str); 2] = [(".indices", ".values"), (".idx", ".val")];

/// Stored tensors with the changes of one tensor.
pub struct Pair {
    /// Names of the positions and of the values.
    pub names: [String; 2],
    /// Index of the file.
    pub file: usize,
    /// First byte of the positions in the file.
    pub begin: u64,
    /// Size of the positions in bytes.
    pub positions_bytes: u64,
    /// Number of elements that change.
    pub count: u64,
    /// Element type of the values.
    pub dtype: Dtype,
}

/// Returns whether the metadata of a file belong to a patch, which may have whole tensors.
pub fn is_patch(metadata: &BTreeMap<String, String>) -> bool {
    metadata.get(FORMAT).is_some_and(|format| format == SPARSE_PATCH)
}

/// Returns the version of a patch that has whole tensors.
pub fn version_of_whole(metadata: &BTreeMap<String, String>) -> Option<&String> {
    let is_whole = is_patch(metadata) && metadata.get(SPARSE).is_some_and(|sparse| sparse == "False");
    metadata.get(VERSION).filter(|_| is_whole)
}

/// Reads the metadata of a patch. Fails with `malformed` if they state something unknown.
pub fn properties(path: &Path, metadata: &BTreeMap<String, String>) -> Result<Properties> {
    let value = |key: &str| metadata.get(key).map(String::as_str);
    let known = |key: &str, is: &str, known: &[&str]| {
        let message = format!("the metadata of the patch state {key:?}: {is:?}; known are {}", known.join(", "));
        Error::new(Kind::Malformed, message).at(path)
    };
    for (key, expected) in [(FORMAT_VERSION, FIRST), (SPARSE, "True")] {
        // The first writer has no `sparse`.
        let is = value(key).or((key == SPARSE).then_some("True")).unwrap_or_default();
        if is != expected {
            return Err(known(key, is, &[expected]));
        }
    }
    let encoding = value(ENCODING).unwrap_or(Encoding::Raw.name());
    let encodings = Encoding::OF_PATCHES;
    let unknown = || known(ENCODING, encoding, &encodings.map(Encoding::name));
    let encoding = Encoding::from_name(encoding, &encodings).ok_or_else(unknown)?;
    let version = value(VERSION).ok_or_else(|| {
        let message = format!("the metadata of the patch have no {VERSION:?}, which a patch must state");
        Error::new(Kind::Malformed, message).at(path)
    })?;
    // The first of all versions has the number -1 before it.
    let base_version = value(BASE_VERSION).filter(|version| !version.starts_with('-')).map(str::to_owned);
    Ok(Properties { base_version, version: version.to_owned(), encoding, checksum: None })
}

/// Pairs the tensors of the patch at a path, by the names of the tensors that they change. Fails with `malformed` for a
/// tensor without its other half, for another dtype or shape, and unless the names are those that the metadata list.
pub fn pairs(
    path: &Path,
    patch: &Checkpoint,
    encoding: Encoding,
    metadata: &BTreeMap<String, String>,
) -> Result<HashMap<String, Pair>> {
    let mut pairs = HashMap::new();
    for (file, entry) in patch.entries() {
        let malformed =
            |message: String| Error::new(Kind::Malformed, message).at(path).tensor(entry.name).offset(entry.begin);
        let Some((name, other, is_positions)) = half(entry.name) else {
            let message = "is neither positions nor values; a patch has NAME.indices and NAME.values, or NAME.idx and \
                           NAME.val, of each tensor NAME";
            return Err(malformed(message.to_owned()));
        };
        let Ok((_, values)) = patch.find(&other) else {
            return Err(malformed(format!("the patch has no {other:?} beside it; it is incomplete")));
        };
        if !is_positions {
            continue;
        }
        let dtypes: &[Dtype] = if encoding == Encoding::GapDelta { &[Dtype::U16, Dtype::U32] } else { &[Dtype::I32] };
        let (dtype, shape) = (entry.dtype, entry.shape);
        let &[count] = shape else {
            return Err(malformed(format!("has shape {shape:?}; positions have one dimension")));
        };
        if !dtypes.contains(&dtype) {
            let (names, encoding) = (dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>(), encoding.name());
            return Err(malformed(format!("has dtype {dtype}; positions in {encoding:?} have {}", names.join(" or "))));
        }
        if values.shape != shape {
            let message =
                format!("has {count} positions, but {other:?} has shape {:?}; give one value for each", values.shape);
            return Err(malformed(message));
        }
        let pair = Pair {
            names: [entry.name.to_owned(), other],
            file,
            begin: entry.begin,
            positions_bytes: entry.end - entry.begin,
            count,
            dtype: values.dtype,
        };
        if pairs.insert(name.to_owned(), pair).is_some() {
            return Err(malformed(format!("the patch changes {name:?} twice")));
        }
    }
    let malformed = |message: String| Error::new(Kind::Malformed, message).at(path);
    if let Some(listed) = metadata.get(CHANGED) {
        let listed: HashSet<String> = serde_json::from_str(listed).map_err(|error| {
            malformed(format!("the metadata {CHANGED:?} of the patch are no list of names: {error}"))
        })?;
        let absent = listed.iter().find(|name| !pairs.contains_key(*name));
        if let Some(name) = absent.or_else(|| pairs.keys().find(|name| !listed.contains(*name))) {
            let message = "only one of the tensors of the patch and its metadata";
            return Err(malformed(format!("{message} {CHANGED:?} have {name:?}; it is incomplete")));
        }
    }
    Ok(pairs)
}

/// Returns the tensor that a stored tensor changes, the name of its other half, and whether the first is the positions.
pub fn half(stored: &str) -> Option<(&str, String, bool)> {
    ENDINGS.iter().find_map(|(positions, values)| {
        let other = |ends, other, is_positions| {
            let name = stored.strip_suffix(ends)?;
            Some((name, format!("{name}{other}"), is_positions))
        };
        other(positions, values, true).or_else(|| other(values, positions, false))
    })
}
