//! A file's header: read, parsed, and checked whole before any data is read.
//!
//! ```text
//! byte 0          8                8 + n                       end of file
//!      | n as u64 | n bytes of JSON | data, tiled by the tensors without gap |
//! ```
//!
//! The parser is our own on top of `serde_json`, since the checks of the
//! `safetensors` crate want a slice as long as the file, let the last of two
//! equal keys win, and cannot say where in the file a fault is.

mod json;

use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::profile::{self, Stage};
use crate::source::Source;
use hashbrown::{HashTable, hash_table};
use serde_json::json;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The length field at the start of a file.
pub const LENGTH_BYTES: u64 = 8;
/// The most bytes of JSON that are accepted, the same as in the `safetensors` crate.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// The most dimensions that are accepted, the same as PyTorch's own limit.
pub const DIMENSIONS_MAX: usize = 64;

/// What a header says of one tensor, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// The element type.
    pub dtype: Dtype,
    /// The shape, in elements of the file.
    pub shape: &'a [u64],
    /// The first byte, from the start of the file.
    pub begin: u64,
    /// One past the last byte, from the start of the file.
    pub end: u64,
}

/// A checked header.
///
/// A checkpoint can have a hundred thousand tensors of which a caller wants ten, so what belongs to one tensor
/// is no allocation of its own: names and shapes stand in two arrays, one behind the other.
#[derive(Debug, Default)]
pub struct Header {
    /// In the order of their bytes.
    records: Vec<Record>,
    names: String,
    sizes: Vec<u64>,
    /// The free text under `__metadata__`, if that is there.
    metadata: Option<BTreeMap<String, String>>,
    positions: HashTable<usize>,
    hasher: RandomState,
}

/// One tensor, whose name and shape are ranges of the header's arrays.
#[derive(Debug)]
struct Record {
    dtype: Dtype,
    begin: u64,
    end: u64,
    name: Range<usize>,
    shape: Range<usize>,
}

impl Header {
    /// Reads and checks the header of a file.
    ///
    /// # Errors
    /// `malformed` with the byte offset of the fault; `io` where reading fails.
    pub fn read(source: &Source) -> Result<Header> {
        let json = Header::read_json(source)?;
        Header::parse(&json, source.length).map_err(|error| error.at(&source.path))
    }

