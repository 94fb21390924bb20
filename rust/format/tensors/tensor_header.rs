//! Header of one tensor in a `.tensors` file, directly before its data.
//!
//! It repeats the metadata entry, and adds hashes of the tensor, the index of its module, and how the data is encrypted.
//! Loads read it only for that.

use super::encryption::{self, Encryption};
use super::{Fields, TensorKind, dtype};
use crate::digest::{Algorithm, Digest};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::{Entry, TensorsEntry};
use crate::num::{to_u64, to_usize};
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::source::Source;
use std::ops::Range;

/// Upper bound for the size of a header in bytes, without its encryption. Names, shapes and hashes take less than half of it.
const TENSOR_HEADER_BYTES_MAX: u64 = 1 << 20;

/// Number of requests for headers of an object at the same time.
const REMOTE_THREADS: usize = 64;
/// Largest data between two headers that one request covers, in bytes. At 1 GB/s, and with so many requests at the same
/// time, they take about a tenth of the time of a request of 40 ms.
const GAP_BYTES: u64 = 64 << 10;
/// Size of a request after which another one begins, in bytes, so that requests for headers near each other overlap.
const REQUEST_BYTES: u64 = 4 << 20;

const CRC32: u8 = 0;
const SHA256: u8 = 1;

/// Checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    /// Index of the tensor's module among the modules that were written.
    pub module: u16,
    /// Use of the tensor.
    pub kind: TensorKind,
    /// Hashes of the tensor, with CRC-32 or SHA-256: of [`hashed`](TensorHeader::hashed), and then of the data.
    pub hashes: Vec<Digest>,
    /// The bytes of the header without its encryption, with zeros in place of the hashes.
    pub hashed: Vec<u8>,
    /// Encryption of the data, which is the default in a file that is not encrypted.
    pub encryption: Encryption,
}

/// Returns the bytes of a file that hold the header of a tensor. Fails with `malformed` if the range does not hold a
/// header.
pub fn range(entry: Entry<'_>, tensors_entry: TensorsEntry) -> Result<Range<u64>> {
    let range = tensors_entry.header_begin..entry.begin;
    let length = range.end.saturating_sub(range.start);
    let data_bytes = entry.end.saturating_sub(entry.begin);
    let encryption_bytes_max = if tensors_entry.is_encrypted { encryption::bytes_max(data_bytes) } else { 0 };
    let bytes_max = TENSOR_HEADER_BYTES_MAX.saturating_add(encryption_bytes_max);
    if length == 0 || length > bytes_max {
        let message = format!("the header of the tensor has {length} bytes; 1 to {bytes_max} are accepted");
        return Err(Error::new(Kind::Malformed, message).tensor(entry.name).offset(range.start));
    }
    Ok(range)
}

/// Tensor, and the bytes of its header.
type Place<'a> = (Entry<'a>, TensorsEntry, Range<u64>);

