//! Bytes of objects on their way: ranges that are read, parts that are stored, and copies on a local disk.

pub(super) mod adaptive_limit;
pub(super) mod body;
pub(super) mod cache;
pub mod concurrency;
mod first_bytes;
pub(super) mod get;
pub mod limits;
pub mod object;
pub(super) mod pieces;
pub(super) mod retry;
pub mod runtime;
pub mod upload;
