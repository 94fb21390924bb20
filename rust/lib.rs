//! fst loads safetensors files into tensors, on a GPU or the CPU, as fast as
//! the hardware allows.
//!
//! The trip of a byte, which is also the order of the modules:
//!
//! a path becomes a list of files ([`source`]); each file's header becomes
//! names, dtypes, shapes and byte ranges ([`format`]); all headers together
//! resolve the names a caller asks for ([`checkpoint`]) to [regions](checkpoint::region),
//! one [selection](checkpoint::selection) for each load; that and where it should go becomes reads
//! and placements ([`plan`]); bytes come out
//! of a file ([`reader`]) towards their destination ([`device`]), resting in a
//! pinned slot on the way ([`staging`]), while one loop keeps all of that busy
//! ([`load::transfer`]), which a [`load::stream`] runs while its caller already uses what has
//! landed.
//!
//! Where many ranks load together, a [`group`] plans before each of them does: who
//! reads which bytes, and who sends them to whom.
//!
//! The trip back: names, dtypes and shapes become the [layout](format::layout) of a new
//! file; bytes come from where tensors lie ([`save::memory`]) into slots and from
//! there into the file ([`save::atomic_file`]), while one loop keeps that busy ([`save`]), or
//! a [writer](save::writer) does it while its caller makes the next tensor.
//!
//! Each stretch tells a [`profile`] of itself while somebody asks.
//! With the feature `torch`, `bridge` hands this to C++, which registers the
//! operators. With the feature `tch`, the module of that name calls them for
//! Rust programs, as Python does for its own.
//!
//! A module uses only modules that stand before it in the list below.

pub mod error;
pub mod options;
pub mod dtype;
pub mod os;
pub mod profile;
pub mod source;
pub mod format;
pub mod convert;
pub mod checkpoint;
pub mod plan;
pub mod group;
pub mod reader;
pub mod device;
pub mod staging;
pub mod load;
pub mod save;
#[cfg(feature = "torch")]
mod bridge;
#[cfg(feature = "tch")]
pub mod tch;

pub use error::{Error, Result};
