//! Deltas: checkpoints with the changes from one version of a model to the next.
//!
//! A delta is a directory or prefix with an index, whose `metadata` states the versions and the encoding. Each tensor that
//! changes is stored under its own name, as a `U8` tensor with one zstd [frame]. The metadata of its file has the checksum
//! of the new bytes under that name. docs/deltas.md has the format.
//!
//! A [`sparse`] patch of a trainer is a delta, too: one file with positions and values of elements.
//!
//! An [`update_source`] is a whole checkpoint or a [`chain`] of deltas. [`work`] reads the frames of a chain and computes the
//! changes of many tensors. [`decode`] computes the elements of one tensor that change, from its old bytes and the frames
//! of all deltas of the chain; [`encode`] is the reverse for one delta. Neither of the last two uses files.

pub mod chain;
pub mod changes;
pub mod decode;
mod difference;
mod elements;
pub mod encode;
mod frame;
mod frames;
mod patch;
pub mod properties;
mod sparse;
pub mod update_source;
pub mod work;

use crate::digest::Algorithm;
use crate::error::named_enum;

named_enum! {
    /// Encoding of the changes of a tensor.
    Encoding,
    /// Returns the name in metadata and in arguments.
    name:
    /// New bytes XOR old bytes, for all bytes of the tensor. Decodes to nonsense on any other old bytes.
    Xor = "xor",
    /// Number of the bytes that change, their positions, and their new values. The numbers have 32 bits.
    Overwrite = "overwrite",
    /// Positions of elements, as signed integers of 32 bits in any order, and their new values. Without a frame.
    Raw = "raw",
    /// Numbers of elements before each change that do not change, of 16 or 32 bits, and the new values. Without a frame.
    GapDelta = "gap_delta",
}

impl Encoding {
    /// Encodings of frames, which fst writes.
    pub const OF_FRAMES: [Encoding; 2] = [Encoding::Xor, Encoding::Overwrite];
    /// Encodings of sparse patches.
    pub const OF_PATCHES: [Encoding; 2] = [Encoding::Raw, Encoding::GapDelta];

    /// Returns the encoding with this name among others.
    pub fn from_name(name: &str, among: &[Encoding]) -> Option<Encoding> {
        among.iter().copied().find(|encoding| encoding.name() == name)
    }
}

/// Checksums of deltas.
pub const CHECKSUMS: [Algorithm; 3] = [Algorithm::Xxh3, Algorithm::Blake3, Algorithm::Adler32];

/// Returns the checksum with this name.
pub fn checksum_from_name(name: &str) -> Option<Algorithm> {
    CHECKSUMS.into_iter().find(|algorithm| algorithm.name() == name)
}

/// Size in bytes of the blocks in which tensors are decoded and encoded: old bytes and new bytes stay in the L1 cache. A
/// multiple of all sizes of elements.
const BLOCK_BYTES: usize = 16 << 10;
