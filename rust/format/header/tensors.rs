//! Parses the metadata of a `.tensors` file into an unchecked header.

use super::{Entry, Header, Record, TensorsEntry, fault, shape_bits};
use crate::error::{Error, Kind, Result};
use crate::format::tensors::Fields;
use crate::format::tensors::preamble::{PREAMBLE_BYTES, PREAMBLE_SIZE, Preamble, VERSION_NUMPY};

/// Returns how many bytes of a file hold its metadata, given its first [`PREAMBLE_SIZE`] bytes. Fails with `malformed`,
/// with the offset of the fault.
pub(super) fn metadata_bytes(preamble: &[u8]) -> Result<u64> {
    Ok(Preamble::parse(preamble)?.metadata_bytes)
}

/// Parses and checks the preamble and the metadata of a file that is `file_bytes` long.
pub(super) fn parse(bytes: &[u8], file_bytes: u64) -> Result<Header> {
    let preamble = Preamble::parse(bytes)?;
    let data_begin = PREAMBLE_BYTES.saturating_add(preamble.metadata_bytes);
    let mut fields = Fields::new(bytes.get(PREAMBLE_SIZE..).unwrap_or_default(), PREAMBLE_BYTES);
    let mut header = Header::default();
    for _ in 0..preamble.tensors {
        // The number of tensors is not believed: each takes bytes of the metadata.
        let record = parse_entry(&mut fields, &mut header, &preamble)?;
        check(header.entry(&record), data_begin, file_bytes)?;
        header.records.push(record);
    }
    header.sort_by_place();
    header.index_names()?;
    let mut end = data_begin;
    for entry in header.entries() {
        if entry.begin < end {
            let message = format!("the data begins before byte {end}, where that of another tensor ends");
            return Err(fault(entry, entry.begin, message));
        }
        end = entry.end;
    }
    Ok(header)
}

fn parse_entry(fields: &mut Fields<'_>, header: &mut Header, preamble: &Preamble) -> Result<Record> {
    let is_long = preamble.has_entry_versions && {
        let begin = fields.offset();
        let version = fields.number::<4>("the version of a metadata entry")?;
        let is_long = version == LONG_ENTRY;
        if !is_long && version != u64::from(VERSION_NUMPY) {
            let message = format!("the metadata entry has version {version}, but must have 1 or 5");
            return Err(Error::new(Kind::Malformed, message).offset(begin));
        }
        is_long
    };
    let name = fields.name()?;
    let name_begin = header.names.len();
    header.names.push_str(name);
    let mut parse_rest = || {
        let kind = fields.kind()?;
        let dtype = fields.dtype()?;
        let shape_begin = header.sizes.len();
        header.sizes.extend(fields.shape(dtype, is_long)?);
        let header_begin = fields.number::<8>("the offset of the tensor's header")?;
        let begin = fields.number::<8>("the offset of the data")?;
        let length_begin = fields.offset();
        let length = fields.number::<8>("the size of the data")?;
        let end = i64::try_from(length).ok().and_then(|_| begin.checked_add(length)).ok_or_else(|| {
            let message = format!("the data has {length} bytes from byte {begin}, which is no range of a file");
            Error::new(Kind::Malformed, message).offset(length_begin)
        })?;
        Ok(Record {
            dtype,
            begin,
            end,
            name: name_begin..name_begin.saturating_add(name.len()),
            shape: shape_begin..header.sizes.len(),
            tensors: Some(TensorsEntry { kind, header_begin, is_long, is_encrypted: preamble.is_encrypted }),
        })
    };
    parse_rest().map_err(|error: Error| error.tensor(name))
}

/// Version of a metadata entry whose dimensions have 8 bytes.
const LONG_ENTRY: u64 = 5;

fn check(entry: Entry<'_>, data_begin: u64, file_bytes: u64) -> Result<()> {
    let Entry { begin, end, shape, dtype, .. } = entry;
    if begin < data_begin || end > file_bytes {
        let message = format!(
            "the data [{begin}, {end}] is not between the metadata, which ends at byte {data_begin}, and the end of the \
             file at byte {file_bytes}; the file is cut off; copy or download it again"
        );
        return Err(fault(entry, begin, message));
    }
    if entry.tensors.is_some_and(|tensors| tensors.header_begin < data_begin || tensors.header_begin > begin) {
        let message = "the header of the tensor is not between the metadata and the data of the tensor";
        return Err(fault(entry, begin, message.into()));
    }
    let bits = shape_bits(entry, begin)?;
    // A tensor without data was on the device "meta" when it was written.
    if bits / 8 != end - begin && end != begin {
        let message =
            format!("the shape {shape:?} x {dtype} needs {} bytes, but the data has {}", bits / 8, end - begin);
        return Err(fault(entry, begin, message));
    }
    Ok(())
}
