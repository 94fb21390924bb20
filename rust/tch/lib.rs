//! Operators on [`tch::Tensor`](tch::Tensor), for Rust programs. Like the Python package,
//! this module is a user of the operators and not part of the core.
//!
//! ```
//! # let directory = tempfile::tempdir()?;
//! # std::env::set_current_dir(&directory)?;
//! use tch::{Device, Kind, Tensor};
//!
//! let weight = Tensor::ones([4, 3], (Kind::Float, Device::Cpu));
//! Tensor::write_safetensors(&[("weight", &weight)], "model.safetensors")?;
//!
//! let weights = fst_tch::load_file("model.safetensors", Device::cuda_if_available(), Kind::Half, None)?;
//! for (name, tensor) in &weights {
//!     println!("{name}: {:?} {:?}", tensor.kind(), tensor.size());
//! }
//! # assert_eq!(weights[0].1.kind(), Kind::Half);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Paths.** A path is a safetensors file, a directory that holds one checkpoint, or the index file of a sharded one.
//! All paths of a call form one checkpoint, in which each tensor name occurs once.
//!
//! **Dtypes.** `dtype` is a floating-point kind to which tensors stored as F16, BF16, F32 or F64 are cast. All other
//! tensors keep their dtype. A list of patterns casts only some of the tensors: see [`Dtypes`]. tch has no
//! [`Kind`](tch::Kind) for U16, U32, U64, F8_E8M0 and F4. Tensors of these dtypes load, but [`kind`](Tensor::kind)
//! panics on them: call [`f_kind`](Tensor::f_kind).
//!
//! **Digests.** `verify` compares the data with digests before any tensor is returned: `"digests"` with those that the
//! files carry, or the path or JSON text of a manifest with those of whole files, or the text `{"signature": {"path":
//! "model.sig", "public_key": "key.pub"}}` of a signature, which has a manifest. A difference is an error of the kind
//! [`Integrity`](fst::error::Kind::Integrity). So is a load that the digests do not cover, such as that of a slice or
//! of some tensors of a file with a manifest. The text `{"verify": {"source": "digests", "partial": "allow"}}` permits
//! it, with any of these texts as the source; the log (`FST_LOG=warn`) then names the tensors that were not compared.
//!
//! **Tensors** are ready on the current stream and share memory with no other tensor. On the CPU, tensors of local
//! files are views of private mappings: pages are read on first use, and a write changes neither the file nor another
//! tensor. If another process truncates a mapped file, access to the missing pages ends this process with SIGBUS;
//! `FST_READER=pread` avoids that.
//!
//! **Errors** are [`Error`]s with the kind and the text of the core. Errors of PyTorch itself have the kind
//! [`Device`](fst::error::Kind::Device), or [`OutOfMemory`](fst::error::Kind::OutOfMemory) on a GPU.

use cxx::UniquePtr;
use dtypes::rules;
use fst::error::{Error, Kind as ErrorKind, Result};
use std::iter::FusedIterator;
use std::mem::ManuallyDrop;
use std::path::Path;
use tch::{Device, Tensor};

mod dtypes;
mod update;

pub use dtypes::Dtypes;
pub use ffi::{IndexRange, Region, Slice};
pub use update::{Update, prepare_update, set_version, version_of};

#[cxx::bridge(namespace = "fst::tch")]
mod ffi {
    /// Tensor with its name, as it crosses the FFI boundary.
    struct Named {
        name: String,
        tensor: UniquePtr<Tensor>,
    }

    /// Dtype for the tensors that a pattern matches.
    struct DtypeRule {
        pattern: String,
        /// Value of `c10::ScalarType`, or -1 for the stored dtype.
        scalar_type: i8,
    }

    /// Arguments of all loads. `device` is a device string of PyTorch, and `verify` the argument of the operators.
    struct Load {
        paths: Vec<String>,
        device: String,
        dtypes: Vec<DtypeRule>,
        verify: String,
    }

    /// Entry of a file's metadata.
    struct MetadataEntry {
        key: String,
        value: String,
    }

