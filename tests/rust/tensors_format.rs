//! tensorizer's format: what a parser accepts lies in the file, whatever the bytes are, and new files are read as written.

use crate::files::{self, any_damage, apply, assert_fails, from_hex};
use crypto_secretbox::aead::AeadInPlace;
use crypto_secretbox::{KeyInit, XSalsa20Poly1305};
use fst::checkpoint::Checkpoint;
use fst::digest::Algorithm;
use fst::dtype::Dtype;
use fst::encryption::chunks::Chunks;
use fst::encryption::key::EncryptionKey;
use fst::encryption::secret::{Derivation, KEY_BYTES, Key, SALT_BYTES};
use fst::error::{Kind, Result};
use fst::format::header::Header;
use fst::format::tensors::chunks::TensorsChunks;
use fst::format::tensors::cipher::Cipher;
use fst::format::tensors::encryption::{Encryption, PIECE_BYTES_MIN, Pieces};
use fst::format::tensors::layout::NewTensor;
use fst::format::tensors::preamble::{PREAMBLE_BYTES, Preamble};
use fst::format::tensors::{MAGIC, TensorKind, tensor_header};
use fst::options::Options;
use fst::save::atomic_file::OutputFile;
use fst::save::file_kernel::Linux;
use fst::save::writer::Writer;
use proptest::prelude::*;
use std::path::Path;

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
    assert_fails(Header::parse(&bytes, 387), Kind::Malformed, &[]);
}

fn encryption() -> Encryption {
    let derivation = Derivation { opslimit: 3, memlimit: 1 << 28, salt: [5; 16] };
    let pieces = Pieces { piece_bytes: 2048, nonce: [6; 24], macs: vec![[1; 16], [2; 16], [3; 16]] };
    Encryption { derivation: Some(derivation), pieces: Some(pieces) }
}

#[test]
fn encryption_is_parsed_as_encoded() {
    let bytes = encryption().encode();
    assert_eq!(Encryption::parse(&bytes, 0).unwrap(), encryption());
    // One piece of another type, as only old files have.
    let mut whole = vec![1, 0, 42, 0, 0, 0, 0, 0, 0, 0, 3, 0];
    whole.extend([7; 40]);
    let pieces = Encryption::parse(&whole, 0).unwrap().pieces.unwrap();
    assert_eq!((pieces.nonce, pieces.macs), ([7; 24], vec![[7; 16]]));
    // Twice, of no known type, with a byte after it, with too many chunks.
    let chunk = whole[2..].to_vec();
    let unknown = [&whole[..10], &[4, 0], &whole[12..]].concat();
    for hostile in [[&[2, 0][..], &chunk, &chunk].concat(), unknown, [&whole[..], &[0]].concat(), vec![255, 255]] {
        assert_fails(Encryption::parse(&hostile, 0), Kind::Malformed, &[]);
    }
    for length in 0..bytes.len() {
        assert_fails(Encryption::parse(&bytes[..length], 0), Kind::Malformed, &[]);
    }
}

#[test]
fn hostile_numbers_of_encryption_are_refused() {
    let bytes = encryption().encode();
    // Offsets of the method, of the limits, of the algorithm and of the size of the salt, and then of the size of a piece
    // and of the number of codes.
    let pieces = 2 + 8 + 2 + 2 + 8 + 8 + 4 + 2 + 16 + 8 + 2;
    let refused = [
        (12, 2, "unknown method"),
        (14, 0, "opslimit 0"),
        (14, u64::MAX, "product of at most"),
        (14, 17, "product of at most"),
        (22, 0, "memlimit 0"),
        (22, (1 << 30) + 1024, "memlimit of 8192 to 1073741824 bytes"),
        (22, u64::MAX, "memlimit"),
        (30, 1, "unknown algorithm"),
        (34, 15, "salt"),
        (pieces, 0, "multiple of 64"),
        (pieces, 1023, "multiple of 64"),
        (pieces, 2049, "multiple of 64"),
        (pieces + 32, 4, "authentication codes takes 64 bytes"),
        (pieces + 32, u64::MAX, "authentication codes takes"),
        (pieces + 32, 2, "too long"),
    ];
    for (offset, number, expected) in refused {
        let size = match offset {
            12 | 34 => 2,
            30 => 4,
            _ => 8,
        };
        let mut hostile = bytes.clone();
        hostile[offset..offset + size].copy_from_slice(&number.to_le_bytes()[..size]);
        assert_fails(Encryption::parse(&hostile, 100), Kind::Malformed, &[expected, "[malformed] byte "]);
    }
}

