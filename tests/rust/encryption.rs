//! Encrypted files: what writers write, what loads accept, and what they refuse.

use crate::digests::stream;
use crate::files::{self, address_of, assert_fails, from_hex};
use crate::host_load::{load, regions};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fst::checkpoint::region::{IndexRange, TensorRegion};
use fst::checkpoint::{Checkpoint, OpenOptions};
use fst::device::host::Host;
use fst::dtype::Dtype;
use fst::encryption::chunks::CHUNK_BYTES;
use fst::encryption::key::EncryptionKey;
use fst::error::{Error, Kind};
use fst::format::Metadata;
use fst::format::encryption::{ENCRYPTION_KEY, TAGS_NAME};
use fst::format::layout::{Layout, Tensor};
use fst::format::shard::Shard;
use fst::load::stream::Order;
use fst::options::{Options, ReaderChoice};
use fst::os::lease::LeasedFile;
use fst::save::atomic_file::{ALIGNMENT, OutputFile};
use fst::save::file_kernel::{FileKernel, Linux};
use fst::save::file_save::{FileSave, NewFile};
use fst::save::rotate::rotate;
use fst::save::writer::Writer;
use fst::save::{DeviceStream, Extent};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

const CHUNK: usize = CHUNK_BYTES as usize;
/// Sizes of tensors: around chunks, and empty ones.
const SIZES: [usize; 10] = [3, 0, CHUNK, 1, CHUNK + 1, 2 * CHUNK + 500_000, 100_001, 7, CHUNK - 1, 0];
const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/encryption");

fn key() -> EncryptionKey {
    EncryptionKey::from_bytes(&[7; 32]).unwrap()
}

fn tight() -> Options {
    Options { chunk_bytes: 60 << 10, staging_bytes: 200 << 10, threads: 3, ..Options::default() }
}

fn sample() -> Vec<(Tensor, Vec<u8>)> {
    let tensor = |(index, &size): (usize, &usize)| {
        let tensor = Tensor::new(format!("t{index:03}"), Dtype::U8, vec![size as u64]).unwrap();
        (tensor, files::pattern(index, size))
    };
    SIZES.iter().enumerate().map(tensor).collect()
}

/// Writes tensors, each in pieces of up to 300,000 bytes.
fn fill(mut writer: Writer, tensors: &[(Tensor, Vec<u8>)]) -> fst::Result<()> {
    for (tensor, bytes) in tensors {
        writer.add(tensor.clone())?;
        for piece in bytes.chunks(300_000) {
            // SAFETY: the bytes outlive the call.
            unsafe { writer.append(&Host, 0, address_of(piece), piece.len() as u64) }?;
        }
    }
    writer.finish()
}

fn write(path: &Path, tensors: &[(Tensor, Vec<u8>)], metadata: Metadata, key: &EncryptionKey) -> fst::Result<()> {
    let output = OutputFile::create(path, Box::new(Linux))?;
    fill(Writer::begin(output, metadata, Some(key), &Options::default())?, tensors)
}

fn new_file(path: &Path, model: Option<&Path>) -> NewFile {
    NewFile { path: path.into(), model: model.map(Path::to_path_buf), metadata: None, key: Some(key()) }
}

/// Begins an encrypted save, and appends the tensors in pieces of up to 300,000 bytes, some of them per call.
fn begin_save(file: &NewFile, tensors: &[(Tensor, Vec<u8>)], options: &Options) -> fst::Result<FileSave> {
    let described = tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
    let streams = vec![DeviceStream { memory: Arc::new(Host), stream: 0 }];
    let mut save = FileSave::begin(file, described, streams, options)?;
    let pieces = |index: usize| tensors[index].1.chunks(300_000);
    let extent = |piece: &[u8]| Extent { device: 0, address: address_of(piece), length: piece.len() as u64 };
    let extents: Vec<Extent> = save.order().into_iter().flat_map(pieces).map(extent).collect();
    assert_eq!(save.scratch_bytes(&extents), [0]);
    for some in extents.chunks(3) {
        // SAFETY: the bytes outlive the call.
        unsafe { save.append(some, &[]) }?;
    }
    Ok(save)
}