    /// Indices `start` to `start + length` of a dimension, as [`narrow`](tch::Tensor::narrow) takes them.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Slice {
        /// Name of the tensor.
        pub name: String,
        /// Dimension; a negative one counts from the last.
        pub dim: i64,
        /// First index.
        pub start: i64,
        /// Number of indices.
        pub length: i64,
    }

    /// Range of indices of one dimension: `start`, `start + step`, and so on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct IndexRange {
        /// First index.
        pub start: i64,
        /// Number of indices.
        pub length: i64,
        /// Distance between consecutive indices.
        pub step: i64,
    }

    /// Index region of a tensor.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Region {
        /// Name of the tensor.
        pub name: String,
        /// One range for each dimension.
        pub ranges: Vec<IndexRange>,
    }

    extern "Rust" {
        fn out_of_memory(text: &str) -> String;
    }

    unsafe extern "C++" {
        include!("tch.h");

        #[namespace = "at"]
        type Tensor;

        fn load_files(load: &Load) -> Result<Vec<Named>>;
        fn load_tensors(load: &Load, names: &[String]) -> Result<Vec<Named>>;
        fn load_slices(load: &Load, slices: &[Slice]) -> Result<Vec<Named>>;
        fn load_boxes(load: &Load, regions: &[Region]) -> Result<Vec<Named>>;
        fn load_into(paths: &[String], outputs: &[Named], verify: &str) -> Result<()>;
        fn verify(paths: &[String], verify: &str) -> Result<()>;
        fn save_file(tensors: &[Named], path: &str, metadata: &[MetadataEntry]) -> Result<()>;
        fn serialize(tensors: &[Named], metadata: &[MetadataEntry]) -> Result<Vec<u8>>;

        fn prepare(device: &str) -> Result<()>;
        fn release_memory() -> Result<i64>;

        #[namespace = "fst"]
        type Loader;
        fn open_loader(load: &Load) -> Result<UniquePtr<Loader>>;
        fn next(loader: Pin<&mut Loader>) -> Result<Vec<Named>>;
        fn total_bytes(self: &Loader) -> Result<i64>;

        // A version is a slice or vector of one text, or empty.
        #[namespace = "fst"]
        type Update;
        fn prepare_update(
            paths: &[String],
            outputs: &[Named],
            version: &[String],
            verify: &str,
        ) -> Result<UniquePtr<Update>>;
        fn commit(self: &Update) -> Result<()>;
        fn staged_bytes(self: &Update) -> Result<i64>;
        fn version(update: &Update) -> Result<Vec<String>>;
        fn version_of(tensors: &[Named]) -> Result<Vec<String>>;
        fn set_version(tensors: &[Named], version: &[String]) -> Result<()>;
    }
}

// SAFETY: a loader may be called from any thread, one at a time, and `&self` methods return constants.
unsafe impl Send for ffi::Loader {}

/// Loads every tensor of a checkpoint, in the order of the bytes in its files.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// # tch::Tensor::write_safetensors(&[("weight", tch::Tensor::from_slice(&[1f32, 2.0]))], "model.safetensors")?;
/// use std::collections::HashMap;
/// use tch::{Device, Tensor};
///
/// let weights: HashMap<String, Tensor> = fst_tch::load_file("model.safetensors", Device::Cpu, None, None)?.into_iter().collect();
/// assert_eq!(weights["weight"], Tensor::from_slice(&[1f32, 2.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load_file(
    path: impl AsRef<Path>,
    device: Device,
    dtype: impl Into<Dtypes>,
    verify: Option<&str>,
) -> Result<Vec<(String, Tensor)>> {
    load_files(&[path], device, dtype, verify)
}

/// Loads every tensor of several files, in the order of the files.
pub fn load_files<P: AsRef<Path>>(
    paths: &[P],
    device: Device,
    dtype: impl Into<Dtypes>,
    verify: Option<&str>,
) -> Result<Vec<(String, Tensor)>> {
    let loaded = call(ffi::load_files(&load(paths, device, dtype, verify)?))?;
    Ok(loaded.into_iter().map(from_cxx).collect())
}