#[test]
fn each_piece_has_a_code() {
    let mut pieces = encryption().pieces.unwrap();
    for data_bytes in [0, 1, 4096, 6145] {
        let error = pieces.size(data_bytes).unwrap_err().to_string();
        assert!(error.contains(&format!("3 authentication codes for {data_bytes} bytes")), "{error}");
    }
    assert_eq!(pieces.size(6144).unwrap(), 2048);
    // A single piece has all data.
    pieces.macs.truncate(1);
    assert_eq!(pieces.size(6144).unwrap(), 6144);
    assert!(pieces.size(0).is_err());
}

#[test]
fn all_tensors_of_a_file_have_one_key() {
    let (_directory, path) = files::new_path("m");
    let derivation = Derivation { opslimit: 1, memlimit: 8192, salt: [5; 16] };
    let tensors = [("a", files::pattern(1, 100)), ("b", files::pattern(2, 5))];
    let passphrase = EncryptionKey::from_passphrase(b"secret", 1, 8192).unwrap();
    write_encrypted(&path, &Cipher::new(derivation.key(b"secret").unwrap(), Some(derivation)), &tensors);
    assert_eq!(decrypt_all(&path, &passphrase).unwrap(), tensors.each_ref().map(|(_, data)| data.clone()));
    let bytes = std::fs::read(&path).unwrap();
    let salt = bytes.windows(16).rposition(|window| window == [5; 16]).unwrap();
    files::damage(&path, salt as u64);
    assert_fails(decrypt_all(&path, &passphrase), Kind::Malformed, &["another salt"]);
    write_encrypted(&path, &Cipher::new(Key::new(&[1; 32]).unwrap(), None), &tensors);
    assert_fails(decrypt_all(&path, &passphrase), Kind::Integrity, &["not derived from a string"]);
}

#[test]
fn key_is_found_among_several() {
    let (_directory, path) = files::new_path("m");
    write_encrypted(&path, &Cipher::new(Key::new(&[7; 32]).unwrap(), None), &[("weight", files::pattern(3, 5000))]);
    let key = |byte| EncryptionKey::from_bytes(&[byte; 32]).unwrap();
    let source = files::source(&path);
    let header = Header::read(&source).unwrap();
    let open = |keys: &[EncryptionKey]| TensorsChunks::open(&header, &source, keys);
    let entry = header.find("weight").unwrap();
    let mut data = std::fs::read(&path).unwrap()[entry.begin as usize..entry.end as usize].to_vec();
    let chunks = open(&[key(6), EncryptionKey::from_passphrase(b"secret", 1, 8192).unwrap(), key(7), key(8)]).unwrap();
    chunks.decrypt(&chunks.units().at_or_after(entry.begin).unwrap(), &mut data).unwrap();
    assert_eq!(data, files::pattern(3, 5000));
    assert_fails(open(&[key(6), key(8)]), Kind::Integrity, &["none of the keys"]);
    assert_fails(open(&[]), Kind::InvalidArgument, &[]);
}

fn write_encrypted(path: &Path, cipher: &Cipher, tensors: &[(&str, Vec<u8>)]) {
    let output = OutputFile::create(path, Box::new(Linux)).unwrap();
    let mut writer = Writer::begin_tensors(output, Some((cipher.clone(), 2)), &Options::default()).unwrap();
    for (name, data) in tensors {
        writer.write_hashed(new_tensor(name, Dtype::U8, &[data.len() as u64], true), data).unwrap();
    }
    writer.finish().unwrap();
}