/// Fails if the file has parts of the data of the tensors.
fn assert_hidden(file: &[u8], tensors: &[(Tensor, Vec<u8>)]) {
    let parts: Vec<&[u8]> = tensors.iter().flat_map(|(_, bytes)| bytes.chunks_exact(32).step_by(1000)).collect();
    assert!(!parts.is_empty());
    // Few windows have the first bytes of a part, so that few are compared.
    let first_bytes = |bytes: &[u8]| usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
    let mut begins_part = vec![false; 1 << 16];
    parts.iter().for_each(|part| begins_part[first_bytes(part)] = true);
    assert!(!file.windows(32).any(|window| begins_part[first_bytes(window)] && parts.contains(&window)));
}

fn open(path: &Path) -> fst::Result<Arc<Checkpoint>> {
    open_with(path, &key())
}

fn open_with(path: &Path, key: &EncryptionKey) -> fst::Result<Arc<Checkpoint>> {
    Checkpoint::open_with(&[path], &OpenOptions::from(key)).map(Arc::new)
}

/// Opens a file and loads all tensors, in the order of their names.
fn load_all(path: &Path) -> fst::Result<Vec<(String, Vec<u8>)>> {
    let checkpoint = open(path)?;
    let regions = regions(&checkpoint);
    let loaded = load(&checkpoint, &regions, Options::default())?;
    let mut named: Vec<_> = regions.iter().map(|region| region.name.to_string()).zip(loaded).collect();
    named.sort();
    Ok(named)
}

fn expected(tensors: &[(Tensor, Vec<u8>)]) -> Vec<(String, Vec<u8>)> {
    tensors.iter().map(|(tensor, bytes)| (tensor.name().to_owned(), bytes.clone())).collect()
}

struct Trial {
    path: PathBuf,
    bytes: Vec<u8>,
    directory: TempDir,
}

impl Trial {
    fn of(tensors: &[(Tensor, Vec<u8>)]) -> Trial {
        let (directory, path) = files::new_path("x.safetensors");
        write(&path, tensors, Some([("format".to_owned(), "pt".to_owned())].into()), &key()).unwrap();
        Trial { bytes: fs::read(&path).unwrap(), path, directory }
    }

    fn small() -> Trial {
        Trial::of(&small())
    }

    /// Loads changed bytes.
    fn load(&self, bytes: &[u8]) -> fst::Result<Vec<(String, Vec<u8>)>> {
        fs::write(&self.path, bytes).unwrap();
        load_all(&self.path)
    }

    fn opens(&self, key: &EncryptionKey) -> bool {
        open_with(&self.path, key).is_ok()
    }

    fn data_begin(&self) -> usize {
        files::data_begin(&self.bytes)
    }

    fn with_text(&self, from: &str, to: &str) -> Vec<u8> {
        with_text(&self.bytes, from, to)
    }

    fn text(&self) -> String {
        text(&self.bytes)
    }
}

/// Returns a file with another text in its header, which is as long.
fn with_text(file: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let begin = files::data_begin(file);
    let header = String::from_utf8(file[8..begin].to_vec()).unwrap();
    assert!(header.contains(from), "{header}");
    [&file[..8], header.replacen(from, to, 1).as_bytes(), &file[begin..]].concat()
}

/// Returns the text of the encryption in the header of a file.
fn text(file: &[u8]) -> String {
    let (_, header) = safetensors::SafeTensors::read_metadata(file).unwrap();
    header.metadata().as_ref().unwrap()[ENCRYPTION_KEY].clone()
}

fn small() -> Vec<(Tensor, Vec<u8>)> {
    let tensor = |name: &str, seed, size: u64| {
        (Tensor::new(name, Dtype::F32, vec![size]).unwrap(), files::pattern(seed, 4 * size as usize))
    };
    vec![tensor("bias", 1, 100), tensor("gain", 2, 100), tensor("head", 3, 300_000)]
}

#[test]
fn encrypted_files_load_with_their_key() {
    let sample = sample();
    let trial = Trial::of(&sample);
    let checkpoint = open(&trial.path).unwrap();
    let regions = regions(&checkpoint);
    assert_eq!(regions.len(), sample.len());
    for options in [Options::default(), tight(), Options { chunk_bytes: 3 << 20, ..tight() }] {
        for reader in [ReaderChoice::Auto, ReaderChoice::Mmap, ReaderChoice::Uring, ReaderChoice::Gds] {
            let loaded = load(&checkpoint, &regions, Options { reader, ..options.clone() }).unwrap();
            for (region, bytes) in regions.iter().zip(loaded) {
                let (_, expected) = sample.iter().find(|(tensor, _)| *tensor.name() == *region.name).unwrap();
                assert!(bytes == *expected, "{}", region.name);
            }
        }
    }
    assert_eq!(checkpoint.metadata().unwrap().unwrap().keys().collect::<Vec<_>>(), ["format"]);
    assert_hidden(&trial.bytes, &sample);
}

