//! Layout of a new file: its header and the byte range of each tensor. Accesses no files and no memory of tensors.
//!
//! The layout is byte-identical to the `safetensors` package's for the same tensors: sorted by dtype and name,
//! without gaps, after a header that is padded with spaces to a multiple of eight bytes.

use crate::digest::Algorithm;
use crate::digest::groups::TreeDigest;
use crate::dtype::Dtype;
use crate::encryption::chunks::CHUNK_BYTES;
use crate::error::{Error, Kind, Result};
use crate::format::digests;
use crate::format::encryption::{self, TAGS_NAME};
use crate::format::header::{HEADER_BYTES_MAX, LENGTH_BYTES, LENGTH_SIZE};
use crate::format::{METADATA_KEY, Metadata};
use crate::num::to_u64;
use serde::Serialize;
use serde::ser::{SerializeMap, SerializeStruct, Serializer};
use std::collections::HashSet;
use std::ops::Range;

/// Alignment of the data after the header in bytes, sufficient for every dtype.
const ALIGNMENT: usize = 8;

/// Tensor of a new file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    name: String,
    dtype: Dtype,
    /// Shape in elements of the file.
    shape: Vec<u64>,
    bytes: u64,
}

impl Tensor {
    /// Creates a tensor whose `shape` is in elements of the file. Fails with `invalid-argument` if the size is not a
    /// whole number of bytes or overflows.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: Vec<u64>) -> Result<Tensor> {
        let name = name.into();
        let refused = |message: String| Error::new(Kind::InvalidArgument, message).tensor(&*name);
        let bits = shape.iter().try_fold(dtype.bits(), |bits, &size| bits.checked_mul(size));
        let bits = bits.filter(|&bits| i64::try_from(bits).is_ok());
        let bits = bits.ok_or_else(|| refused(format!("the shape {shape:?} x {dtype} overflows a 64-bit size")))?;
        if bits % 8 != 0 {
            return Err(refused(format!("the shape {shape:?} x {dtype} is not a whole number of bytes")));
        }
        Ok(Tensor { name, dtype, shape, bytes: bits / 8 })
    }

    /// Creates a tensor whose `shape` is in elements of PyTorch. Fails with `invalid-argument` as for
    /// [`new`](Tensor::new), and for a scalar of a dtype that PyTorch packs.
    pub fn of_torch(name: impl Into<String>, dtype: Dtype, mut shape: Vec<u64>) -> Result<Tensor> {
        let name = name.into();
        if dtype.packed_elements() > 1 {
            let last = shape.last_mut().ok_or_else(|| {
                let message = format!("a scalar of {dtype} is a pair; give it a dimension");
                Error::new(Kind::InvalidArgument, message).tensor(&*name)
            })?;
            *last = last.saturating_mul(dtype.packed_elements());
        }
        Tensor::new(name, dtype, shape)
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the size of the data in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Returns the dtype of a tensor of a new file. Fails with `unsupported-dtype` if the safetensors format does not have
/// it.
pub fn dtype_of_file(name: &str, dtype: Option<Dtype>) -> Result<Dtype> {
    dtype.filter(|dtype| dtype.is_in_safetensors()).ok_or_else(|| {
        let message = "safetensors has no dtype for it; cast it to another, or view it as one";
        Error::new(Kind::UnsupportedDtype, message).tensor(name)
    })
}

/// Returns the tensor with the authentication codes of a new file, whose tensors have these sizes in bytes. Fails with
/// `invalid-argument` if the size overflows.
pub fn tags_tensor(sizes: impl Iterator<Item = u64>) -> Result<Tensor> {
    Tensor::new(TAGS_NAME, Dtype::U8, vec![encryption::tags_bytes(sizes, CHUNK_BYTES)])
}

/// Set of the names in a file, checked to be unique.
#[derive(Debug, Default)]
pub struct Names(HashSet<String>);

impl Names {
    /// Adds a name. Fails with `invalid-argument` for a duplicate name or a reserved one: [`METADATA_KEY`] and
    /// [`TAGS_NAME`].
    pub fn add(&mut self, name: &str) -> Result<()> {
        let refused = |message: &str| Err(Error::new(Kind::InvalidArgument, message).tensor(name));
        if name == METADATA_KEY {
            return refused("the format keeps this name for the metadata; choose another");
        }
        if name == TAGS_NAME {
            return refused("encrypted files keep this name for authentication codes; choose another");
        }
        if !self.0.insert(name.to_owned()) {
            return refused("the name was given twice; each tensor of a file needs a unique name");
        }
        Ok(())
    }
}

/// Header and byte ranges of a file.
#[derive(Debug)]
pub struct Layout {
    /// The header, without the requested digests.
    header: Vec<u8>,
    /// Algorithm of the requested digests.
    digests: Option<Algorithm>,
    /// Position in the caller's list of each tensor, in the order of the file.
    order: Vec<usize>,
    /// Name and byte range of each tensor, in the order of the file.
    ranges: Vec<(String, Range<u64>)>,
}

impl Layout {
    /// Lays out a file in the same way as the `safetensors` package. Fails with `invalid-argument` for a duplicate or
    /// reserved name or key, or if the header is longer than readers accept.
    pub fn new(tensors: &[Tensor], metadata: &Metadata) -> Result<Layout> {
        encryption::check_metadata(metadata)?;
        let mut names = Names::default();
        tensors.iter().try_for_each(|tensor| names.add(&tensor.name))?;
        let mut order: Vec<(usize, &Tensor)> = tensors.iter().enumerate().collect();
        order.sort_by(|(_, a), (_, b)| (a.dtype.file_rank(), &a.name).cmp(&(b.dtype.file_rank(), &b.name)));
        let header = header(order.iter().map(|(_, tensor)| *tensor), metadata)?;
        let mut begin = to_u64(header.len());
        let mut ranges = Vec::with_capacity(tensors.len());
        for (_, tensor) in &order {
            let end = begin.checked_add(tensor.bytes).ok_or_else(too_large)?;
            ranges.push((tensor.name.clone(), begin..end));
            begin = end;
        }
        let order = order.into_iter().map(|(index, _)| index).collect();
        Ok(Layout { header, digests: digests::requested(metadata)?, order, ranges })
    }

    /// Returns the header: the length of the JSON, the JSON, and padding with spaces. It has zeros for requested
    /// digests until [`seal`](Layout::seal).
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Returns the algorithm of the digests that the metadata request.
    pub fn digests(&self) -> Option<Algorithm> {
        self.digests
    }

    /// Writes the digests of the tensors, in the order of the file, to the header.
    pub fn seal(&mut self, digests: &[TreeDigest]) -> Result<()> {
        self.digests.map_or(Ok(()), |algorithm| digests::seal(&mut self.header, algorithm, digests))
    }

    /// Returns the byte range of each tensor, in the order of the file.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = &Range<u64>> {
        self.ranges.iter().map(|(_, range)| range)
    }

    /// Returns the position in the caller's list of each tensor, in the order of the file.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns the length of the file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.ranges.last().map_or_else(|| to_u64(self.header.len()), |(_, range)| range.end)
    }

    /// Returns the name of the tensor that contains the byte at `offset`.
    pub fn tensor_at(&self, offset: u64) -> Option<&str> {
        let index = self.ranges.partition_point(|(_, range)| range.end <= offset);
        self.ranges.get(index).filter(|(_, range)| range.contains(&offset)).map(|(name, _)| name.as_str())
    }
}