/// Opens a file, and decrypts all its tensors.
fn decrypt_all(path: &Path, key: &EncryptionKey) -> Result<Vec<Vec<u8>>> {
    let source = files::source(path);
    let header = Header::read(&source)?;
    let chunks = TensorsChunks::open(&header, &source, std::slice::from_ref(key))?;
    let mut found = Vec::new();
    for entry in header.entries() {
        let mut data = std::fs::read(path).unwrap()[entry.begin as usize..entry.end as usize].to_vec();
        let mut begin = entry.begin;
        while begin < entry.end {
            let chunk = chunks.units().at_or_after(begin).unwrap();
            let range = chunk.range.start - entry.begin..chunk.range.end - entry.begin;
            chunks.decrypt(&chunk, &mut data[range.start as usize..range.end as usize])?;
            begin = chunk.range.end;
        }
        found.push(data);
    }
    Ok(found)
}

#[test]
fn mutated_encrypted_files_have_the_right_data_or_none() {
    let (_directory, path) = files::new_path("m");
    let derivation = Derivation { opslimit: 1, memlimit: 8192, salt: [5; 16] };
    let cipher = Cipher::new(Key::new(&[9; 32]).unwrap(), Some(derivation));
    let key = EncryptionKey::from_bytes(&[9; 32]).unwrap();
    let tensors = [("a", files::pattern(1, 70)), ("b", files::pattern(2, 5))];
    write_encrypted(&path, &cipher, &tensors);
    let bytes = std::fs::read(&path).unwrap();
    let mut accepted = 0;
    for position in 0..bytes.len() {
        for mask in [1, 255] {
            let mut mutated = bytes.clone();
            mutated[position] ^= mask;
            std::fs::write(&path, &mutated).unwrap();
            match decrypt_all(&path, &key) {
                Ok(found) => {
                    let is_known = |data| tensors.iter().any(|(_, expected)| expected == data);
                    assert!(found.iter().all(is_known), "{position} {mask}");
                    accepted += 1;
                }
                Err(error) => {
                    let is_expected =
                        matches!(error.kind(), Kind::Malformed | Kind::Integrity | Kind::UnsupportedDtype);
                    assert!(is_expected, "{error}");
                }
            }
        }
    }
    // Hashes, indices of modules, reserved space, sizes that are hints.
    assert!(accepted < bytes.len(), "{accepted} of {}", bytes.len() * 2);
    for length in 0..bytes.len() - 8 {
        std::fs::write(&path, &bytes[..length]).unwrap();
        assert_fails(decrypt_all(&path, &key), Kind::Malformed, &[]);
    }
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
        version in 1_u32..6, damage in any_damage()
    ) {
        let mut bytes = header(version, &[entry("b", 2, 320, 380), entry("a", 1, 273, 300)]);
        apply(&damage, &mut bytes);
        check(&bytes, 388);
    }

    #[test]
    fn damaged_encryption_is_rejected_or_in_bounds(
        damage in any_damage(), length in 0_usize..200
    ) {
        let mut bytes = encryption().encode();
        apply(&damage, &mut bytes);
        bytes.truncate(length);
        if let Ok(encryption) = Encryption::parse(&bytes, 0) {
            prop_assert!(encryption.derivation.is_none_or(|derivation| derivation.check().is_ok()));
            if let Some(pieces) = encryption.pieces {
                let size = pieces.size(5000);
                prop_assert!(size.is_err() || 5000_u64.div_ceil(size.unwrap()) == pieces.macs.len() as u64);
            }
        }
    }
}

fn new_tensor(name: &str, dtype: Dtype, shape: &[u64], has_data: bool) -> NewTensor {
    NewTensor { name: name.into(), kind: TensorKind::Buffer, module: 7, dtype, shape: shape.to_vec(), has_data }
}