#[test]
fn writers_encrypt_whatever_the_size_of_their_blocks() {
    let sample = sample();
    let (_directory, path) = files::new_path("x.safetensors");
    for (chunk_bytes, threads) in [(60 << 10, 4), (CHUNK, 4), (CHUNK + (4 << 10), 1)] {
        let output = OutputFile::create(&path, Box::new(Linux)).unwrap();
        let options = Options { chunk_bytes, threads, ..Options::default() };
        fill(Writer::begin(output, None, Some(&key()), &options).unwrap(), &sample).unwrap();
        assert!(load_all(&path).unwrap() == expected(&sample), "{chunk_bytes} {threads}");
        assert_hidden(&fs::read(&path).unwrap(), &sample);
    }
}

#[test]
fn saves_encrypt_in_the_order_of_the_caller() {
    let directory = TempDir::new().unwrap();
    let [path, model] = ["x.safetensors", "model"].map(|name| directory.path().join(name));
    fs::write(&model, "").unwrap();
    fs::set_permissions(&model, fs::Permissions::from_mode(0o640)).unwrap();
    let mut sample = sample();
    sample.reverse();
    begin_save(&new_file(&path, Some(&model)), &sample, &Options::default()).unwrap().finish().unwrap();
    let file = fs::read(&path).unwrap();
    assert_hidden(&file, &sample);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    let names: Vec<String> = open(&path).unwrap().entries().map(|(_, entry)| entry.name.to_string()).collect();
    let with_data = |(tensor, _): &&(Tensor, Vec<u8>)| tensor.bytes() > 0;
    let ordered: Vec<&str> = sample.iter().filter(with_data).map(|(tensor, _)| tensor.name()).collect();
    assert_eq!(names.iter().filter(|name| ordered.contains(&name.as_str())).collect::<Vec<_>>(), ordered);
    sample.reverse();
    assert!(load_all(&path).unwrap() == expected(&sample));
}

#[test]
fn encrypted_saves_reserve_what_the_header_needs() {
    let (_directory, path) = files::new_path("x.safetensors");
    for count in [1, 5000] {
        // The data and the header are longer than a block.
        let mut tensors = vec![(Tensor::new("a", Dtype::U8, vec![100_000]).unwrap(), files::pattern(1, 100_000))];
        tensors.extend((0..count).map(|index| {
            let tensor = Tensor::new(format!("{index:0100}"), Dtype::U8, vec![3]).unwrap();
            (tensor, files::pattern(index, 3))
        }));
        begin_save(&new_file(&path, None), &tensors, &tight()).unwrap().finish().unwrap();
        let file = fs::read(&path).unwrap();
        let data_begin = files::data_begin(&file);
        assert_eq!(data_begin % ALIGNMENT, 0);
        assert!(data_begin - file[..data_begin].trim_ascii_end().len() < ALIGNMENT, "{count} {data_begin}");
        let mut expected = expected(&tensors);
        expected.sort();
        assert!(load_all(&path).unwrap() == expected);
    }
}

#[test]
fn an_unfinished_encrypted_save_leaves_the_old_file() {
    let trial = Trial::small();
    let names = || fs::read_dir(trial.directory.path()).unwrap().count();
    let begin = |tensors: &[(Tensor, Vec<u8>)]| begin_save(&new_file(&trial.path, None), tensors, &tight()).unwrap();
    drop(begin(&sample()));
    let mut save = begin(&small());
    let byte = Extent { device: 0, address: address_of(&[0]), length: 1 };
    // SAFETY: the byte is constant.
    assert_eq!(unsafe { save.append(&[byte], &[]) }.unwrap_err().kind(), Kind::Internal);
    drop(save);
    let mut incomplete = small();
    incomplete.last_mut().unwrap().1.pop();
    assert_eq!(begin(&incomplete).finish().unwrap_err().kind(), Kind::InvalidArgument);
    assert_eq!(fs::read(&trial.path).unwrap(), trial.bytes);
    assert_eq!(names(), 1);
}

