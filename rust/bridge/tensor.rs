//! Decodes tensors of new files, their metadata and their devices.

use super::ffi;
use crate::device::cuda::Cuda;
use crate::device::host::Host;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::Metadata;
use crate::format::layout::{Tensor, dtype_of_file};
use crate::save::DeviceStream;
use crate::save::memory::{Mapped, SourceMemory};
use std::sync::Arc;

pub(super) fn new_tensor(tensor: &ffi::NewTensor) -> Result<Tensor> {
    let dtype = dtype_of_file(&tensor.name, Dtype::from_scalar_type(tensor.scalar_type))?;
    let negative =
        |_| Error::new(Kind::Internal, format!("a negative size in {:?}", tensor.shape)).tensor(&*tensor.name);
    let shape = tensor.shape.iter().map(|&size| u64::try_from(size).map_err(negative));
    Tensor::of_torch(&*tensor.name, dtype, shape.collect::<Result<_>>()?)
}

pub(super) fn metadata_of(metadata: &[ffi::MetadataEntry], has_metadata: bool) -> Metadata {
    has_metadata.then(|| metadata.iter().map(|entry| (entry.key.clone(), entry.value.clone())).collect())
}

pub(super) fn device_stream(stream: &ffi::DeviceStream) -> Result<DeviceStream> {
    let memory: Arc<dyn SourceMemory> = match stream.ordinal {
        ..0 if stream.is_mapped => Arc::new(Mapped),
        ..0 => Arc::new(Host),
        ordinal => Arc::new(Cuda::open(ordinal, stream.stream)?),
    };
    Ok(DeviceStream { memory, stream: stream.stream })
}
