//! Loads safetensors files into tensors on a GPU or on the CPU, and saves tensors as safetensors files.
//!
//! # Data path of a load
//!
//! The modules are listed in the order of the data path:
//!
//! 1. [`source`] resolves a path to a list of files.
//! 2. [`format`] parses and checks the header of each file: names, dtypes, shapes and byte ranges.
//! 3. [`checkpoint`] resolves requested names across all files. A [selection](checkpoint::selection) holds the
//!    requested [regions](checkpoint::region) of one load.
//! 4. [`plan`] turns a selection and its destinations into reads and copies.
//! 5. [`reader`] reads the bytes of a file, [`staging`] holds them in pinned slots, and [`device`] copies them to their
//!    destination.
//! 6. [`load::transfer`] runs these stages. [`load::stream`] runs a transfer in the background and returns each tensor
//!    once its bytes are complete.
//!
//! When several ranks load a checkpoint together, [`group`] first plans which rank reads which bytes, and to which
//! ranks it sends them.
//!
//! # Data path of a save
//!
//! A [layout](format::layout) assigns each tensor its byte range in the new file. [`save`] copies bytes from
//! [the memory of tensors](save::memory) into slots, and writes the slots to an [output file](save::atomic_file). A
//! [writer](save::writer) does the same for tensors that are appended one by one.
//!
//! # Deltas
//!
//! A [`delta`] is a checkpoint with the changes of another one. Its frames are loaded like any tensors, and decoded to the
//! elements that change.
//!
//! # Interfaces
//!
//! Loads and saves hash bytes on their way with [`digest`], and compare digests with those that a file carries
//! ([`format::digests`]), a manifest or a [`signature`] states.
//!
//! Each stage records spans in a [`profile`] while a profile is active. With the feature `bridge`, the module `bridge`
//! exports the crate to C++, which registers the operators.
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
pub mod delta;
pub mod plan;
pub mod group;
pub mod reader;
pub mod device;
pub mod staging;
pub mod load;
pub mod save;
#[cfg(feature = "bridge")]
mod bridge;

pub use error::{Error, Result};
