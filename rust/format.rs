//! The safetensors file format: reading and writing of headers.

pub mod header;
pub mod layout;