/// Loads the named tensors, one for each name and in their order. Reads only headers and the bytes of these tensors.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// # let tensor = |value: f32| tch::Tensor::from_slice(&[value]);
/// # tch::Tensor::write_safetensors(&[("weight", tensor(1.0)), ("bias", tensor(2.0))], "model.safetensors")?;
/// let tensors = fst_tch::load_tensors(&["model.safetensors"], &["weight", "bias"], tch::Device::Cpu, None, None)?;
/// assert_eq!(tensors[1].double_value(&[0]), 2.0);
///
/// let error = fst_tch::load_tensors(&["model.safetensors"], &["wieght"], tch::Device::Cpu, None, None).unwrap_err();
/// assert_eq!(error.kind(), fst::error::Kind::TensorNotFound);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load_tensors<P: AsRef<Path>, S: AsRef<str>>(
    paths: &[P],
    names: &[S],
    device: Device,
    dtype: impl Into<Dtypes>,
    verify: Option<&str>,
) -> Result<Vec<Tensor>> {
    let names: Vec<String> = names.iter().map(|name| name.as_ref().to_owned()).collect();
    tensors(ffi::load_tensors(&load(paths, device, dtype, verify)?, &names))
}

/// Loads a contiguous tensor for each slice, in their order, and reads only the bytes that the slices need.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// # tch::Tensor::write_safetensors(&[("weight", tch::Tensor::from_slice(&[1f32, 2.0, 3.0]))], "model.safetensors")?;
/// use fst_tch::{Slice, load_slices};
/// use tch::{Device, Tensor};
///
/// let slice = Slice { name: "weight".into(), dim: 0, start: 1, length: 2 };
/// let tensors = load_slices(&["model.safetensors"], &[slice], Device::Cpu, None, None)?;
/// assert_eq!(tensors, [Tensor::from_slice(&[2f32, 3.0])]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load_slices<P: AsRef<Path>>(
    paths: &[P],
    slices: &[Slice],
    device: Device,
    dtype: impl Into<Dtypes>,
    verify: Option<&str>,
) -> Result<Vec<Tensor>> {
    tensors(ffi::load_slices(&load(paths, device, dtype, verify)?, slices))
}

/// Loads index regions into contiguous tensors, in the order of `regions`. Reads only the bytes of the regions.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// # tch::Tensor::write_safetensors(&[("weight", tch::Tensor::from_slice(&[1f32, 2.0, 3.0]))], "model.safetensors")?;
/// use fst_tch::{IndexRange, Region, load_boxes};
/// use tch::{Device, Tensor};
///
/// let region = Region { name: "weight".into(), ranges: vec![IndexRange { start: 0, length: 2, step: 2 }] };
/// let tensors = load_boxes(&["model.safetensors"], &[region], Device::Cpu, None, None)?;
/// assert_eq!(tensors, [Tensor::from_slice(&[1f32, 3.0])]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load_boxes<P: AsRef<Path>>(
    paths: &[P],
    regions: &[Region],
    device: Device,
    dtype: impl Into<Dtypes>,
    verify: Option<&str>,
) -> Result<Vec<Tensor>> {
    tensors(ffi::load_boxes(&load(paths, device, dtype, verify)?, regions))
}

/// Overwrites existing tensors in place with the stored tensors of the same names.
///
/// Each output must have the stored shape and dtype. All outputs are checked before anything is written. With `verify`,
/// the data are read and compared before, and read a second time.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// # tch::Tensor::write_safetensors(&[("weight", tch::Tensor::from_slice(&[1f32, 2.0]))], "model.safetensors")?;
/// use tch::{Device, nn};
///
/// let store = nn::VarStore::new(Device::Cpu);
/// let weight = store.root().zeros("weight", &[2]);
/// let variables: Vec<_> = store.variables().into_iter().collect();
/// fst_tch::load_into(&["model.safetensors"], &variables, None)?;
/// assert_eq!(weight.double_value(&[1]), 2.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load_into<P: AsRef<Path>, S: AsRef<str>, T: AsRef<Tensor>>(
    paths: &[P],
    outputs: &[(S, T)],
    verify: Option<&str>,
) -> Result<()> {
    call(ffi::load_into(&all_utf8(paths)?, &to_cxx(outputs), verify.unwrap_or_default()))
}

