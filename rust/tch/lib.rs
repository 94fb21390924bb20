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
//! files carry, or the path or JSON text of a manifest with digests of whole files, or the text `{"signature": {"path":
//! "model.sig", "public_key": "key.pub"}}` of a signature, which has a manifest. A difference is an error of the kind
//! [`Integrity`](fst::error::Kind::Integrity). So is a load that the digests do not cover, such as a load of a slice or
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
use ffi::Value;
use fst::error::{Error, Kind as ErrorKind, Result};
use std::iter::FusedIterator;
use std::path::Path;
use tch::{Device, Tensor};

mod dtypes;
mod update;
mod values;

pub use dtypes::Dtypes;
pub use update::{Update, prepare_update, set_version, version_of};

#[cxx::bridge(namespace = "fst::tch")]
mod ffi {
    /// Kind of an argument. Arguments of one item use the first text or number, and `Dict` has each key before its value.
    enum Kind {
        None,
        Text,
        Device,
        Number,
        Texts,
        Numbers,
        Tensors,
        Dict,
    }

    /// Tensor as it crosses the FFI boundary.
    struct Handle {
        tensor: UniquePtr<Tensor>,
    }

    /// Argument of an operator, or the texts, numbers and tensors of its result.
    struct Value {
        kind: Kind,
        texts: Vec<String>,
        numbers: Vec<i64>,
        tensors: Vec<Handle>,
    }

    extern "Rust" {
        fn out_of_memory(text: &str) -> String;
    }

    unsafe extern "C++" {
        include!("tch.h");

        #[namespace = "at"]
        type Tensor;

        type Object;

        fn call_operator(name: &str, arguments: &[Value]) -> Result<Value>;
        fn object_of_operator(name: &str, arguments: &[Value]) -> Result<UniquePtr<Object>>;
        fn new_object(name: &str, arguments: &[Value]) -> Result<UniquePtr<Object>>;
        fn call_method(object: &Object, name: &str) -> Result<Value>;
    }
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

/// Limit for the size of all tensors that a stream has allocated and not yet returned.
const WINDOW_BYTES: i64 = 512 << 20;

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
    Ok(load("load_files", paths, vec![], device, dtype, verify)?.into_named())
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
    let names = Value::texts(names.iter().map(AsRef::as_ref));
    Ok(load("load_tensors", paths, vec![names], device, dtype, verify)?.into_tensors())
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
    let names = Value::texts(slices.iter().map(|slice| &*slice.name));
    let numbers = |of: fn(&Slice) -> i64| Value::numbers(slices.iter().map(of));
    let own = vec![names, numbers(|slice| slice.dim), numbers(|slice| slice.start), numbers(|slice| slice.length)];
    Ok(load("load_slices", paths, own, device, dtype, verify)?.into_tensors())
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
    let names = Value::texts(regions.iter().map(|region| &*region.name));
    let ranges = || regions.iter().flat_map(|region| &region.ranges);
    let numbers = |of: fn(&IndexRange) -> i64| Value::numbers(ranges().map(of));
    let own = vec![names, numbers(|range| range.start), numbers(|range| range.length), numbers(|range| range.step)];
    Ok(load("load_boxes", paths, own, device, dtype, verify)?.into_tensors())
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
    let verify = Value::text(verify.unwrap_or_default());
    run("load_into", &[Value::paths(paths)?, Value::names(outputs), Value::tensors(outputs), verify]).map(drop)
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
    run("verify", &[Value::paths(paths)?, Value::text(verify)]).map(drop)
}

/// Creates what the first load to a GPU would create, and the process keeps for later loads: pinned host memory, streams and
/// device kernels. Does nothing for the CPU.
///
/// ```
/// fst_tch::warm_up(tch::Device::cuda_if_available())?;
/// # Ok::<(), fst::Error>(())
/// ```
pub fn warm_up(device: Device) -> Result<()> {
    run("warm_up", &[Value::device(device)]).map(drop)
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
    Ok(run("release_memory", &[])?.numbers.into_iter().sum())
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
    let path = Value::path(path.as_ref())?;
    run("save_file", &[Value::tensors(tensors), Value::names(tensors), path, Value::metadata(metadata)]).map(drop)
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
    let arguments = [Value::tensors(tensors), Value::names(tensors), Value::metadata(metadata)];
    let file = run("serialize", &arguments)?.into_tensors().pop();
    let file = file.ok_or_else(|| Error::new(ErrorKind::Internal, "the operator returned no file"))?;
    let mut bytes = vec![0; file.numel()];
    file.copy_data_u8(&mut bytes, file.numel());
    Ok(bytes)
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
    let [dtype, patterns, dtypes] = Value::dtypes(dtype)?;
    let (names, order, verify) = (Value::optional(None), Value::text("file"), Value::text(verify.unwrap_or_default()));
    let window = Value::number(WINDOW_BYTES);
    let arguments =
        [Value::paths(paths)?, Value::device(device), names, dtype, window, order, verify, patterns, dtypes];
    let loader = call(ffi::new_object("Loader", &arguments))?;
    let total_bytes = call(ffi::call_method(&loader, "total_bytes"))?.numbers.into_iter().sum();
    Ok(Loader { loader, total_bytes })
}

/// Iterator over names and tensors, in file order. Returned by [`stream`].
///
/// Dropping the iterator ends the load and frees the tensors that were not returned. An error ends the iteration.
pub struct Loader {
    /// Null after the last item.
    loader: UniquePtr<ffi::Object>,
    total_bytes: i64,
}

// SAFETY: calls of the object in C++ from several threads run one after another.
unsafe impl Send for Loader {}

impl Loader {
    /// Returns the total size of all tensors in bytes, including those already returned.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes.unsigned_abs()
    }
}

impl Iterator for Loader {
    type Item = Result<(String, Tensor)>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = call(ffi::call_method(self.loader.as_ref()?, "next")).map(|item| item.into_named().pop());
        if !matches!(item, Ok(Some(_))) {
            self.loader = UniquePtr::null();
        }
        item.transpose()
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

fn run(operator: &str, arguments: &[Value]) -> Result<Value> {
    call(ffi::call_operator(operator, arguments))
}

/// Calls an operator that loads, of which `own` are its own arguments.
fn load<P: AsRef<Path>>(
    operator: &str,
    paths: &[P],
    own: Vec<Value>,
    device: Device,
    dtype: impl Into<Dtypes>,
    verify: Option<&str>,
) -> Result<Value> {
    let [dtype, patterns, dtypes] = Value::dtypes(dtype)?;
    let mut arguments = vec![Value::paths(paths)?];
    arguments.extend(own);
    arguments.extend([Value::device(device), dtype, Value::text(verify.unwrap_or_default()), patterns, dtypes]);
    run(operator, &arguments)
}

/// Compiles the program in the documentation.
#[cfg(doctest)]
#[doc = include_str!("../../docs/rust.md")]
struct Page;