/// Encodes the header of a file whose tensors are stored in this order. It has zeros for requested digests. Fails with
/// `invalid-argument` if the header is longer than readers accept, or for digests of an unknown algorithm.
pub fn header<'a>(tensors: impl Iterator<Item = &'a Tensor> + Clone, metadata: &Metadata) -> Result<Vec<u8>> {
    let mut bytes = vec![0; LENGTH_SIZE];
    let metadata = digests::reserve(metadata, tensors.clone().map(Tensor::bytes))?;
    write_json(&mut bytes, tensors, &metadata)
        .map_err(|error| Error::new(Kind::Internal, format!("the header cannot be written: {error}")))?;
    pad(&mut bytes, 0);
    let json_bytes = to_u64(bytes.len()) - LENGTH_BYTES;
    if json_bytes > HEADER_BYTES_MAX {
        let message = format!(
            "the header would be {json_bytes} bytes long, but readers accept at most {HEADER_BYTES_MAX}; write fewer \
             tensors to a file, or shorten names and metadata"
        );
        return Err(Error::new(Kind::InvalidArgument, message));
    }
    Ok(bytes)
}

/// Pads a header with spaces to at least `bytes` bytes, and updates its length field.
pub fn pad(header: &mut Vec<u8>, bytes: usize) {
    header.resize(header.len().max(bytes).next_multiple_of(ALIGNMENT), b' ');
    let json_bytes = to_u64(header.len()) - LENGTH_BYTES;
    for (target, byte) in header.iter_mut().zip(json_bytes.to_le_bytes()) {
        *target = byte;
    }
}

struct EntryJson<'a> {
    tensor: &'a Tensor,
    data_offsets: [u64; 2],
}

impl Serialize for EntryJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        // The order of the fields is as in the `safetensors` package.
        let mut entry = serializer.serialize_struct("EntryJson", 3)?;
        entry.serialize_field("dtype", self.tensor.dtype.name())?;
        entry.serialize_field("shape", &self.tensor.shape)?;
        entry.serialize_field("data_offsets", &self.data_offsets)?;
        entry.end()
    }
}

fn write_json<'a>(
    into: &mut Vec<u8>,
    tensors: impl Iterator<Item = &'a Tensor>,
    metadata: &Metadata,
) -> serde_json::Result<()> {
    let mut json = serde_json::Serializer::new(into);
    let mut map = json.serialize_map(None)?;
    if let Some(entries) = metadata {
        map.serialize_entry(METADATA_KEY, entries)?;
    }
    let mut begin: u64 = 0;
    for tensor in tensors {
        let end = begin.checked_add(tensor.bytes).ok_or_else(|| serde::ser::Error::custom(too_large()))?;
        map.serialize_entry(&tensor.name, &EntryJson { tensor, data_offsets: [begin, end] })?;
        begin = end;
    }
    SerializeMap::end(map)
}

fn too_large() -> Error {
    Error::new(Kind::InvalidArgument, "the tensors together overflow a 64-bit size")
}
