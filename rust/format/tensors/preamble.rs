//! First part of a `.tensors` file, before the metadata.

use super::{Fields, MAGIC};
use crate::error::{Error, Kind, Result};

/// Size in bytes.
pub const PREAMBLE_BYTES: u64 = 73;
/// [`PREAMBLE_BYTES`] as the size of an array.
pub const PREAMBLE_SIZE: usize = 73;

/// Version of a file whose dtypes are all in NumPy.
pub const VERSION_NUMPY: u32 = 1;
/// First version with other dtypes.
pub const VERSION_OPAQUE: u32 = 2;
/// First version with encryption. A file of this very version is encrypted.
pub const VERSION_ENCRYPTED: u32 = 3;
/// First version with tensors without data, and with feature flags.
pub const VERSION_FLAGS: u32 = 4;
/// First version with dimensions of 8 bytes.
pub const VERSION_LONG: u32 = 5;

const ENCRYPTED: u8 = 1;
const VERSIONED_ENTRIES: u8 = 2;

/// Checked fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// Version of the format.
    pub version: u32,
    /// Whether the data is encrypted.
    pub is_encrypted: bool,
    /// Whether each metadata entry begins with its version.
    pub has_entry_versions: bool,
    /// Size of the data of all tensors in bytes. A hint only.
    pub tensor_bytes: u64,
    /// Number of tensors.
    pub tensors: u64,
    /// Size of the metadata in bytes.
    pub metadata_bytes: u64,
}

impl Preamble {
    /// Parses the first bytes of a file. Fails with `malformed`, with the offset of the field.
    pub fn parse(bytes: &[u8]) -> Result<Preamble> {
        let malformed = |offset: u64, message: String| Error::new(Kind::Malformed, message).offset(offset);
        let mut fields = Fields::new(bytes, 0);
        if fields.take(MAGIC.len(), "the preamble")? != MAGIC {
            return Err(malformed(0, "the file does not begin as one of tensorizer".into()));
        }
        let version_begin = fields.offset();
        let version = fields.number::<4>("the version")?;
        let known = u32::try_from(version).ok().filter(|version| (VERSION_NUMPY..=VERSION_LONG).contains(version));
        let version = known.ok_or_else(|| {
            let message = format!(
                "the file has version {version} of tensorizer's format; versions {VERSION_NUMPY} to {VERSION_LONG} are \
                 known"
            );
            malformed(version_begin, message)
        })?;
        let flags_begin = fields.offset();
        let (&low, high) = fields.take(32, "the feature flags")?.split_first().unwrap_or((&0, &[]));
        if low & !(ENCRYPTED | VERSIONED_ENTRIES) != 0 || high.iter().any(|&byte| byte != 0) {
            return Err(malformed(flags_begin, "the file has features that fst does not know".into()));
        }
        let has_entry_versions = low & VERSIONED_ENTRIES != 0;
        if has_entry_versions && version < VERSION_LONG {
            return Err(malformed(flags_begin, format!("a file of version {version} has no versions of entries")));
        }
        let is_encrypted = version == VERSION_ENCRYPTED || (version >= VERSION_FLAGS && low & ENCRYPTED != 0);
        let tensor_bytes = fields.number::<8>("the size of the tensors")?;
        fields.number::<8>("an unused field")?;
        let tensors = fields.number::<8>("the number of tensors")?;
        let metadata_bytes = fields.number::<8>("the size of the metadata")?;
        Ok(Preamble { version, is_encrypted, has_entry_versions, tensor_bytes, tensors, metadata_bytes })
    }

    /// Returns the bytes of the file.
    pub fn encode(&self) -> [u8; PREAMBLE_SIZE] {
        let flags =
            if self.is_encrypted { ENCRYPTED } else { 0 } | if self.has_entry_versions { VERSIONED_ENTRIES } else { 0 };
        let mut bytes = [0; PREAMBLE_SIZE];
        let fields: [&[u8]; 8] = [
            MAGIC,
            &self.version.to_le_bytes(),
            &[flags],
            &[0; 31],
            &self.tensor_bytes.to_le_bytes(),
            &[0; 8],
            &self.tensors.to_le_bytes(),
            &self.metadata_bytes.to_le_bytes(),
        ];
        for (target, byte) in bytes.iter_mut().zip(fields.into_iter().flatten()) {
            *target = *byte;
        }
        bytes
    }
}
