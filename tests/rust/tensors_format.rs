//! tensorizer's format: what a parser accepts lies in the file, whatever the bytes are, and new files are read as written.

use crate::files;
use fst::checkpoint::Checkpoint;
use fst::dtype::Dtype;
use fst::error::Kind;
use fst::format::header::Header;
use fst::format::tensors::layout::NewTensor;
use fst::format::tensors::preamble::{PREAMBLE_BYTES, Preamble};
use fst::format::tensors::tensor_header::Hash;
use fst::format::tensors::{MAGIC, TensorKind, tensor_header};
use fst::options::Options;
use fst::save::atomic_file::OutputFile;
use fst::save::file_kernel::Linux;
use fst::save::writer::Writer;
use proptest::prelude::*;
use tempfile::TempDir;

/// Size of the metadata of the files here, in bytes.
const METADATA_BYTES: u64 = 200;

fn preamble(version: u32, tensors: u64) -> Vec<u8> {
    let preamble = Preamble {
        version,
        is_encrypted: version == 3,
        has_entry_versions: version == 5,
        tensor_bytes: 0,
        tensors,
        metadata_bytes: METADATA_BYTES,
    };
    preamble.encode().to_vec()
}

/// Encodes a metadata entry of a tensor of F32 with one dimension.
fn entry(name: &str, size: u32, header_begin: u64, begin: u64) -> Vec<u8> {
    let mut bytes = (name.len() as u16).to_le_bytes().to_vec();
    bytes.extend(name.as_bytes());
    bytes.extend([2, 3]);
    bytes.extend(b"<f4");
    bytes.push(1);
    bytes.extend(size.to_le_bytes());
    for number in [header_begin, begin, u64::from(size) * 4] {
        bytes.extend(number.to_le_bytes());
    }
    bytes
}

fn header(version: u32, entries: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = preamble(version, entries.len() as u64);
    bytes.extend(entries.concat());
    bytes.resize((PREAMBLE_BYTES + METADATA_BYTES) as usize, 0);
    bytes
}

#[test]
fn preambles_are_parsed_as_encoded() {
    for version in 1..=5 {
        let bytes = preamble(version, 7);
        assert!(bytes.starts_with(MAGIC));
        let parsed = Preamble::parse(&bytes).unwrap();
        assert_eq!(parsed.encode().to_vec(), bytes);
        assert_eq!((parsed.version, parsed.tensors), (version, 7));
    }
}

#[test]
fn entries_are_sorted_by_their_data() {
    let bytes = header(2, &[entry("b", 2, 320, 380), entry("a", 1, 273, 300)]);
    let header = Header::parse(&bytes, 388).unwrap();
    let entries: Vec<_> = header.entries().map(|entry| (entry.name, entry.begin, entry.end)).collect();
    assert_eq!(entries, [("a", 300, 304), ("b", 380, 388)]);
    let found = header.find("b").unwrap();
    let tensors = found.tensors.unwrap();
    assert_eq!((found.shape, tensors.kind, tensors.header_begin), (&[2][..], TensorKind::StateDict, 320));
    assert_eq!(tensor_header::range(found, tensors).unwrap(), 320..380);
    // One byte less, and the tensor is not in the file.
    assert_eq!(Header::parse(&bytes, 387).unwrap_err().kind(), Kind::Malformed);
}

#[test]
fn encrypted_files_are_refused() {
    let error = Header::parse(&header(3, &[]), 1000).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidArgument);
    assert!(error.to_string().contains("encrypted"), "{error}");
}

/// Checks that every tensor of an accepted header lies in the file, behind the metadata, and apart from the others.
fn check(bytes: &[u8], file_bytes: u64) {
    let Ok(header) = Header::parse(bytes, file_bytes) else { return };
    let mut end = PREAMBLE_BYTES;
    for entry in header.entries() {
        assert!(entry.begin >= end && entry.end >= entry.begin && entry.end <= file_bytes);
        assert_eq!(header.find(entry.name), Some(entry));
        end = entry.end;
        let range = tensor_header::range(entry, entry.tensors.unwrap());
        assert!(range.is_ok_and(|range| range.end == entry.begin) || entry.begin > PREAMBLE_BYTES);
        // The bytes of the data are as good as others for a header.
        let _ = tensor_header::parse(bytes, entry, entry.tensors.unwrap());
    }
}

