//! Loads of tensors from files into memory.

pub mod background;
pub mod check;
pub mod model;
pub mod shared_cache;
pub mod small;
pub mod staged;
pub mod stream;
pub mod transfer;
pub mod verifier;
pub mod views;