fn place(entry: Entry<'_>) -> Result<Place<'_>> {
    let tensors_entry = entry.tensors.ok_or_else(|| {
        let message = "only tensors of tensorizer's format have headers of their own";
        Error::new(Kind::InvalidArgument, message).tensor(entry.name)
    })?;
    Ok((entry, tensors_entry, range(entry, tensors_entry)?))
}

/// Reads, parses and checks the headers of tensors of a file, which are in the order of the file. Headers of an object
/// are requested many at once, and those near each other with one request. Fails with `invalid-argument` for a tensor
/// of a safetensors file; `interrupted`. The error has no path.
pub fn read_all(source: &Source, entries: &[Entry<'_>]) -> Result<Vec<TensorHeader>> {
    let watch = Watch::begin();
    let places = entries.iter().map(|&entry| place(entry)).collect::<Result<Vec<_>>>()?;
    let mut request_begin = places.first().map_or(0, |(.., range)| range.start);
    let shares_request = |(.., one): &Place<'_>, (.., two): &Place<'_>| {
        let is_near = two.start.checked_sub(one.end).is_some_and(|gap| gap <= GAP_BYTES);
        let shares = is_near && two.end.saturating_sub(request_begin) <= REQUEST_BYTES;
        if !shares {
            request_begin = two.start;
        }
        shares
    };
    let requests: Vec<_> = places.chunk_by(shares_request).collect();
    let missing = || Error::new(Kind::Internal, "no such request");
    let threads = if source.is_remote() { REMOTE_THREADS } else { 1 };
    let headers = threads::map(threads, requests.len(), |index| {
        let request = *requests.get(index).ok_or_else(missing)?;
        let memory = |(.., range): &Place<'_>| vec![0; to_usize(range.end - range.start)];
        let mut headers: Vec<Vec<u8>> = request.iter().map(memory).collect();
        let reads = request.iter().zip(&mut headers).map(|((.., range), into)| (range.start, &mut **into));
        source.read_all(reads, &|| watch.check())?;
        let parsed =
            request.iter().zip(&headers).map(|((entry, tensors_entry, _), bytes)| parse(bytes, *entry, *tensors_entry));
        parsed.collect::<Result<Vec<_>>>()
    })?;
    Ok(headers.into_iter().flatten().collect())
}

/// Parses the header of a tensor, and checks that it agrees with the metadata entry. Fails with `malformed`, with the
/// tensor and the offset of the fault.
pub fn parse(bytes: &[u8], entry: Entry<'_>, tensors_entry: TensorsEntry) -> Result<TensorHeader> {
    parse_fields(bytes, entry, tensors_entry).map_err(|error| error.tensor(entry.name))
}

fn parse_fields(bytes: &[u8], entry: Entry<'_>, tensors_entry: TensorsEntry) -> Result<TensorHeader> {
    let begin = tensors_entry.header_begin;
    let differs = |what: &str, offset: u64| {
        let message = format!("the header of the tensor has another {what} than the metadata of the file");
        Error::new(Kind::Malformed, message).offset(offset)
    };
    let check = |agrees: bool, what: &str, offset: u64| if agrees { Ok(()) } else { Err(differs(what, offset)) };
    let mut fields = Fields::new(bytes, begin);
    check(fields.number::<8>("the size of the header")? == to_u64(bytes.len()), "size", begin)?;
    let module = u16::try_from(fields.number::<2>("the index of the module")?).unwrap_or(u16::MAX);
    let kind = fields.kind()?;
    check(kind == tensors_entry.kind, "kind", fields.offset())?;
    check(fields.name()? == entry.name, "name", fields.offset())?;
    check(fields.dtype()? == entry.dtype, "dtype", fields.offset())?;
    check(fields.shape(entry.dtype, tensors_entry.is_long)? == entry.shape, "shape", fields.offset())?;
    let hashes_begin = fields.offset();
    let (hashes, values) = parse_hashes(&mut fields)?;
    let data_bytes = entry.end.saturating_sub(entry.begin);
    let encryption_begin = fields.offset();
    let encryption = if tensors_entry.is_encrypted {
        let encoded = fields.counted::<8>("the encryption")?;
        Encryption::parse(encoded, fields.offset().saturating_sub(to_u64(encoded.len())))?
    } else {
        Encryption::default()
    };
    let encryption_end = fields.offset();
    check(fields.number::<8>("the size of the data")? == data_bytes, "size of its data", fields.offset())?;
    if fields.left() > 0 {
        return Err(Error::new(Kind::Malformed, "the header of the tensor is too long").offset(fields.offset()));
    }
    let mut hashed = bytes.to_vec();
    let from_begin = |offset: u64| to_usize(offset.saturating_sub(begin));
    for value in values {
        let zeroed = hashed.get_mut(from_begin(value.start)..from_begin(value.end));
        zeroed.ok_or_else(|| differs("size", hashes_begin))?.fill(0);
    }
    hashed.drain(from_begin(encryption_begin)..from_begin(encryption_end));
    Ok(TensorHeader { module, kind, hashes, hashed, encryption })
}

/// Returns the known hashes, and where the values of all hashes are in the file.
fn parse_hashes(fields: &mut Fields<'_>) -> Result<(Vec<Digest>, Vec<Range<u64>>)> {
    let begin = fields.offset().saturating_add(2);
    let mut block = Fields::new(fields.counted::<2>("the hashes")?, begin);
    let count = block.number::<1>("the number of hashes")?;
    let (mut hashes, mut values) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let offset = block.offset();
        let algorithm = block.number::<1>("the algorithm of a hash")?;
        let value = block.counted::<1>("a hash")?;
        values.push(block.offset().saturating_sub(to_u64(value.len()))..block.offset());
        let hash = match u8::try_from(algorithm) {
            Ok(CRC32) => Digest::from_bytes(Algorithm::Crc32, value),
            Ok(SHA256) => Digest::from_bytes(Algorithm::Sha256, value),
            _ => None,
        };
        hashes.push(hash.ok_or_else(|| {
            let message = format!("the algorithm {algorithm} with {} bytes is no known hash", value.len());
            Error::new(Kind::Malformed, message).offset(offset)
        })?);
    }
    match block.left() {
        0 => Ok((hashes, values)),
        left => {
            let message = format!("{left} bytes follow the hashes");
            Err(Error::new(Kind::Malformed, message).offset(block.offset()))
        }
    }
}

/// Encoded header of a new tensor.
pub struct NewHeader {
    /// The header.
    pub bytes: Vec<u8>,
    /// The header without its encryption, with which the hashes begin.
    pub hashed: Vec<u8>,
}

/// Encodes the header of a new tensor, in an encrypted file with the encryption of its data. Fails with
/// `invalid-argument` for a name that is too long; `unsupported-dtype` if the format lacks the dtype.
pub fn encode(
    module: u16,
    description: &Description<'_>,
    hashes: &[Digest],
    encryption: Option<&Encryption>,
) -> Result<NewHeader> {
    let mut rest = module.to_le_bytes().to_vec();
    rest.push(description.kind.number());
    description.push_name(&mut rest)?;
    description.push_type(&mut rest)?;
    let mut block = vec![u8::try_from(hashes.len()).unwrap_or(u8::MAX)];
    for hash in hashes {
        let value = hash.bytes();
        let number = if hash.algorithm == Algorithm::Crc32 { CRC32 } else { SHA256 };
        block.extend([number, u8::try_from(value.len()).unwrap_or(u8::MAX)]);
        block.extend(value);
    }
    rest.extend(u16::try_from(block.len()).unwrap_or(u16::MAX).to_le_bytes());
    rest.extend(block);
    let encryption = encryption.map(Encryption::encode).map_or_else(Vec::new, |encoded| {
        let length = to_u64(encoded.len()).to_le_bytes();
        [&length[..], &encoded].concat()
    });
    let data_bytes = description.data_bytes.to_le_bytes();
    let size = to_u64(rest.len() + encryption.len() + data_bytes.len() + size_of::<u64>()).to_le_bytes();
    let bytes = [&size[..], &rest, &encryption, &data_bytes].concat();
    let hashed = [&size[..], &rest, &data_bytes].concat();
    Ok(NewHeader { bytes, hashed })
}

/// Description of a new tensor, which its header and its metadata entry have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description<'a> {
    /// Name.
    pub name: &'a str,
    /// Use of the tensor.
    pub kind: TensorKind,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, in PyTorch's elements.
    pub shape: &'a [u64],
    /// Size of the data in bytes. 0 for a tensor that is stored without data.
    pub data_bytes: u64,
}