proptest! {
    #[test]
    fn damaged_metadata_is_rejected_or_lies_in_the_file(
        version in 1_u32..6, damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5)
    ) {
        let mut bytes = header(version, &[entry("b", 2, 320, 380), entry("a", 1, 273, 300)]);
        for (index, byte) in damage {
            let position = index.index(bytes.len());
            bytes[position] = byte;
        }
        check(&bytes, 388);
    }

    #[test]
    fn arbitrary_metadata_does_not_panic(
        version in 1_u32..6, tensors in 0_u64..4, metadata in proptest::collection::vec(any::<u8>(), 0..200)
    ) {
        let mut bytes = preamble(version, tensors);
        bytes.extend(metadata);
        check(&bytes, 388);
    }
}

fn new_tensor(name: &str, dtype: Dtype, shape: &[u64], has_data: bool) -> NewTensor {
    NewTensor { name: name.into(), kind: TensorKind::Buffer, module: 7, dtype, shape: shape.to_vec(), has_data }
}

/// Writes a file, and checks that its tensors, types and hashes are read as they were written.
fn round_trip(tensors: &[NewTensor], options: &Options) -> u32 {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("m");
    let output = OutputFile::create(&path, Box::new(Linux)).unwrap();
    let mut writer = Writer::begin_tensors(output, options).unwrap();
    let data = |tensor: &NewTensor| files::pattern(tensor.name.len(), tensor.data_bytes().unwrap() as usize);
    for tensor in tensors {
        writer.write_hashed(tensor.clone(), &data(tensor)).unwrap();
    }
    writer.finish().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes.ends_with(&[0; 8]));
    let header = Header::read(&files::source(&path)).unwrap();
    assert_eq!(header.entries().len(), tensors.len());
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    for tensor in tensors {
        let entry = header.find(&tensor.name).unwrap();
        assert_eq!((entry.dtype, entry.shape), (tensor.dtype, &tensor.shape[..]));
        assert_eq!(bytes[entry.begin as usize..entry.end as usize], data(tensor));
        let stored = &checkpoint.tensor_headers(std::slice::from_ref(&tensor.name)).unwrap()[0];
        assert_eq!((stored.kind, stored.module), (TensorKind::Buffer, 7));
        let data = data(tensor);
        assert_eq!(stored.hashes, [Hash::crc32(&stored.hashed, &data), Hash::sha256(&stored.hashed, &data)]);
    }
    Preamble::parse(&bytes).unwrap().version
}

#[test]
fn files_are_read_as_written() {
    let options = Options::default();
    let weight = new_tensor("weight", Dtype::F32, &[3, 5], true);
    assert_eq!(round_trip(&[], &options), 1);
    assert_eq!(round_trip(&[weight.clone(), new_tensor("s", Dtype::C128, &[], true)], &options), 1);
    assert_eq!(round_trip(&[new_tensor("b", Dtype::BF16, &[7], true), weight.clone()], &options), 2);
    assert_eq!(round_trip(&[weight.clone(), new_tensor("meta", Dtype::F32, &[7], false)], &options), 4);
    assert_eq!(round_trip(&[weight, new_tensor("long", Dtype::U8, &[1 << 40, 0], true)], &options), 5);
}

#[test]
fn metadata_outgrows_the_reserved_space() {
    let options = Options { chunk_bytes: 64 << 10, ..Options::default() };
    let name = |index: usize| format!("{index}{}", "x".repeat(300));
    let tensors: Vec<_> = (0..2000).map(|index| new_tensor(&name(index), Dtype::U8, &[40], true)).collect();
    round_trip(&tensors, &options);
}
