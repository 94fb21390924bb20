//! The safetensors file format: reading and writing of headers.

pub mod header;
pub mod layout;

/// Reserved key of a header, which holds text entries instead of a tensor.
pub const METADATA_KEY: &str = "__metadata__";
