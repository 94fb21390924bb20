//! Loads of tensors from files into memory.

pub mod shared_cache;
pub mod staged;
pub mod stream;
pub mod transfer;
pub mod views;