#[test]
fn layout_is_that_of_safetensors() {
    let sample = sample();
    let trial = Trial::of(&sample);
    let plain = trial.directory.path().join("plain.safetensors");
    let output = OutputFile::create(&plain, Box::new(Linux)).unwrap();
    fill(Writer::begin(output, None, None, &Options::default()).unwrap(), &sample).unwrap();
    let plain = fs::read(plain).unwrap();
    let encrypted = safetensors::SafeTensors::deserialize(&trial.bytes).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&trial.bytes).unwrap();
    let (_, plain_header) = safetensors::SafeTensors::read_metadata(&plain).unwrap();
    for (tensor, _) in &sample {
        let (info, plain) = (header.info(tensor.name()).unwrap(), plain_header.info(tensor.name()).unwrap());
        assert_eq!((info.dtype, &info.shape, info.data_offsets), (plain.dtype, &plain.shape, plain.data_offsets));
    }
    // One chunk for each begun MiB.
    let count: usize = SIZES.iter().map(|bytes| bytes.div_ceil(CHUNK)).sum();
    assert_eq!(encrypted.tensor(TAGS_NAME).unwrap().shape(), [16 * count]);
    assert!(trial.text().starts_with("1:"));
}

#[test]
fn files_of_the_second_implementation_load() {
    let expected: serde_json::Value =
        serde_json::from_slice(&fs::read(format!("{DIRECTORY}/vectors.json")).unwrap()).unwrap();
    for vector in expected.as_array().unwrap() {
        let path = PathBuf::from(format!("{DIRECTORY}/{}", vector["file"].as_str().unwrap()));
        let mut keys = Vec::new();
        if let Some(hex) = vector["key"].as_str() {
            keys.push(EncryptionKey::from_bytes(&from_hex(hex)).unwrap());
        }
        if let Some(text) = vector["passphrase"].as_str() {
            keys.push(EncryptionKey::from_passphrase(text.as_bytes(), 1, 8 << 10).unwrap());
        }
        assert!(!keys.is_empty());
        for key in keys {
            let checkpoint = open_with(&path, &key).unwrap();
            let regions = regions(&checkpoint);
            let loaded = load(&checkpoint, &regions, tight()).unwrap();
            assert_eq!(regions.len(), vector["tensors"].as_object().unwrap().len());
            for (region, bytes) in regions.iter().zip(loaded) {
                let sha256 = fst::digest::Algorithm::Sha256.digest(&bytes).hex();
                assert_eq!(sha256, vector["tensors"][&*region.name].as_str().unwrap(), "{}", region.name);
            }
        }
    }
}

#[test]
fn streams_return_authentic_tensors_only() {
    let trial = Trial::small();
    let stream_all = || {
        let checkpoint = open(&trial.path)?;
        stream(&checkpoint, &regions(&checkpoint), tight(), Order::Submitted, |_| ())
    };
    let expected: Vec<Vec<u8>> = small().into_iter().map(|(_, bytes)| bytes).collect();
    assert!(stream_all().unwrap() == expected);
    files::damage(&trial.path, trial.data_begin() as u64 + 900);
    assert_fails(stream_all(), Kind::Integrity, &[]);
}

#[test]
fn a_file_opens_with_its_key_only() {
    let trial = Trial::small();
    let no_key = Checkpoint::open(&[&trial.path]);
    assert_fails(no_key, Kind::InvalidArgument, &["encrypted", "x.safetensors"]);
    let other = EncryptionKey::from_bytes(&[8; 32]).unwrap();
    assert_fails(open_with(&trial.path, &other), Kind::Integrity, &["another key"]);
    let passphrase = EncryptionKey::from_passphrase(b"open sesame", 1, 8 << 10).unwrap();
    assert_fails(open_with(&trial.path, &passphrase), Kind::Integrity, &["no key of a passphrase"]);
    // Someone replaces the file by one without encryption.
    let output = OutputFile::create(&trial.path, Box::new(Linux)).unwrap();
    fill(Writer::begin(output, None, None, &Options::default()).unwrap(), &small()).unwrap();
    assert_fails(open(&trial.path), Kind::Integrity, &["not encrypted"]);
}

#[test]
fn half_of_an_encryption_is_refused() {
    let trial = Trial::small();
    for text in [ENCRYPTION_KEY, TAGS_NAME] {
        let other = text.replace("fst", "abc");
        let bytes = trial.with_text(&format!("\"{text}\""), &format!("\"{other}\""));
        assert_fails(trial.load(&bytes), Kind::Malformed, &[]);
        assert_fails(Checkpoint::open(&[&trial.path]), Kind::Malformed, &[]);
    }
}