/// Compares all data of a checkpoint with digests, as `verify` of the loads does, and loads nothing.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// use tch::{Device, Tensor};
///
/// let weight = Tensor::from_slice(&[1f32, 2.0]);
/// fst_tch::save_file(&[("weight", &weight)], "model.safetensors", &[("fst.digests", "blake3")])?;
/// fst_tch::verify(&["model.safetensors"], "digests")?;
/// let weights = fst_tch::load_file("model.safetensors", Device::Cpu, None, Some("digests"))?;
/// # assert_eq!(weights[0].1, weight);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn verify<P: AsRef<Path>>(paths: &[P], verify: &str) -> Result<()> {
    call(ffi::verify(&all_utf8(paths)?, verify))
}

/// Creates what the first load to a GPU would create, and the process keeps for later loads: pinned host memory, streams and
/// device kernels. Does nothing for the CPU.
///
/// ```
/// fst_tch::prepare(tch::Device::cuda_if_available())?;
/// # Ok::<(), fst::Error>(())
/// ```
pub fn prepare(device: Device) -> Result<()> {
    call(ffi::prepare(&device_name(device)))
}

/// Frees what the process keeps between loads, and returns the bytes of host memory that were freed.
///
/// Loads in progress keep what they use, and the next load allocates what it needs.
///
/// ```
/// fst_tch::release_memory()?;
/// # Ok::<(), fst::Error>(())
/// ```
pub fn release_memory() -> Result<i64> {
    call(ffi::release_memory())
}

/// Saves tensors as a safetensors file, with `metadata` in its header, from the CPU or a GPU.
///
/// The file is written under a temporary name, flushed and renamed, so `path` never holds a partial file. A file whose
/// tensors are still mapped may be replaced.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// use tch::{Device, Tensor};
///
/// let weight = Tensor::from_slice(&[1f32, 2.0]);
/// fst_tch::save_file(&[("weight", &weight)], "model.safetensors", &[("format", "pt")])?;
/// assert_eq!(fst_tch::load_file("model.safetensors", Device::Cpu, None, None)?, [("weight".to_owned(), weight)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn save_file<S: AsRef<str>, T: AsRef<Tensor>>(
    tensors: &[(S, T)],
    path: impl AsRef<Path>,
    metadata: &[(&str, &str)],
) -> Result<()> {
    call(ffi::save_file(&to_cxx(tensors), utf8(path.as_ref())?, &entries(metadata)))
}

/// Returns the bytes of the safetensors file that [`save_file`] would write.
///
/// ```
/// use tch::Tensor;
///
/// let weight = Tensor::from_slice(&[1f32, 2.0]);
/// let bytes = fst_tch::serialize(&[("weight", &weight)], &[("format", "pt")])?;
/// assert!(bytes.ends_with(&2f32.to_le_bytes()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn serialize<S: AsRef<str>, T: AsRef<Tensor>>(tensors: &[(S, T)], metadata: &[(&str, &str)]) -> Result<Vec<u8>> {
    call(ffi::serialize(&to_cxx(tensors), &entries(metadata)))
}

/// Loads every tensor of a checkpoint in the background, and returns each as soon as it is ready.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// # tch::Tensor::write_safetensors(&[("weight", tch::Tensor::from_slice(&[1f32, 2.0]))], "model.safetensors")?;
/// let tensors = fst_tch::stream(&["model.safetensors"], tch::Device::Cpu, None, None)?;
/// assert_eq!(tensors.total_bytes(), 8);
/// for item in tensors {
///     let (name, tensor) = item?;
///     println!("{name}: {:?}", tensor.size());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn stream<P: AsRef<Path>>(
    paths: &[P],
    device: Device,
    dtype: impl Into<Dtypes>,
    verify: Option<&str>,
) -> Result<Loader> {
    let loader = call(ffi::open_loader(&load(paths, device, dtype, verify)?))?;
    let total_bytes = u64::try_from(call(loader.total_bytes())?)
        .map_err(|_| Error::new(ErrorKind::Internal, "the size of the tensors is negative"))?;
    Ok(Loader { loader, total_bytes })
}

