//! File formats: headers of safetensors and of tensorizer's `.tensors`, and layouts of new files.

pub mod digests;
pub mod encryption;
pub(crate) mod foreign;
pub mod header;
pub mod layout;
pub mod shard;
pub mod tensors;

use std::collections::BTreeMap;

/// Reserved key of a safetensors header, which holds text entries instead of a tensor.
pub const METADATA_KEY: &str = "__metadata__";

/// Text entries of a header. `None` omits the key; an empty map writes an empty object.
pub type Metadata = Option<BTreeMap<String, String>>;