#[test]
fn passphrases_open_files() {
    let (_directory, path) = files::new_path("x.safetensors");
    let key = |text: &str| EncryptionKey::from_passphrase(text.as_bytes(), 2, 16 << 10).unwrap();
    write(&path, &small(), None, &key("open sesame").with_label("cave").unwrap()).unwrap();
    assert_eq!(open_with(&path, &key("open sesame")).unwrap().count(), 3);
    // The limits are the file's.
    assert!(open_with(&path, &EncryptionKey::from_passphrase(b"open sesame", 1, 8 << 10).unwrap()).is_ok());
    let error = open_with(&path, &key("open barley")).unwrap_err();
    assert!(!error.to_string().contains("barley"), "{error}");
    assert_fails::<()>(Err(error), Kind::Integrity, &["cave"]);
    assert_fails(open(&path), Kind::Integrity, &["has a key of a passphrase"]);
    for (passes, memory_bytes) in [(0, 8 << 10), (1, 4 << 10), (1, 8193), (1, 2 << 30), (5, 1 << 30), (1 << 40, 8192)] {
        assert_fails(EncryptionKey::from_passphrase(b"x", passes, memory_bytes), Kind::InvalidArgument, &[]);
    }
}

/// Returns the passes, the memory and the salt of Argon2id in the first key slot of a file.
fn derivation(path: &Path) -> Vec<u8> {
    let text = text(&fs::read(path).unwrap());
    URL_SAFE_NO_PAD.decode(text.split(':').nth(4).unwrap()).unwrap()[4..32].to_vec()
}

#[test]
fn files_that_were_read_do_not_choose_the_salt_of_new_files() {
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name);
    let key = |text: &str, passes| EncryptionKey::from_passphrase(text.as_bytes(), passes, 16 << 10).unwrap();
    let (own, stranger) = (key("open sesame", 2), key("open barley", 2));
    write(&path("stranger"), &small(), None, &stranger).unwrap();
    write(&path("weak"), &small(), None, &key("open sesame", 1)).unwrap();
    assert!(open_with(&path("stranger"), &own).is_err() && open_with(&path("weak"), &own).is_ok());
    for name in ["first", "second"] {
        write(&path(name), &small(), None, &own).unwrap();
    }
    let derivations = ["stranger", "weak", "first", "second"].map(|name| derivation(&path(name)));
    assert_eq!(derivations.iter().collect::<BTreeSet<_>>().len(), 4);
    assert_eq!(derivations[2][..12], [2_u32.to_le_bytes().as_slice(), &(16_u64 << 10).to_le_bytes()].concat());
    // The files of one save, and of one rotation, share a salt.
    let of_save = own.for_save().unwrap();
    for name in ["first", "second"] {
        write(&path(name), &small(), None, &of_save).unwrap();
    }
    assert_eq!(derivation(&path("first")), derivation(&path("second")));
    rotate(&[path("first"), path("second")], &own, &stranger, &Linux, None).unwrap();
    rotate(&[path("first"), path("second")], &stranger, &own, &Linux, None).unwrap();
    assert_eq!(derivation(&path("first")), derivation(&path("second")));
}

#[test]
fn limits_of_a_slot_are_checked_before_a_key_is_derived() {
    let (directory, path) = files::new_path("x.safetensors");
    let key = EncryptionKey::from_passphrase(b"open sesame", 1, 8 << 10).unwrap();
    write(&path, &small(), None, &key).unwrap();
    let trial = Trial { bytes: fs::read(&path).unwrap(), path, directory };
    let text = trial.text();
    let slot = text.split(':').nth(4).unwrap();
    for (position, value) in [(4, u32::MAX.to_le_bytes().to_vec()), (8, (1_u64 << 40).to_le_bytes().to_vec())] {
        let mut bytes = URL_SAFE_NO_PAD.decode(slot).unwrap();
        bytes[position..position + value.len()].copy_from_slice(&value);
        fs::write(&trial.path, trial.with_text(slot, &URL_SAFE_NO_PAD.encode(bytes))).unwrap();
        assert_fails(open_with(&trial.path, &key), Kind::Malformed, &["Argon2id"]);
    }
}

