//! Loading of tensors from files into memory.

pub mod stream;
pub mod transfer;
pub mod views;
