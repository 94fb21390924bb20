//! What a new file will look like: which tensor comes where, and the header
//! that says so. Pure: no files, no memory of tensors.
//!
//! The bytes are those that the `safetensors` package writes for the same
//! tensors: in the order of its dtypes, then of the names, with nothing
//! between them, behind a header that is padded with spaces to a multiple of
//! eight bytes.

use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::{HEADER_BYTES_MAX, LENGTH_BYTES};
use serde::Serialize;
use serde::ser::{SerializeMap, SerializeStruct, Serializer};
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

/// The key of a header under which no tensor can be.
pub const METADATA_KEY: &str = "__metadata__";
/// Headers are as long as a multiple of this, so that the data behind them is aligned for any dtype.
const ALIGNMENT: usize = 8;

/// The dtypes in the order of their tensors in a file: the widest first, so that each tensor is aligned.
const ORDER: [Dtype; 22] = [
    Dtype::U64,
    Dtype::I64,
    Dtype::F64,
    Dtype::C64,
    Dtype::F32,
    Dtype::U32,
    Dtype::I32,
    Dtype::BF16,
    Dtype::F16,
    Dtype::U16,
    Dtype::I16,
    Dtype::F8E5M2Fnuz,
    Dtype::F8E4M3Fnuz,
    Dtype::F8E8M0,
    Dtype::F8E4M3,
    Dtype::F8E5M2,
    Dtype::I8,
    Dtype::U8,
    Dtype::F6E3M2,
    Dtype::F6E2M3,
    Dtype::F4,
    Dtype::Bool,
];

/// A tensor that is to be in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    name: String,
    dtype: Dtype,
    /// In elements of the file.
    shape: Vec<u64>,
    bytes: u64,
}

impl Tensor {
    /// A tensor, checked to have a size. `shape` is in elements of the file.
    ///
    /// # Errors
    /// `invalid-argument` where the tensor is not a whole number of bytes or has too many.
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

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How long its data is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The names of a file, each of which may be there once.
#[derive(Debug, Default)]
pub struct Names(HashSet<String>);

impl Names {
    /// Adds a name.
    ///
    /// # Errors
    /// `invalid-argument` where the name is there already, or is the one that the format keeps for itself.
    pub fn add(&mut self, name: &str) -> Result<()> {
        let refused = |message: &str| Err(Error::new(Kind::InvalidArgument, message).tensor(name));
        if name == METADATA_KEY {
            return refused("the format keeps this name for the metadata; choose another");
        }
        if !self.0.insert(name.to_owned()) {
            return refused("the name was given twice; each tensor of a file needs its own");
        }
        Ok(())
    }
}

/// What a person may write into a header beside the tensors. None at all is not the same as no entries.
pub type Metadata = Option<BTreeMap<String, String>>;

/// Where everything in a file lies.
#[derive(Debug)]
pub struct Layout {
    header: Vec<u8>,
    /// For each tensor in the order of the file, its position in the caller's list.
    order: Vec<usize>,
    /// Name and bytes in the file of each, in the order of the file.
    placed: Vec<(String, Range<u64>)>,
}

impl Layout {
    /// Lays out a file as the `safetensors` package does.
    ///
    /// # Errors
    /// `invalid-argument` where a name is given twice or reserved, or there is more than a header can hold.
    pub fn new(tensors: &[Tensor], metadata: &Metadata) -> Result<Layout> {
        let mut names = Names::default();
        tensors.iter().try_for_each(|tensor| names.add(&tensor.name))?;
        let mut order: Vec<(usize, &Tensor)> = tensors.iter().enumerate().collect();
        let rank = |dtype: Dtype| ORDER.iter().position(|&other| other == dtype);
        order.sort_by(|(_, a), (_, b)| (rank(a.dtype), &a.name).cmp(&(rank(b.dtype), &b.name)));
        let header = header(order.iter().map(|(_, tensor)| *tensor), metadata)?;
        let mut begin = to_u64(header.len());
        let mut placed = Vec::with_capacity(tensors.len());
        for (_, tensor) in &order {
            let end = begin.checked_add(tensor.bytes).ok_or_else(too_large)?;
            placed.push((tensor.name.clone(), begin..end));
            begin = end;
        }
        Ok(Layout { header, order: order.into_iter().map(|(index, _)| index).collect(), placed })
    }