#[test]
fn changed_headers_are_errors_that_say_so() {
    let trial = Trial::small();
    let cipher = trial.text().split(':').nth(1).unwrap().to_owned();
    // Two tensors of the same size change places.
    let swapped = with_text(&trial.with_text("\"bias\"", "\"tmp_\""), "\"gain\"", "\"bias\"");
    let swapped = with_text(&swapped, "\"tmp_\"", "\"gain\"");
    let changes = [("\"bias\"", "\"gone\""), ("\"F32\"", "\"I32\""), ("\"pt\"", "\"tf\"")];
    for changed in changes.map(|(from, to)| trial.with_text(from, to)).into_iter().chain([swapped]) {
        assert_fails(trial.load(&changed), Kind::Integrity, &["header was changed"]);
    }
    // Downgrades.
    assert_fails(trial.load(&trial.with_text(":1048576:", ":0524288:")), Kind::Malformed, &[]);
    let version = trial.with_text(&format!("\"1:{cipher}"), &format!("\"0:{cipher}"));
    assert_fails(trial.load(&version), Kind::Malformed, &["version"]);
}

#[test]
fn parts_of_other_files_are_refused() {
    let (one, two) = (Trial::small(), Trial::small());
    let begin = one.data_begin();
    let other_header = [&two.bytes[..begin], &one.bytes[begin..]].concat();
    assert_fails(one.load(&other_header), Kind::Integrity, &["tensor ", ": byte "]);
    let slot = |trial: &Trial| trial.text().split(':').nth(4).unwrap().to_owned();
    let other_slot = one.with_text(&slot(&one), &slot(&two));
    assert_fails(one.load(&other_slot), Kind::Integrity, &["belongs to another file"]);
    // The chunk and its code, from the other file.
    let mut bytes = one.bytes.clone();
    let tags = bytes.len() - 16 * 4;
    bytes[begin..begin + 400].copy_from_slice(&two.bytes[begin..begin + 400]);
    bytes[tags..tags + 16].copy_from_slice(&two.bytes[tags..tags + 16]);
    assert_fails(one.load(&bytes), Kind::Integrity, &[]);
}

#[test]
fn chunks_keep_their_places() {
    let trial = Trial::small();
    let (begin, tags) = (trial.data_begin(), trial.bytes.len() - 16 * 4);
    // Two tensors of one chunk each, with their codes.
    let mut bytes = trial.bytes.clone();
    let (bias, gain) = bytes[begin..begin + 800].split_at_mut(400);
    bias.swap_with_slice(gain);
    let (bias, gain) = bytes[tags..tags + 32].split_at_mut(16);
    bias.swap_with_slice(gain);
    assert_fails(trial.load(&bytes), Kind::Integrity, &[&format!("tensor \"bias\": byte {begin}: ")]);
}

#[test]
fn names_and_keys_of_encrypted_files_are_reserved() {
    let (_directory, path) = files::new_path("x.safetensors");
    let output = || OutputFile::create(&path, Box::new(Linux)).unwrap();
    let metadata = |key: &str| Some([(key.to_owned(), "blake3".to_owned())].into());
    let refused = |error: Option<Error>| assert_eq!(error.unwrap().kind(), Kind::InvalidArgument);
    refused(Writer::begin(output(), metadata(ENCRYPTION_KEY), None, &Options::default()).err());
    refused(Layout::new(&[], &metadata(ENCRYPTION_KEY)).err());
    refused(Writer::begin(output(), metadata("fst.digests"), Some(&key()), &Options::default()).err());
    let tags = Tensor::new(TAGS_NAME, Dtype::U8, vec![0]).unwrap();
    refused(Layout::new(std::slice::from_ref(&tags), &None).err());
    refused(Writer::begin(output(), None, None, &Options::default()).unwrap().add(tags.clone()).err());
    refused(Writer::begin(output(), None, Some(&key()), &Options::default()).unwrap().add(tags).err());
}

#[test]
fn keys_are_not_shown() {
    let key = key().with_label("label").unwrap();
    assert_eq!(format!("{key:?}"), "EncryptionKey(\"label\", hidden)");
    let trial = Trial::small();
    let shown = format!("{:?}", open(&trial.path).unwrap());
    assert!(shown.contains("hidden") && !shown.contains("7, 7, 7"), "{shown}");
    assert!(key.with_label(&"x".repeat(65)).is_err());
    assert!(EncryptionKey::random().unwrap() != EncryptionKey::random().unwrap());
}

/// Kernel that writes a number of bytes before it fails, in pieces.
struct Failing(AtomicUsize);

