//! tensorizer's file format, `.tensors`: what the reader and the writer of its parts share.
//!
//! ```text
//! 0          73               73 + m                                           end of file
//! | preamble | metadata, m bytes | header a | data a | header b | data b | ... | 0 as u64 |
//! ```
//!
//! The metadata has an entry for each tensor, with the offsets of its header and of its data. Loads need the metadata, and
//! tensors of encrypted files the headers, which also have hashes and the indices of modules. Numbers are little-endian.
//! Nothing is aligned.

pub mod chunks;
pub mod cipher;
pub mod dtype;
pub mod encryption;
mod fields;
pub mod layout;
pub mod preamble;
mod salsa20;
pub mod tensor_header;

pub(super) use fields::Fields;

/// Number after the last tensor, in place of the size of another header.
pub const END: [u8; 8] = [0; 8];

/// First bytes of a file.
pub const MAGIC: &[u8] = b"|TZR|";

/// Use of a tensor in the program that wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorKind {
    /// Parameter of a module.
    Parameter = 0,
    /// Buffer of a module.
    Buffer = 1,
    /// Tensor of a state dictionary.
    StateDict = 2,
}

impl TensorKind {
    /// Returns the number in a file.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns the kind with this number in a file.
    pub fn from_number(number: u8) -> Option<TensorKind> {
        [TensorKind::Parameter, TensorKind::Buffer, TensorKind::StateDict]
            .into_iter()
            .find(|kind| kind.number() == number)
    }
}
