//! File formats: headers of safetensors and of tensorizer's `.tensors`, and layouts of new files.

pub mod digests;
pub mod encryption;
pub mod header;
pub mod layout;
pub mod shard;
pub mod tensors;

/// Reserved key of a safetensors header, which holds text entries instead of a tensor.
pub const METADATA_KEY: &str = "__metadata__";