impl FileKernel for Failing {
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let count = self.0.load(Ordering::Relaxed).min(bytes.len()).min(100);
        if count == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.fetch_sub(count, Ordering::Relaxed);
        Linux.write_at(file, &bytes[..count], offset)
    }
}

#[test]
fn rotation_changes_only_the_key() {
    let trial = Trial::small();
    let new = EncryptionKey::from_passphrase(b"open sesame", 1, 8 << 10).unwrap();
    assert!(trial.opens(&key()) && !trial.opens(&new));
    rotate(&[&trial.path], &key(), &new, &Linux, None).unwrap();
    assert!(!trial.opens(&key()) && trial.opens(&new));
    let bytes = fs::read(&trial.path).unwrap();
    assert!(bytes[trial.data_begin()..] == trial.bytes[trial.data_begin()..]);
    assert_eq!(rotate(&[&trial.path], &key(), &new, &Linux, None).unwrap_err().kind(), Kind::Integrity);
    // Into the slot that is free now.
    rotate(&[&trial.path], &new, &key(), &Linux, None).unwrap();
    assert!(trial.opens(&key()) && !trial.opens(&new));
    assert_eq!(load_all(&trial.path).unwrap(), expected(&small()));
}

/// Rotates a file to `new` while another process has its lock, which changes the file meanwhile.
fn rotate_after(trial: &Trial, new: &EncryptionKey, change: impl FnOnce()) -> fst::Result<bool> {
    let locked = File::open(&trial.path).unwrap();
    locked.lock().unwrap();
    thread::scope(|scope| {
        let rotation = scope.spawn(|| rotate(&[&trial.path], &key(), new, &Linux, None));
        thread::sleep(Duration::from_millis(100));
        assert!(!rotation.is_finished());
        change();
        drop(locked);
        rotation.join().unwrap()
    })
}

#[test]
fn a_rotation_waits_for_other_changes_of_its_file() {
    let trial = Trial::small();
    let [first, second] = [8, 9].map(|byte| EncryptionKey::from_bytes(&[byte; 32]).unwrap());
    rotate(&[&trial.path], &key(), &first, &Linux, None).unwrap();
    let rotated = fs::read(&trial.path).unwrap();
    fs::write(&trial.path, &trial.bytes).unwrap();
    // Another rotation, after which the old key opens nothing.
    let refused = rotate_after(&trial, &second, || fs::write(&trial.path, &rotated).unwrap());
    assert_fails(refused, Kind::Integrity, &[]);
    assert_eq!(fs::read(&trial.path).unwrap(), rotated);
    // A save, after which the path names another file.
    fs::write(&trial.path, &trial.bytes).unwrap();
    rotate_after(&trial, &second, || write(&trial.path, &small(), None, &key()).unwrap()).unwrap();
    assert!(trial.opens(&second));
    // A load, which holds a lease for a moment.
    let leased = LeasedFile::open(&files::local_file(&trial.path)).unwrap();
    let lease = leased.lease().unwrap();
    thread::scope(|scope| {
        let rotation = scope.spawn(|| rotate(&[&trial.path], &second, &first, &Linux, None));
        thread::sleep(Duration::from_millis(100));
        drop(lease);
        rotation.join().unwrap().unwrap();
    });
    assert!(trial.opens(&first));
}

#[test]
fn a_rotation_waits_for_each_file_up_to_its_limit_and_completes_later() {
    let trials = [(); 2].map(|()| Trial::small());
    let new = EncryptionKey::from_bytes(&[8; 32]).unwrap();
    let paths = [&trials[0].path, &trials[1].path];
    let rotated = || rotate(&paths, &key(), &new, &Linux, Some(Duration::from_millis(20)));
    for locked in [1, 0] {
        let other = File::open(paths[locked]).unwrap();
        other.lock().unwrap();
        assert_eq!(rotated(), Ok(false));
    }
    assert!(trials[0].opens(&new) && trials[1].opens(&key()));
    assert_eq!(rotated(), Ok(true));
    assert!(trials.iter().all(|trial| trial.opens(&new) && !trial.opens(&key())));
    assert_fails(rotated(), Kind::Integrity, &[]);
}