    /// The first bytes of the file: the length of the JSON, the JSON, and spaces.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// For each tensor in the order of the file, its position in the list that was laid out.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// How long the file is.
    pub fn file_bytes(&self) -> u64 {
        self.placed.last().map_or_else(|| to_u64(self.header.len()), |(_, range)| range.end)
    }

    /// The tensor of which a byte of the file is a part.
    pub fn tensor_at(&self, offset: u64) -> Option<&str> {
        let index = self.placed.partition_point(|(_, range)| range.end <= offset);
        self.placed.get(index).filter(|(_, range)| range.contains(&offset)).map(|(name, _)| name.as_str())
    }
}

/// The first bytes of a file whose tensors' data comes in this order.
///
/// # Errors
/// `invalid-argument` where the header is longer than readers accept.
pub fn header<'a>(tensors: impl Iterator<Item = &'a Tensor>, metadata: &Metadata) -> Result<Vec<u8>> {
    let mut bytes = vec![0; LENGTH_BYTES_SIZE];
    write_json(&mut bytes, tensors, metadata)
        .map_err(|error| Error::new(Kind::Internal, format!("the header cannot be written: {error}")))?;
    widen(&mut bytes, 0);
    let json_bytes = to_u64(bytes.len()) - LENGTH_BYTES;
    if json_bytes > HEADER_BYTES_MAX {
        let message = format!(
            "the header would be {json_bytes} bytes long, but readers accept at most {HEADER_BYTES_MAX}; write fewer \
             tensors to a file, or shorter names and metadata"
        );
        return Err(Error::new(Kind::InvalidArgument, message));
    }
    Ok(bytes)
}

/// Makes a header at least this long, with spaces, and says in its first bytes how long it is.
pub fn widen(header: &mut Vec<u8>, bytes: usize) {
    header.resize(header.len().max(bytes).next_multiple_of(ALIGNMENT), b' ');
    let json_bytes = to_u64(header.len()) - LENGTH_BYTES;
    for (into, byte) in header.iter_mut().zip(json_bytes.to_le_bytes()) {
        *into = byte;
    }
}

/// [`LENGTH_BYTES`] as the size of an array.
const LENGTH_BYTES_SIZE: usize = size_of::<u64>();

/// What a header says of one tensor.
struct Info<'a> {
    tensor: &'a Tensor,
    data_offsets: [u64; 2],
}

impl Serialize for Info<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        // The order of the fields is part of the format's canonical bytes.
        let mut info = serializer.serialize_struct("Info", 3)?;
        info.serialize_field("dtype", self.tensor.dtype.name())?;
        info.serialize_field("shape", &self.tensor.shape)?;
        info.serialize_field("data_offsets", &self.data_offsets)?;
        info.end()
    }
}

fn write_json<'a>(
    into: &mut Vec<u8>,
    tensors: impl Iterator<Item = &'a Tensor>,
    metadata: &Metadata,
) -> serde_json::Result<()> {
    let mut json = serde_json::Serializer::new(into);
    let mut map = json.serialize_map(None)?;
    if let Some(texts) = metadata {
        map.serialize_entry(METADATA_KEY, texts)?;
    }
    let mut begin: u64 = 0;
    for tensor in tensors {
        let end = begin.checked_add(tensor.bytes).ok_or_else(|| serde::ser::Error::custom(too_large()))?;
        map.serialize_entry(&tensor.name, &Info { tensor, data_offsets: [begin, end] })?;
        begin = end;
    }
    SerializeMap::end(map)
}

fn too_large() -> Error {
    Error::new(Kind::InvalidArgument, "the tensors together overflow a 64-bit size")
}

fn to_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