/// Iterator over names and tensors, in file order. Returned by [`stream`].
///
/// Dropping the iterator ends the load and frees the tensors that were not returned. An error ends the iteration.
pub struct Loader {
    /// Null after the last item.
    loader: UniquePtr<ffi::Loader>,
    total_bytes: u64,
}

impl Loader {
    /// Returns the total size of all tensors in bytes, including those already returned.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }
}

impl Iterator for Loader {
    type Item = Result<(String, Tensor)>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = call(ffi::next(self.loader.as_mut()?)).map(|named| named.into_iter().next());
        if !matches!(item, Ok(Some(_))) {
            self.loader = UniquePtr::null();
        }
        item.transpose().map(|named| named.map(from_cxx))
    }
}

impl FusedIterator for Loader {}

/// Converts a C++ exception to the error with its text.
fn call<T>(result: std::result::Result<T, cxx::Exception>) -> Result<T> {
    result.map_err(|exception| {
        let text = exception.what();
        Error::from_text(text).unwrap_or_else(|| Error::new(ErrorKind::Device, text))
    })
}

/// Returns the text of an out-of-memory error with its code, which errors of PyTorch's allocator lack.
fn out_of_memory(text: &str) -> String {
    Error::from_text(text).unwrap_or_else(|| Error::new(ErrorKind::OutOfMemory, text)).to_string()
}

fn load<P: AsRef<Path>>(
    paths: &[P],
    device: Device,
    dtype: impl Into<Dtypes>,
    verify: Option<&str>,
) -> Result<ffi::Load> {
    let verify = verify.unwrap_or_default().to_owned();
    Ok(ffi::Load { paths: all_utf8(paths)?, device: device_name(device), dtypes: rules(dtype)?, verify })
}

/// Returns loaded tensors without their names.
fn tensors(loaded: std::result::Result<Vec<ffi::Named>, cxx::Exception>) -> Result<Vec<Tensor>> {
    Ok(call(loaded)?.into_iter().map(|named| from_cxx(named).1).collect())
}

fn entries(metadata: &[(&str, &str)]) -> Vec<ffi::MetadataEntry> {
    let entry = |&(key, value): &(&str, &str)| ffi::MetadataEntry { key: key.to_owned(), value: value.to_owned() };
    metadata.iter().map(entry).collect()
}

fn utf8(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "the path is not UTF-8").at(path))
}

fn all_utf8<P: AsRef<Path>>(paths: &[P]) -> Result<Vec<String>> {
    paths.iter().map(|path| utf8(path.as_ref()).map(str::to_owned)).collect()
}

/// Returns PyTorch's name of a device.
fn device_name(device: Device) -> String {
    match device {
        Device::Cpu => "cpu".into(),
        Device::Cuda(index) => format!("cuda:{index}"),
        Device::Mps => "mps".into(),
        Device::Vulkan => "vulkan".into(),
    }
}

/// Takes over a tensor from C++. A `tch::Tensor` is a pointer to an `at::Tensor` from `new`, as is cxx's `UniquePtr`.
fn from_cxx(named: ffi::Named) -> (String, Tensor) {
    // SAFETY: ownership of the tensor moves to the result.
    (named.name, unsafe { Tensor::from_ptr(named.tensor.into_raw().cast()) })
}

fn to_cxx<S: AsRef<str>, T: AsRef<Tensor>>(tensors: &[(S, T)]) -> Vec<ffi::Named> {
    let to_cxx = |(name, tensor): &(S, T)| {
        // A second handle to the same tensor.
        let mut handle = ManuallyDrop::new(tensor.as_ref().shallow_clone());
        // SAFETY: ownership of the handle moves to the result.
        let tensor = unsafe { UniquePtr::from_raw(handle.as_mut_ptr().cast()) };
        ffi::Named { name: name.as_ref().to_owned(), tensor }
    };
    tensors.iter().map(to_cxx).collect()
}

/// Compiles the program in the documentation.
#[cfg(doctest)]
#[doc = include_str!("../../docs/rust.md")]
struct Page;