/// Writes a file, and checks that its tensors, types and hashes are read as they were written.
fn round_trip(tensors: &[NewTensor], options: &Options) -> u32 {
    let (_directory, path) = files::new_path("m");
    let output = OutputFile::create(&path, Box::new(Linux)).unwrap();
    let mut writer = Writer::begin_tensors(output, None, options).unwrap();
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
        let hash = |algorithm: Algorithm| algorithm.digest_parts([&stored.hashed[..], &data]);
        assert_eq!(stored.hashes, [hash(Algorithm::Crc32), hash(Algorithm::Sha256)]);
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

#[test]
fn keys_of_strings_are_those_of_argon2() {
    // From CosmJS's tests of libsodium: `argon2 ABCDEFGHIJKLMNOP -id -v 13 -k 1024 -t 5`, and with -k 8192 -t 2.
    let vectors = [
        (5, 1 << 20, "3c5d010180ba0cf5b6b858cba23b318e42d33088983c404598599c3b029ecac6"),
        (2, 8 << 20, "3ee950488d26ce691657b1d753f562139857b61a58f234d6cb0ce84c4cc27328"),
    ];
    for (opslimit, memlimit, expected) in vectors {
        let key = Derivation { opslimit, memlimit, salt: *b"ABCDEFGHIJKLMNOP" }.key(b"123").unwrap();
        assert_eq!(key.secret().as_slice(), from_hex(expected));
        assert_eq!(format!("{key:?}"), "Key(hidden)");
    }
    let check = |opslimit, memlimit| Derivation { opslimit, memlimit, salt: [0; SALT_BYTES] }.check().is_ok();
    assert!(check(4, 1 << 30) && check(1, 8192) && check(8, 512 << 20));
    assert!(!check(0, 1 << 20) && !check(1, 8191) && !check(1, (1 << 30) + 1024));
    assert!(!check(5, 1 << 30) && !check(u64::MAX, 1 << 20) && !check(u64::MAX, u64::MAX));
}

/// The vector of NaCl's and libsodium's tests of `crypto_secretbox`, as the piece 106 of a file. The nonces of pieces
/// are little-endian numbers.
#[test]
fn secret_box_is_that_of_nacl() {
    let key = from_hex("1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389");
    let mut nonce = from_hex("69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37");
    nonce[..2].copy_from_slice(&(0x6969_u16 - 106).to_le_bytes());
    let mac = from_hex("f3ffc7703f9400e52a7dfb4b3d3305d9").try_into().unwrap();
    let mut data = from_hex(
        "8e993b9f48681273c29650ba32fc76ce48332ea7164d96a4476fb8c531a1186ac0dfc17c98dce87b4da7f011ec48c97271d2c20f9b928fe22\
         70d6fb863d51738b48eeee314a7cc8ab932164548e526ae90224368517acfeabd6bb3732bc0e9da99832b61ca01b6de56244a9e88d5f9b379\
         73f622a43d14a6599b1f654cb45a74e355a5",
    );
    let plain = from_hex(
        "be075fc53c81f2d5cf141316ebeb0c7b5228c52a4c62cbd44b66849b64244ffce5ecbaaf33bd751a1ac728d45e6c61296cdc3c01233561f41\
         db66cce314adb310e3be8250c46f06dceea3a7fa1348057e2f6556ad6b1318a024a838f21af1fde048977eb48f59ffd4924ca1c60902e52f0\
         a089bc76897040e082f937763848645e0705",
    );
    let pieces = Pieces { piece_bytes: PIECE_BYTES_MIN, nonce: nonce.try_into().unwrap(), macs: vec![mac; 107] };
    let cipher = Cipher::new(Key::new(&key).unwrap(), None);
    assert!(cipher.decrypt(&pieces, 106, &mut data));
    assert_eq!(data, plain);
    assert!(!cipher.decrypt(&pieces, 105, &mut data));
    assert!(data.iter().all(|&byte| byte == 0));
}

/// The crate's cipher computes one block at a time.
#[test]
fn cipher_of_several_blocks_is_that_of_the_crate() {
    let key = [7; KEY_BYTES];
    let cipher = Cipher::new(Key::new(&key).unwrap(), None);
    for length in (1..1200).step_by(37).chain([512 - 32, 512 + 32, 64 << 10]) {
        let plain: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
        let mut data = plain.clone();
        let nonce = [length as u8; 24];
        let secret_box = XSalsa20Poly1305::new(&key.into());
        let mac = secret_box.encrypt_in_place_detached(&nonce.into(), b"", &mut data).unwrap();
        let pieces = Pieces { piece_bytes: PIECE_BYTES_MIN, nonce, macs: vec![mac.into()] };
        assert!(cipher.decrypt(&pieces, 0, &mut data), "{length}");
        assert!(data == plain, "{length}");
    }
}
