//! Loads safetensors files into tensors on a GPU or on the CPU, and saves tensors as safetensors files.
//!
//! `docs/architecture.md` describes the data path of a load, and has a map of the modules. With the feature `bridge`, the
//! module `bridge` exports the crate to C++, which registers the operators.
//!
//! A module imports only modules that precede it in the list below.

pub mod error;
pub mod num;
pub mod units;
pub mod options;
pub mod dtype;
pub mod os;
pub mod profile;
pub mod digest;
pub mod signature;
pub mod encryption;
#[cfg(feature = "remote")]
pub mod remote;
#[cfg(not(feature = "remote"))]
#[path = "remote/absent.rs"]
pub mod remote;
pub mod source;
pub mod format;
pub mod cast;
pub mod checkpoint;
pub mod recipe;
pub mod plan;
pub mod ranks;
pub mod reader;
pub mod device;
pub mod staging;
pub mod load;
pub mod delta;
pub mod save;
#[cfg(feature = "bridge")]
mod bridge;

pub use error::{Error, Result};