#[test]
fn an_interrupted_rotation_loses_no_key() {
    let trial = Trial::small();
    let new = EncryptionKey::from_bytes(&[8; 32]).unwrap();
    // Each slot has 256 characters.
    for written in [0, 1, 100, 255, 256, 257, 511] {
        fs::write(&trial.path, &trial.bytes).unwrap();
        let failing = Failing(AtomicUsize::new(written));
        assert_fails(rotate(&[&trial.path], &key(), &new, &failing, None), Kind::Io, &[]);
        assert!(trial.opens(&key()) || trial.opens(&new), "{written}");
        if trial.opens(&key()) {
            rotate(&[&trial.path], &key(), &new, &Linux, None).unwrap();
            assert!(!trial.opens(&key()));
        }
        assert!(trial.opens(&new));
    }
    let changed = trial.with_text("\"pt\"", "\"tf\"");
    fs::write(&trial.path, &changed).unwrap();
    assert_eq!(rotate(&[&trial.path], &key(), &new, &Linux, None).unwrap_err().kind(), Kind::Integrity);
    assert_eq!(fs::read(&trial.path).unwrap(), changed);
}

#[test]
fn slices_have_the_bytes_of_the_whole_tensor() {
    // The rows and columns of the matrix cross chunks.
    let whole = files::pattern(5, 2 * 1000 * 1300);
    let before = (Tensor::new("before", Dtype::U8, vec![33]).unwrap(), files::pattern(1, 33));
    let tensor = (Tensor::new("matrix", Dtype::BF16, vec![1000, 1300]).unwrap(), whole.clone());
    let trial = Trial::of(&[before, tensor]);
    let rows = (0_u64..1000, 1_u64..1000, 1_u64..400);
    let columns = (0_u64..1300, 1_u64..1300, prop_oneof![Just(1_u64), 1_u64..700]);
    proptest!(ProptestConfig::with_cases(40), |(rows in rows, columns in columns, is_tight in any::<bool>())| {
        let range = |(start, length, step): (u64, u64, u64), size: u64| {
            IndexRange { start, length: length.min((size - start).div_ceil(step)), step }
        };
        let ranges = [range(rows, 1000), range(columns, 1300)];
        let checkpoint = open(&trial.path).unwrap();
        let (source, entry) = checkpoint.find("matrix").unwrap();
        let region = TensorRegion::indexed(source, entry, &ranges).unwrap();
        let options = if is_tight { tight() } else { Options::default() };
        let loaded = load(&checkpoint, &Arc::from([region]), options).unwrap().remove(0);
        let indices = |range: IndexRange| (0..range.length).map(move |index| range.start + index * range.step);
        let expected: Vec<u8> = indices(ranges[0])
            .flat_map(|row| indices(ranges[1]).map(move |column| ((row * 1300 + column) * 2) as usize))
            .flat_map(|begin| whole[begin..begin + 2].to_vec())
            .collect();
        prop_assert!(loaded == expected);
    });
}

#[test]
fn mutated_files_give_the_right_data_or_a_named_error() {
    let trial = Trial::small();
    let position = prop_oneof![0_usize..1600, any::<prop::sample::Index>().prop_map(|index| index.index(1_300_000))];
    let cut = prop::option::of(0_usize..2000);
    proptest!(ProptestConfig::with_cases(150), |(position in position, byte in any::<u8>(), cut in cut)| {
        let mut bytes = trial.bytes.clone();
        let position = position % bytes.len();
        bytes[position] = byte;
        bytes.truncate(bytes.len() - cut.filter(|cut| cut % 3 == 0).unwrap_or(0));
        match trial.load(&bytes) {
            Ok(loaded) => prop_assert!(loaded == expected(&small())),
            Err(error) => prop_assert!([Kind::Integrity, Kind::Malformed].contains(&error.kind()), "{}", error),
        }
    });
}

#[test]
fn texts_of_shards_have_one_form() {
    let save = "0123456789abcdef".repeat(2);
    for places in ["1:1", "3:12"] {
        Shard::parse(&format!("{save}:{places}")).unwrap();
    }
    for places in ["", "1", "1:", "0:1", "2:1", "01:2", "+1:2", "1:2:3", "1:-1", "1:18446744073709551616"] {
        assert_eq!(Shard::parse(&format!("{save}:{places}")).unwrap_err().kind(), Kind::Malformed, "{places}");
    }
    for save in [&save[1..], &format!("{save}0"), &save.to_uppercase(), ""] {
        assert_eq!(Shard::parse(&format!("{save}:1:2")).unwrap_err().kind(), Kind::Malformed, "{save}");
    }
}
