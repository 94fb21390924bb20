//! Header of a file. It is read, parsed and checked completely before any data is read.
//!
//! ```text
//! byte 0          8                8 + n                       end of file
//!      | n as u64 | n bytes of JSON | data of the tensors, without gaps   |
//! ```
//!
//! A file that begins with tensorizer's [`MAGIC`] has the format of [`tensors`](super::tensors) instead, whatever its name.
//!
//! The parser of the JSON uses `serde_json` directly. The checks of the `safetensors` crate need a slice as long as the file, accept
//! duplicate keys, and do not report the byte offset of a fault.

mod json;
mod tensors;

use super::foreign;
use super::tensors::preamble::{PREAMBLE_BYTES, PREAMBLE_SIZE};
use super::tensors::{MAGIC, TensorKind};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::profile::{self, Stage};
use crate::source::Source;
use hashbrown::{HashTable, hash_table};
use serde_json::json;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

/// Size of the length field at the start of a file.
pub const LENGTH_BYTES: u64 = 8;
/// [`LENGTH_BYTES`] as the size of an array.
pub(super) const LENGTH_SIZE: usize = 8;
/// Maximum size of the JSON in bytes, the same as in the `safetensors` crate.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Maximum number of dimensions, the same as in PyTorch.
pub const DIMENSIONS_MAX: usize = 64;

/// Checked header entry of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, in elements of the file.
    pub shape: &'a [u64],
    /// Offset of the first byte, from the start of the file.
    pub begin: u64,
    /// Offset after the last byte, from the start of the file. `begin` if the tensor is stored without data, and consists
    /// of zeros.
    pub end: u64,
    /// Further fields in a `.tensors` file, and `None` in a safetensors file.
    pub tensors: Option<TensorsEntry>,
}

/// Fields of an entry that only a `.tensors` file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorsEntry {
    /// Use of the tensor.
    pub kind: TensorKind,
    /// Offset of the tensor's own header, from the start of the file.
    pub header_begin: u64,
    /// Whether the dimensions in that header have 8 bytes.
    pub is_long: bool,
    /// Whether that header says how the data is encrypted.
    pub is_encrypted: bool,
}

/// Checked header of a file.
///
/// A caller may request ten of a hundred thousand tensors. To avoid an allocation per tensor, two arrays hold all names
/// and all shapes.
#[derive(Debug, Default)]
pub struct Header {
    /// Tensors in the order of their bytes.
    records: Vec<Record>,
    names: String,
    sizes: Vec<u64>,
    /// Text entries under [`METADATA_KEY`](super::METADATA_KEY), if the key exists.
    metadata: Option<BTreeMap<String, String>>,
    positions: HashTable<usize>,
    hasher: RandomState,
}

/// Entry of one tensor. Its name and shape are ranges of the header's arrays.
#[derive(Debug)]
struct Record {
    dtype: Dtype,
    begin: u64,
    end: u64,
    name: Range<usize>,
    shape: Range<usize>,
    tensors: Option<TensorsEntry>,
}

impl Header {
    /// Reads and checks the header of a file. Fails with `malformed` with the byte offset of the fault; `io` if reading
    /// fails.
    pub fn read(source: &Source) -> Result<Header> {
        let watch = Watch::begin();
        let bytes = Header::read_bytes(source, &|| watch.check())?;
        Header::parse(&bytes, source.length()).map_err(|error| error.at(source.path()))
    }

    /// Reads the bytes of a file's header for [`parse`](Header::parse), and checks only their number. Fails with the
    /// error of `check`, which is called while the file is read. The caller's `check` also sees a SIGINT that arrived
    /// while the file was opened.
    pub fn read_bytes(source: &Source, check: Check<'_>) -> Result<Vec<u8>> {
        let read = |buffer: &mut [u8], offset: u64| source.read(offset, buffer, check);
        let Range { start, end } = header_range(source.length(), read).map_err(|error| error.at(source.path()))?;
        let path = || json!({ "path": source.path().to_string_lossy() }).into();
        let _span = profile::span(Stage::Header).bytes(end).detail(path);
        let mut bytes = vec![0; to_usize(end.saturating_sub(start))];
        read(&mut bytes, start)?;
        Ok(bytes)
    }

