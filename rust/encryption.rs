//! Encryption of safetensors files: keys, their slots in headers, and the cipher of chunks. `docs/encryption.md` specifies
//! the format. The module of the same name in `format` has the part of it that concerns headers.

pub mod chunks;
pub mod cipher;
pub mod file_key;
pub mod key;
pub mod keyring;
pub mod secret;
pub mod slot;
pub mod wipe;

use crate::error::{Error, Kind, Result};
use ring::rand::{SecureRandom, SystemRandom};

/// Fills memory with random bytes.
pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    let missing = |_| Error::new(Kind::Internal, "the system has no random numbers for a key");
    SystemRandom::new().fill(bytes).map_err(missing)
}
