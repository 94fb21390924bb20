//! Metadata of a new `.tensors` file, whose tensors are added one by one.

use super::TensorKind;
use super::dtype;
use super::encryption::Encryption;
use super::preamble::{
    PREAMBLE_SIZE, Preamble, VERSION_ENCRYPTED, VERSION_FLAGS, VERSION_LONG, VERSION_NUMPY, VERSION_OPAQUE,
};
use super::tensor_header::{Description, encode};
use crate::digest::{Algorithm, Digest};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::HEADER_BYTES_MAX;
use crate::num::to_u64;
use crate::os::compute_pool;
use std::sync::OnceLock;

/// Size of the offsets of a tensor's header and data, in bytes.
const OFFSETS_SIZE: usize = 16;

/// Tensor of a new file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTensor {
    /// Name.
    pub name: String,
    /// Use of the tensor.
    pub kind: TensorKind,
    /// Index of the tensor's module.
    pub module: u16,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, in PyTorch's elements.
    pub shape: Vec<u64>,
    /// Whether the file gets the data of the tensor.
    pub has_data: bool,
}

impl NewTensor {
    /// Returns the header of the tensor, with the hashes of the tensor with this data. In an encrypted file, the header
    /// has the encryption of the data, and its SHA-256 only. Fails with `invalid-argument` for a name, shape or size
    /// that the format has no room for; `unsupported-dtype` for a dtype that it lacks.
    pub fn header(&self, data: &[u8], encryption: Option<&Encryption>) -> Result<Vec<u8>> {
        let description = self.description()?;
        let encode = |hashes: &[Digest]| encode(self.module, &description, hashes, encryption);
        let with_crc32: &[Algorithm] = if encryption.is_some() { &[] } else { &[Algorithm::Crc32] };
        let algorithms = [with_crc32, &[Algorithm::Sha256]].concat();
        let zeros: Vec<Digest> = algorithms.iter().copied().map(Digest::zeros).collect();
        let hashed = encode(&zeros)?.hashed;
        let work: Vec<(Algorithm, OnceLock<Digest>)> =
            algorithms.iter().map(|&algorithm| (algorithm, OnceLock::new())).collect();
        compute_pool::for_each(work.len(), &work, |(algorithm, hash)| {
            hash.get_or_init(|| algorithm.digest_parts([&hashed, data]));
        });
        let hashes: Vec<Digest> = work.into_iter().filter_map(|(_, hash)| hash.into_inner()).collect();
        Ok(encode(&hashes)?.bytes)
    }

    /// Returns the size of the data in the file, in bytes. Fails with `invalid-argument` if the size overflows.
    pub fn data_bytes(&self) -> Result<u64> {
        let product = |product: u64, &size: &u64| product.checked_mul(size);
        let bytes = self.shape.iter().try_fold(self.dtype.item_bytes(), product);
        let bytes = bytes.filter(|&bytes| i64::try_from(bytes).is_ok()).ok_or_else(|| {
            let message = format!("the shape {:?} x {} overflows a 64-bit size", self.shape, self.dtype);
            Error::new(Kind::InvalidArgument, message).tensor(&*self.name)
        })?;
        Ok(if self.has_data { bytes } else { 0 })
    }

    fn description(&self) -> Result<Description<'_>> {
        let NewTensor { name, kind, dtype, shape, .. } = self;
        Ok(Description { name, kind: *kind, dtype: *dtype, shape, data_bytes: self.data_bytes()? })
    }
}

#[derive(Debug)]
struct PlacedTensor {
    tensor: NewTensor,
    /// Offset of its header, from the end of the metadata.
    header_begin: u64,
    /// Offset of its data, from the end of the metadata.
    data_begin: u64,
}

/// Metadata of a new file.
#[derive(Debug)]
pub struct Layout {
    is_encrypted: bool,
    tensors: Vec<PlacedTensor>,
}

impl Layout {
    /// Returns the metadata of a file without tensors, whose data is encrypted or not.
    pub fn new(is_encrypted: bool) -> Layout {
        Layout { is_encrypted, tensors: Vec::new() }
    }

    /// Adds a tensor whose header begins `header_begin` bytes after the metadata, and takes `header_bytes`.
    pub fn add(&mut self, tensor: NewTensor, header_begin: u64, header_bytes: u64) {
        let data_begin = header_begin.saturating_add(header_bytes);
        self.tensors.push(PlacedTensor { tensor, header_begin, data_begin });
    }

    /// Encodes the preamble and the metadata, padded with zeros to at least `bytes` bytes. The version is the lowest
    /// that has what the tensors need. Fails with `invalid-argument` if the metadata is longer than readers accept.
    pub fn encode(&self, bytes: usize) -> Result<Vec<u8>> {
        let descriptions = self.tensors.iter().map(|placed| placed.tensor.description());
        let descriptions = descriptions.collect::<Result<Vec<_>>>()?;
        let has_long = descriptions.iter().any(Description::is_long);
        let mut metadata = Vec::new();
        let mut tensor_bytes: u64 = 0;
        let mut ends = Vec::with_capacity(descriptions.len());
        for description in &descriptions {
            if has_long {
                let version = if description.is_long() { VERSION_LONG } else { VERSION_NUMPY };
                metadata.extend(version.to_le_bytes());
            }
            description.push_name(&mut metadata)?;
            metadata.push(description.kind.number());
            description.push_type(&mut metadata)?;
            // The offsets depend on the size of the metadata.
            metadata.extend([0; OFFSETS_SIZE]);
            ends.push(metadata.len());
            metadata.extend(description.data_bytes.to_le_bytes());
            tensor_bytes = tensor_bytes.saturating_add(description.data_bytes);
        }
        if to_u64(metadata.len()) > HEADER_BYTES_MAX {
            let message = format!(
                "the metadata would have {} bytes, but readers accept at most {HEADER_BYTES_MAX}; write fewer tensors to \
                 a file",
                metadata.len()
            );
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        metadata.resize(metadata.len().max(bytes.saturating_sub(PREAMBLE_SIZE)), 0);
        let begin = to_u64(PREAMBLE_SIZE.saturating_add(metadata.len()));
        for (placed, end) in self.tensors.iter().zip(ends) {
            let offsets = [placed.header_begin, placed.data_begin].map(|offset| begin.saturating_add(offset));
            let target = metadata.get_mut(end.saturating_sub(OFFSETS_SIZE)..end).unwrap_or_default();
            for (target, byte) in target.iter_mut().zip(offsets.into_iter().flat_map(u64::to_le_bytes)) {
                *target = byte;
            }
        }
        let is_without_data =
            |description: &Description<'_>| description.data_bytes == 0 && !description.shape.contains(&0);
        let version = match () {
            () if has_long => VERSION_LONG,
            () if descriptions.iter().any(is_without_data) => VERSION_FLAGS,
            () if self.is_encrypted => VERSION_ENCRYPTED,
            () if descriptions.iter().any(|description| !dtype::is_numpy(description.dtype)) => VERSION_OPAQUE,
            () => VERSION_NUMPY,
        };
        let preamble = Preamble {
            version,
            is_encrypted: self.is_encrypted,
            has_entry_versions: has_long,
            tensor_bytes,
            tensors: to_u64(self.tensors.len()),
            metadata_bytes: to_u64(metadata.len()),
        };
        Ok([&preamble.encode()[..], &metadata].concat())
    }
}