    /// Reads the JSON of a file's header and checks its length, nothing more.
    ///
    /// # Errors
    /// Those of [`Header::read`] that concern the length.
    pub fn read_json(source: &Source) -> Result<Vec<u8>> {
        let malformed =
            |offset: u64, message: String| Error::new(Kind::Malformed, message).at(&source.path).offset(offset);
        if source.length < LENGTH_BYTES {
            return Err(malformed(
                0,
                format!(
                    "the file has {} bytes; a safetensors file begins with a header length of {LENGTH_BYTES} bytes",
                    source.length
                ),
            ));
        }
        let read = |into: &mut [u8], offset: u64| {
            source.file.read_exact_at(into, offset).map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    malformed(offset, "the file became shorter while it was read".into())
                }
                _ => Error::from_io(&error, &source.path, "cannot read the header").offset(offset),
            })
        };
        let mut length = [0; 8];
        read(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        let room = (source.length - LENGTH_BYTES).min(HEADER_BYTES_MAX);
        if length > room {
            return Err(malformed(
                0,
                format!(
                    "the header length is {length}, but the file has {} bytes after it and at most {HEADER_BYTES_MAX} \
                     are accepted; the file is cut off or is not safetensors",
                    source.length - LENGTH_BYTES
                ),
            ));
        }
        let path = || json!({ "path": source.path.to_string_lossy() }).into();
        let _span = profile::span(Stage::Header).bytes(LENGTH_BYTES + length).detail(path);
        let size = usize::try_from(length).map_err(|_| malformed(0, format!("the header length is {length}")))?;
        let mut json = vec![0; size];
        read(&mut json, LENGTH_BYTES)?;
        Ok(json)
    }

    /// Parses and checks the JSON of a header for a file of `file_bytes` in all.
    ///
    /// # Errors
    /// `malformed`, with the offset in the file but without its path.
    pub fn parse(json: &[u8], file_bytes: u64) -> Result<Header> {
        json::parse(json)?.check(to_u64(json.len()), file_bytes)
    }

    /// The tensors in the order of their bytes.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = Entry<'_>> {
        self.records.iter().map(|record| self.entry(record))
    }

    /// The tensor at a position of that order.
    pub fn get(&self, position: usize) -> Option<Entry<'_>> {
        self.records.get(position).map(|record| self.entry(record))
    }

    /// The tensor with this name.
    pub fn find(&self, name: &str) -> Option<Entry<'_>> {
        self.position(name).and_then(|position| self.get(position))
    }

    /// The position of the tensor with this name.
    pub fn position(&self, name: &str) -> Option<usize> {
        let is_it = |&position: &usize| self.get(position).is_some_and(|entry| entry.name == name);
        self.positions.find(self.hasher.hash_one(name), is_it).copied()
    }

    /// The free text under `__metadata__`, if that is there.
    pub fn metadata(&self) -> Option<&BTreeMap<String, String>> {
        self.metadata.as_ref()
    }

    fn entry(&self, record: &Record) -> Entry<'_> {
        Entry {
            name: self.names.get(record.name.clone()).unwrap_or_default(),
            dtype: record.dtype,
            shape: self.sizes.get(record.shape.clone()).unwrap_or_default(),
            begin: record.begin,
            end: record.end,
        }
    }

    /// Checks what was parsed: until then offsets count from the start of the data section.
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
        // The order of the keys in the JSON is free; the bytes must tile the data section.
        if !self.records.is_sorted_by_key(|record| (record.begin, record.end)) {
            self.records.sort_by_key(|record| (record.begin, record.end));
        }
        self.index_names()?;
        let mut expected = data_begin;
        for entry in self.entries() {
            if entry.begin != expected {
                let what = if entry.begin > expected { "leave a gap" } else { "overlap another tensor" };
                return Err(fault(entry, entry.begin, format!("the data_offsets {what}: byte {expected} comes next")));
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
            let is_it = |&other: &usize| name_at(other) == entry.name;
            match positions
                .entry(self.hasher.hash_one(entry.name), is_it, |&other| self.hasher.hash_one(name_at(other)))
            {
                hash_table::Entry::Vacant(place) => place.insert(position),
                hash_table::Entry::Occupied(_) => {
                    return Err(fault(entry, entry.begin, "the name stands twice in the header".into()));
                }
            };
        }
        self.positions = positions;
        Ok(())
    }
}

/// Checks one tensor on its own, with offsets from the start of the data section.
fn check_entry(entry: Entry<'_>, data_begin: u64, data_bytes: u64) -> Result<()> {
    let Entry { begin, end, shape, dtype, .. } = entry;
    let place = data_begin.saturating_add(begin);
    if begin > end {
        return Err(fault(entry, place, format!("the data_offsets [{begin}, {end}] are reversed")));
    }
    if end > data_bytes {
        let message = format!(
            "the data_offsets [{begin}, {end}] go past the end of the data, which has {data_bytes} bytes; \
             the file is cut off"
        );
        return Err(fault(entry, place, message));
    }
    let bits = shape_bits(shape, dtype)
        .ok_or_else(|| fault(entry, place, format!("the shape {shape:?} x {dtype} overflows a 64-bit size")))?;
    if bits % 8 != 0 {
        return Err(fault(entry, place, format!("the shape {shape:?} x {dtype} is not a whole number of bytes")));
    }
    if bits / 8 != end - begin {
        let message = format!(
            "the shape {shape:?} x {dtype} needs {} bytes, but the data_offsets [{begin}, {end}] cover {}",
            bits / 8,
            end - begin
        );
        return Err(fault(entry, place, message));
    }
    Ok(())
}

/// The size of a tensor in bits, if it and every stride of it fit into 63 bits, as PyTorch needs.
fn shape_bits(shape: &[u64], dtype: Dtype) -> Option<u64> {
    let fits = |value: u64| i64::try_from(value).ok().map(|_| value);
    shape.iter().try_fold(dtype.bits(), |product, &size| product.checked_mul(size.max(1)).and_then(fits))?;
    Some(shape.iter().fold(dtype.bits(), |product, &size| product.wrapping_mul(size)))
}

fn fault(entry: Entry<'_>, offset: u64, message: String) -> Error {
    Error::new(Kind::Malformed, message).tensor(entry.name).offset(offset)
}

fn to_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
