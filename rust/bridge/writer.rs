//! Files whose tensors are appended one by one.

use super::ffi;
use super::guard::{guard, guard_with_log};
use super::save::NewFile;
use super::tensor::{device_stream, new_tensor};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::tensors::TensorKind;
use crate::format::tensors::cipher::Cipher;
use crate::format::tensors::layout::NewTensor;
use crate::options::Options;
use crate::save::memory::SourceMemory;
use crate::save::output::{self, Output};
use crate::save::writer::Writer;
use std::collections::btree_map::{BTreeMap, Entry};
use std::path::PathBuf;
use std::sync::Arc;

/// Writer of a file, and the devices of its tensors.
pub(super) struct AnyWriter {
    writer: Writer,
    path: PathBuf,
    /// Memory of the tensors, by the ordinal of the GPU, and by whether it belongs to mapped files.
    sources: BTreeMap<(i32, bool), Arc<dyn SourceMemory>>,
}

/// Begins a safetensors file, or one in tensorizer's format, whose metadata are ignored. `threads` encrypt the latter.
pub(super) fn begin_writer(file: &NewFile, is_tensorizer: bool, threads: usize) -> Result<Box<AnyWriter>> {
    guard_with_log(|| {
        let NewFile(file) = file;
        let options = Options::from_env()?;
        let writer = if is_tensorizer {
            let cipher = file.key.as_ref().map(Cipher::for_new_file).transpose()?.map(|cipher| (cipher, threads));
            Writer::begin_tensors(Output::open(&file.path, None)?, cipher, &options)?
        } else {
            Writer::begin(file.open()?, file.metadata.clone(), file.key.as_ref(), &options)?
        };
        Ok(Box::new(AnyWriter { writer, path: output::shown(&file.path)?, sources: BTreeMap::new() }))
    })
}

impl AnyWriter {
    /// Adds a tensor of a file in tensorizer's format, with its data.
    pub(super) fn write_hashed(
        &mut self,
        tensor: &ffi::NewTensor,
        kind: i64,
        module: i64,
        has_data: bool,
        data: &[u8],
    ) -> Result<()> {
        guard(|| {
            let refused =
                |message: String| Error::new(Kind::InvalidArgument, message).at(&self.path).tensor(&*tensor.name);
            let unsupported = || {
                let message = "fst has no dtype for it; cast it to another, or view it as one";
                Error::new(Kind::UnsupportedDtype, message).at(&self.path).tensor(&*tensor.name)
            };
            let negative = |_| refused(format!("a negative size in {:?}", tensor.shape));
            let tensor = NewTensor {
                name: tensor.name.clone(),
                kind: u8::try_from(kind)
                    .ok()
                    .and_then(TensorKind::from_number)
                    .ok_or_else(|| refused(format!("the kind is {kind}, but must be 0, 1 or 2")))?,
                module: u16::try_from(module).map_err(|_| {
                    refused(format!("the index of the module is {module}, but must be 0 to {}", u16::MAX))
                })?,
                dtype: Dtype::from_scalar_type(tensor.scalar_type).ok_or_else(unsupported)?,
                shape: tensor.shape.iter().map(|&size| u64::try_from(size).map_err(negative)).collect::<Result<_>>()?,
                has_data,
            };
            self.writer.write_hashed(tensor, data)
        })
    }

    pub(super) fn add(&mut self, tensor: &ffi::NewTensor) -> Result<()> {
        guard(|| self.writer.add(new_tensor(tensor).map_err(|error| error.at(&self.path))?))
    }

    /// Appends bytes of the tensor that was added last.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Writer::append`].
    pub(super) unsafe fn append(&mut self, stream: &ffi::DeviceStream, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let source = match self.sources.entry((stream.ordinal, stream.is_mapped)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(device_stream(stream)?.memory),
            };
            // SAFETY: the caller's promise is the same.
            unsafe { self.writer.append(source.as_ref(), stream.stream, address, bytes) }
        })
    }
}

pub(super) fn finish_writer(writer: Box<AnyWriter>) -> Result<()> {
    guard(|| writer.writer.finish())
}