    /// Parses and checks the header of a file that is `file_bytes` long: the JSON of a safetensors file, which begins
    /// with a brace, or the first bytes of a `.tensors` file, which begin with [`MAGIC`]. Fails with `malformed`, with
    /// the offset in the file but without the path; `unsupported-dtype` for a `.tensors` file with a dtype that fst
    /// lacks.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Header> {
        if bytes.starts_with(MAGIC) {
            return tensors::parse(bytes, file_bytes);
        }
        json::parse(bytes)?.check(to_u64(bytes.len()), file_bytes)
    }

    /// Parses and checks the header of a file in memory.
    pub fn of_bytes(file: &[u8]) -> Result<Header> {
        let missing = || Error::new(Kind::Internal, "the header exceeds its file");
        let part = |begin, end| file.get(to_usize(begin)..to_usize(end)).ok_or_else(missing);
        let read = |into: &mut [u8], offset: u64| {
            into.copy_from_slice(part(offset, offset + to_u64(into.len()))?);
            Ok(())
        };
        let file_bytes = to_u64(file.len());
        let Range { start, end } = header_range(file_bytes, read)?;
        Header::parse(part(start, end)?, file_bytes)
    }

    /// Iterates over the tensors in the order of their bytes.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = Entry<'_>> + Clone {
        self.records.iter().map(|record| self.entry(record))
    }

    /// Returns the tensor at a position of [`entries`](Header::entries).
    pub fn get(&self, position: usize) -> Option<Entry<'_>> {
        self.records.get(position).map(|record| self.entry(record))
    }

    /// Returns the tensor with this name.
    pub fn find(&self, name: &str) -> Option<Entry<'_>> {
        self.position(name).and_then(|position| self.get(position))
    }

    /// Returns the position of the tensor with this name in [`entries`](Header::entries).
    pub fn position(&self, name: &str) -> Option<usize> {
        let matches = |&position: &usize| self.get(position).is_some_and(|entry| entry.name == name);
        self.positions.find(self.hasher.hash_one(name), matches).copied()
    }

    /// Returns the text entries under [`METADATA_KEY`](super::METADATA_KEY), if the key exists.
    pub fn metadata(&self) -> Option<&BTreeMap<String, String>> {
        self.metadata.as_ref()
    }

    /// Removes the tensor with this name, if there is one.
    pub(super) fn remove(&mut self, name: &str) -> Result<()> {
        let Some(position) = self.position(name) else { return Ok(()) };
        self.records.remove(position);
        self.index_names()
    }

    /// Removes a text entry, and the key of the metadata with the last one.
    pub(super) fn remove_metadata(&mut self, key: &str) {
        if let Some(metadata) = &mut self.metadata {
            metadata.remove(key);
        }
        self.metadata = self.metadata.take().filter(|metadata| !metadata.is_empty());
    }

    fn entry(&self, record: &Record) -> Entry<'_> {
        Entry {
            name: self.names.get(record.name.clone()).unwrap_or_default(),
            dtype: record.dtype,
            shape: self.sizes.get(record.shape.clone()).unwrap_or_default(),
            begin: record.begin,
            end: record.end,
            tensors: record.tensors,
        }
    }

    fn sort_by_place(&mut self) {
        if !self.records.is_sorted_by_key(|record| (record.begin, record.end)) {
            self.records.sort_by_key(|record| (record.begin, record.end));
        }
    }

    /// Checks the parsed header of a safetensors file, and converts offsets from the start of the data to the start of the file.
    fn check(mut self, header_bytes: u64, file_bytes: u64) -> Result<Header> {
        let data_begin = LENGTH_BYTES.saturating_add(header_bytes);
        let data_bytes = file_bytes.saturating_sub(data_begin);
        for entry in self.entries() {
            check_entry(entry, data_begin, data_bytes)?;
        }
        for record in &mut self.records {
            record.begin = record.begin.saturating_add(data_begin);
            record.end = record.end.saturating_add(data_begin);
        }
        // The JSON may list tensors in any order, but their bytes must cover the data without gaps.
        self.sort_by_place();
        self.index_names()?;
        let mut expected = data_begin;
        for entry in self.entries() {
            if entry.begin != expected {
                let fault_kind = if entry.begin > expected { "leave a gap" } else { "overlap another tensor" };
                return Err(fault(
                    entry,
                    entry.begin,
                    format!("the data_offsets {fault_kind}: byte {expected} comes next"),
                ));
            }
            expected = entry.end;
        }
        if expected != file_bytes {
            let message = format!(
                "the tensors end at byte {expected}, but the file has {file_bytes}; every byte must belong to a tensor"
            );
            return Err(Error::new(Kind::Malformed, message).offset(expected));
        }
        Ok(self)
    }

    fn index_names(&mut self) -> Result<()> {
        let mut positions = HashTable::with_capacity(self.records.len());
        let name_at = |position: usize| self.get(position).map_or("", |entry| entry.name);
        for (position, entry) in self.entries().enumerate() {
            let matches = |&other: &usize| name_at(other) == entry.name;
            match positions
                .entry(self.hasher.hash_one(entry.name), matches, |&other| self.hasher.hash_one(name_at(other)))
            {
                hash_table::Entry::Vacant(vacant) => vacant.insert(position),
                hash_table::Entry::Occupied(_) => {
                    return Err(fault(entry, entry.begin, "the name occurs twice in the header".into()));
                }
            };
        }
        self.positions = positions;
        Ok(())
    }
}

