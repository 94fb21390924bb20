//! Arguments and results of operators.

use super::dtypes::{Dtypes, numbers};
use super::ffi::{Handle, Kind, Value};
use cxx::UniquePtr;
use fst::error::{Error, Kind as ErrorKind, Result};
use std::mem::ManuallyDrop;
use std::path::Path;
use tch::{Device, Tensor};

impl Value {
    fn of(kind: Kind) -> Value {
        Value { kind, texts: Vec::new(), numbers: Vec::new(), tensors: Vec::new() }
    }

    pub(super) fn text(text: impl Into<String>) -> Value {
        Value { texts: vec![text.into()], ..Value::of(Kind::Text) }
    }

    pub(super) fn optional(text: Option<&str>) -> Value {
        text.map_or_else(|| Value::of(Kind::None), Value::text)
    }

    pub(super) fn texts<S: Into<String>>(texts: impl IntoIterator<Item = S>) -> Value {
        Value { texts: texts.into_iter().map(Into::into).collect(), ..Value::of(Kind::Texts) }
    }

    pub(super) fn number(number: i64) -> Value {
        Value { numbers: vec![number], ..Value::of(Kind::Number) }
    }

    pub(super) fn numbers(numbers: impl IntoIterator<Item = i64>) -> Value {
        Value { numbers: numbers.into_iter().collect(), ..Value::of(Kind::Numbers) }
    }

    pub(super) fn device(device: Device) -> Value {
        let name = match device {
            Device::Cpu => "cpu".into(),
            Device::Cuda(index) => format!("cuda:{index}"),
            Device::Mps => "mps".into(),
            Device::Vulkan => "vulkan".into(),
        };
        Value { texts: vec![name], ..Value::of(Kind::Device) }
    }

    pub(super) fn path(path: &Path) -> Result<Value> {
        utf8(path).map(Value::text)
    }

    pub(super) fn paths<P: AsRef<Path>>(paths: &[P]) -> Result<Value> {
        Ok(Value::texts(paths.iter().map(|path| utf8(path.as_ref())).collect::<Result<Vec<_>>>()?))
    }

    /// Returns metadata of a file. An empty list is none.
    pub(super) fn metadata(metadata: &[(&str, &str)]) -> Value {
        let texts = metadata.iter().flat_map(|&(key, value)| [key.to_owned(), value.to_owned()]).collect();
        Value { texts, ..Value::of(if metadata.is_empty() { Kind::None } else { Kind::Dict }) }
    }

    pub(super) fn names<S: AsRef<str>, T>(named: &[(S, T)]) -> Value {
        Value::texts(named.iter().map(|(name, _)| name.as_ref()))
    }

    pub(super) fn tensors<S, T: AsRef<Tensor>>(named: &[(S, T)]) -> Value {
        let handle = |(_, tensor): &(S, T)| {
            // A second handle to the same tensor. A `tch::Tensor` is a pointer to an `at::Tensor` from `new`, as is cxx's
            // `UniquePtr`.
            let mut handle = ManuallyDrop::new(tensor.as_ref().shallow_clone());
            // SAFETY: ownership of the handle moves to the result.
            Handle { tensor: unsafe { UniquePtr::from_raw(handle.as_mut_ptr().cast()) } }
        };
        Value { tensors: named.iter().map(handle).collect(), ..Value::of(Kind::Tensors) }
    }

    /// Returns the arguments `dtype`, `patterns` and `dtypes` of loads.
    pub(super) fn dtypes(dtypes: impl Into<Dtypes>) -> Result<[Value; 3]> {
        let (patterns, dtypes) = numbers(dtypes)?;
        Ok([Value::of(Kind::None), Value::texts(patterns), Value::numbers(dtypes)])
    }

    /// Takes the tensors of a result.
    pub(super) fn into_tensors(self) -> Vec<Tensor> {
        // SAFETY: ownership of the tensor moves to the result.
        self.tensors.into_iter().map(|handle| unsafe { Tensor::from_ptr(handle.tensor.into_raw().cast()) }).collect()
    }

    /// Takes the names and tensors of a result.
    pub(super) fn into_named(mut self) -> Vec<(String, Tensor)> {
        std::mem::take(&mut self.texts).into_iter().zip(self.into_tensors()).collect()
    }
}

fn utf8(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "the path is not UTF-8").at(path))
}
