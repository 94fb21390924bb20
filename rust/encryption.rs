//! Keys of encrypted files.

pub mod secret;