/// Returns the bytes of a file that hold its header, given its length and a function that reads them.
fn header_range(file_bytes: u64, read: impl Fn(&mut [u8], u64) -> Result<()>) -> Result<Range<u64>> {
    let malformed = |message: String| Error::new(Kind::Malformed, message).offset(0);
    // A file of another format, if its first bytes cannot be the length of a header.
    let foreign = |otherwise: String| {
        let mut first = vec![0; to_usize(file_bytes.min(foreign::FIRST_BYTES))];
        read(&mut first, 0).map_or_else(|error| error, |()| malformed(foreign::recognize(&first).unwrap_or(otherwise)))
    };
    let mut length = [0; LENGTH_SIZE];
    if file_bytes < LENGTH_BYTES {
        return Err(foreign(format!(
            "the file has {file_bytes} bytes, fewer than the length of a header, {LENGTH_BYTES}; copy or download it again"
        )));
    }
    read(&mut length, 0)?;
    // The first bytes of a gzip file can be the length of a header, and in a file of zeros they are.
    let is_json = |mut next: [u8; 1]| read(&mut next, LENGTH_BYTES).is_ok_and(|()| next == *b"{");
    if length == [0; LENGTH_SIZE] || length.starts_with(foreign::GZIP) && !is_json([0]) {
        return Err(foreign("the length of the header is 0; copy or download the file again".to_owned()));
    }
    // The bytes before the rest of the header, and where the bytes for the parser begin.
    let (before, begin, length) = if length.starts_with(MAGIC) {
        let mut preamble = [0; PREAMBLE_SIZE];
        if file_bytes < PREAMBLE_BYTES {
            return Err(malformed(format!(
                "the file has {file_bytes} bytes; one of tensorizer begins with {PREAMBLE_BYTES}"
            )));
        }
        read(&mut preamble, 0)?;
        (PREAMBLE_BYTES, 0, tensors::metadata_bytes(&preamble)?)
    } else {
        (LENGTH_BYTES, LENGTH_BYTES, u64::from_le_bytes(length))
    };
    if length > (file_bytes - before).min(HEADER_BYTES_MAX) {
        let message = format!(
            "the header length is {length}, but the file has {} bytes after it and at most {HEADER_BYTES_MAX} are \
             accepted; the file is cut off or is not safetensors; copy or download it again",
            file_bytes - before
        );
        return Err(if length > HEADER_BYTES_MAX { foreign(message) } else { malformed(message) });
    }
    Ok(begin..before.saturating_add(length))
}

/// Returns the position of a text of the metadata in the JSON of a header, if it occurs exactly once.
pub(super) fn position_of(json: &[u8], text: &str) -> Option<usize> {
    let json = std::str::from_utf8(json).ok()?;
    let quoted = format!("\"{text}\"");
    let mut found = json.match_indices(&quoted);
    let (begin, _) = found.next()?;
    found.next().is_none().then_some(begin + 1)
}

/// Returns the bytes before the data of a file with this JSON, with `blank` in place of the bytes of `range`.
pub(super) fn with_blank(json: &[u8], range: &Range<usize>, blank: &str) -> Vec<u8> {
    let mut header = [&to_u64(json.len()).to_le_bytes(), json].concat();
    if let Some(place) = header.get_mut(LENGTH_SIZE + range.start..LENGTH_SIZE + range.end) {
        place.copy_from_slice(blank.as_bytes());
    }
    header
}

/// Checks one tensor, whose offsets count from the start of the data.
fn check_entry(entry: Entry<'_>, data_begin: u64, data_bytes: u64) -> Result<()> {
    let Entry { begin, end, shape, dtype, .. } = entry;
    let offset = data_begin.saturating_add(begin);
    if begin > end {
        return Err(fault(entry, offset, format!("the data_offsets [{begin}, {end}] are reversed")));
    }
    if end > data_bytes {
        let message = format!(
            "the data_offsets [{begin}, {end}] go past the end of the data, which has {data_bytes} bytes; \
             the file is cut off; copy or download it again"
        );
        return Err(fault(entry, offset, message));
    }
    let bits = shape_bits(entry, offset)?;
    if bits % 8 != 0 {
        return Err(fault(entry, offset, format!("the shape {shape:?} x {dtype} is not a whole number of bytes")));
    }
    if bits / 8 != end - begin {
        let message = format!(
            "the shape {shape:?} x {dtype} needs {} bytes, but the data_offsets [{begin}, {end}] cover {}",
            bits / 8,
            end - begin
        );
        return Err(fault(entry, offset, message));
    }
    Ok(())
}

/// Returns the size of a tensor in bits. Neither it nor one of its strides exceeds 63 bits, PyTorch's limit.
fn shape_bits(entry: Entry<'_>, offset: u64) -> Result<u64> {
    let Entry { shape, dtype, .. } = entry;
    let fits = |value: u64| i64::try_from(value).ok().map(|_| value);
    let largest = shape.iter().try_fold(dtype.bits(), |bits, &size| bits.checked_mul(size.max(1)).and_then(fits));
    largest.ok_or_else(|| fault(entry, offset, format!("the shape {shape:?} x {dtype} overflows a 64-bit size")))?;
    Ok(shape.iter().fold(dtype.bits(), |bits, &size| bits.wrapping_mul(size)))
}

fn fault(entry: Entry<'_>, offset: u64, message: String) -> Error {
    Error::new(Kind::Malformed, message).tensor(entry.name).offset(offset)
}