impl Description<'_> {
    /// Returns whether a dimension takes 8 bytes.
    pub fn is_long(&self) -> bool {
        self.shape.iter().any(|&size| u32::try_from(size).is_err())
    }

    /// Appends the name. Fails with `invalid-argument` if the name is too long for the format.
    pub fn push_name(&self, bytes: &mut Vec<u8>) -> Result<()> {
        let length = u16::try_from(self.name.len()).map_err(|_| {
            let message = format!("the name has {} bytes; the format has room for {}", self.name.len(), u16::MAX);
            Error::new(Kind::InvalidArgument, message).tensor(self.name)
        })?;
        bytes.extend(length.to_le_bytes());
        bytes.extend(self.name.as_bytes());
        Ok(())
    }

    /// Appends the dtype and the shape. Fails with `unsupported-dtype` if the format lacks the dtype;
    /// `invalid-argument` for more than 255 dimensions.
    pub fn push_type(&self, bytes: &mut Vec<u8>) -> Result<()> {
        let refused = |kind, message: String| Error::new(kind, message).tensor(self.name);
        let dtype = dtype::name(self.dtype).ok_or_else(|| {
            refused(Kind::UnsupportedDtype, format!("tensorizer's format has no dtype for {}", self.dtype))
        })?;
        let count = u8::try_from(self.shape.len()).map_err(|_| {
            refused(Kind::InvalidArgument, format!("{} dimensions; the format has room for 255", self.shape.len()))
        })?;
        bytes.push(u8::try_from(dtype.len()).unwrap_or(u8::MAX));
        bytes.extend(dtype.as_bytes());
        bytes.push(count);
        for &size in self.shape {
            match u32::try_from(size) {
                Ok(size) if !self.is_long() => bytes.extend(size.to_le_bytes()),
                _ => bytes.extend(size.to_le_bytes()),
            }
        }
        Ok(())
    }
}
