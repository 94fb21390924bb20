//! Digests: those of pieces in any order, those that a save writes, and those that a load compares.

use crate::files;
use crate::host_load::{destinations, load, regions};
use crate::save;
use fst::checkpoint::region::TensorRegion;
use fst::checkpoint::verify::{Cover, Partial, Request, Verify};
use fst::checkpoint::{Checkpoint, OpenOptions};
use fst::device::host::Host;
use fst::digest::manifest::Manifest;
use fst::digest::{Algorithm, Hash};
use fst::error::{Error, Kind, Result};
use fst::format::Metadata;
use fst::format::digests::DIGESTS_KEY;
use fst::load::check;
use fst::load::stream::{Order, Stream};
use fst::load::views::{Mappings, Views};
use fst::options::{Options, ReaderChoice};
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use tempfile::TempDir;

const ALGORITHMS: [Algorithm; 2] = [Algorithm::Blake3, Algorithm::Sha256];
/// Sizes of tensors: around blocks of BLAKE3, several chunks, and empty ones.
const SIZES: [usize; 12] = [3, 0, 40_000, 1, 4096, 1024, 1025, 8192, 12_345, 7, 100_001, 0];

fn tight() -> Options {
    Options { chunk_bytes: 8 << 10, staging_bytes: 16 << 10, threads: 5, ..Options::default() }
}

fn sample() -> Vec<(String, Vec<u8>)> {
    save::sample(&SIZES)
}

fn metadata(algorithm: &str) -> Metadata {
    Some([(DIGESTS_KEY.to_owned(), algorithm.to_owned())].into())
}

/// Saves the sample in two calls.
fn save(path: &Path, metadata: &Metadata) -> fst::Result<()> {
    save::save_with(path, &sample(), metadata, save::kernel(), 7)
}

fn write(path: &Path, metadata: Metadata) -> fst::Result<()> {
    save::write_with(path, &sample(), metadata, save::kernel())
}

fn open(path: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open_with(&[path], &Verify::Digests.into()).unwrap())
}

fn assert_is_sample(checkpoint: &Arc<Checkpoint>, loaded: &[Vec<u8>]) {
    for (region, bytes) in regions(checkpoint).iter().zip(loaded) {
        let (_, expected) = sample().into_iter().find(|(name, _)| **name == *region.name).unwrap();
        assert!(*bytes == expected, "{}", region.name);
    }
}

/// Changes one byte of a file, and returns it before.
fn damage(path: &Path, offset: u64) -> Vec<u8> {
    let before = fs::read(path).unwrap();
    let mut bytes = before.clone();
    bytes[offset as usize] ^= 1;
    fs::write(path, bytes).unwrap();
    before
}

fn views_of(checkpoint: &Arc<Checkpoint>) -> Views {
    views_of_regions(checkpoint, &regions(checkpoint)).unwrap()
}

fn views_of_regions(checkpoint: &Checkpoint, regions: &[TensorRegion]) -> Result<Views> {
    let dtypes: Vec<_> = regions.iter().map(|region| Some(region.dtype)).collect();
    let options = Options { reader: ReaderChoice::Mmap, ..tight() };
    Views::open(checkpoint, &Mappings::default(), regions, &dtypes, &options)
}

/// Runs every way to load, and returns the error of each.
fn load_errors(path: &Path, verify: &Verify) -> Vec<Option<Error>> {
    let checkpoint = Arc::new(Checkpoint::open_with(&[path], &verify.clone().into()).unwrap());
    let regions = regions(&checkpoint);
    let mut errors = Vec::new();
    for reader in [ReaderChoice::Pread, ReaderChoice::Uring, ReaderChoice::Auto] {
        for staging_bytes in [8 << 10, 64 << 10] {
            errors.push(load(&checkpoint, &regions, Options { reader, staging_bytes, ..tight() }).err());
        }
    }
    errors.push(check::check_regions(&checkpoint, &regions, &tight()).err());
    errors.push(views_of(&checkpoint).verify().err());
    let guarded = views_of(&checkpoint);
    let mut viewed = (0..regions.len()).filter(|&tensor| guarded.address(tensor).is_some());
    errors.push(viewed.try_for_each(|tensor| guarded.guard(tensor).map(drop)).err());
    errors
}

fn hex_of(path: &Path, algorithm: Algorithm) -> String {
    algorithm.digest(&fs::read(path).unwrap()).to_string()
}

fn manifest_of(path: &Path, algorithm: Algorithm) -> Verify {
    let json = format!(r#"{{"x.safetensors": "{}"}}"#, hex_of(path, algorithm));
    Verify::Manifest(Manifest::parse(json.as_bytes()).unwrap())
}

struct Trial {
    path: PathBuf,
    _directory: TempDir,
}

impl Trial {
    fn saved(metadata: &Metadata) -> Trial {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("x.safetensors");
        save(&path, metadata).unwrap();
        Trial { path, _directory: directory }
    }
}

#[test]
fn writers_reserve_space_for_the_values_of_groups() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("x.safetensors");
    for (algorithm, expected) in [("blake3", 428 << 10), ("sha256", 256 << 10)] {
        write(&path, metadata(algorithm)).unwrap();
        let length = fs::read(&path).unwrap()[..8].try_into().unwrap();
        assert_eq!(8 + u64::from_le_bytes(length), expected, "{algorithm}");
        let checkpoint = open(&path);
        assert_is_sample(&checkpoint, &load(&checkpoint, &regions(&checkpoint), tight()).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn pieces_in_any_order_have_the_digest_of_the_input(
        length in prop_oneof![0_usize..5000, 60_000_usize..70_000, Just(1024), Just(2048), Just(65_536)],
        cuts in prop::collection::vec(0_usize..70_000, 0..12),
        seed in any::<u64>(),
    ) {
        let bytes = files::pattern(3, length);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (length + 1)).chain([0, length]).collect();
        cuts.sort_unstable();
        let mut pieces: Vec<(usize, usize)> = cuts.windows(2).map(|pair| (pair[0], pair[1])).collect();
        pieces.sort_by_key(|(begin, _)| (*begin as u64).wrapping_mul(seed | 1).wrapping_add(seed));
        let hash = Hash::new(Algorithm::Blake3, length as u64);
        let mut found = None;
        for (begin, end) in pieces.into_iter().filter(|(begin, end)| begin < end || length == 0) {
            prop_assert!(found.is_none());
            found = hash.add(begin as u64, &bytes[begin..end], &|| Ok(())).unwrap();
        }
        prop_assert_eq!(found, Some(Algorithm::Blake3.digest(&bytes)));
    }

    #[test]
    fn arbitrary_manifests_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Err(error) = Manifest::parse(&bytes) {
            prop_assert_eq!(error.kind(), Kind::Malformed);
        }
    }

    #[test]
    fn mutated_digests_are_refused(position in 0_usize..1200, byte in any::<u8>()) {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("x.safetensors");
        save(&path, &metadata("blake3")).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let position = position % bytes.len().min(1200);
        prop_assume!(bytes[position] != byte);
        bytes[position] = byte;
        fs::write(&path, bytes).unwrap();
        // A header that parses has another digest, and data have another one too.
        let verified = Checkpoint::open_with(&[&path], &Verify::Digests.into()).and_then(|checkpoint| {
            let checkpoint = Arc::new(checkpoint);
            check::check_regions(&checkpoint, &regions(&checkpoint), &tight())
        });
        let kind = verified.unwrap_err().kind();
        prop_assert!([Kind::Integrity, Kind::Malformed].contains(&kind), "{:?}", kind);
    }
}

#[test]
fn sequential_pieces_wait_for_those_before() {
    let bytes = files::pattern(1, 100_000);
    let hash = Hash::new(Algorithm::Sha256, bytes.len() as u64);
    let digests: Vec<_> = thread::scope(|scope| {
        let add = |index: usize| hash.add(index as u64 * 10_000, &bytes[index * 10_000..][..10_000], &|| Ok(()));
        let threads: Vec<_> = (0..10).rev().map(|index| scope.spawn(move || add(index).unwrap())).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(digests, [Algorithm::Sha256.digest(&bytes)]);
}

#[test]
fn bytes_are_not_added_twice() {
    for algorithm in ALGORITHMS {
        let hash = Hash::new(algorithm, 5000);
        hash.add(0, &[1; 3000], &|| Ok(())).unwrap();
        assert_eq!(hash.add(0, &[1; 3000], &|| Ok(())).unwrap_err().kind(), Kind::Internal);
        assert_eq!(hash.add(4000, &[1; 3000], &|| Ok(())).unwrap_err().kind(), Kind::Internal);
    }
}

#[test]
fn saved_digests_are_those_of_the_documented_text() {
    for algorithm in ALGORITHMS {
        let trial = Trial::saved(&metadata(algorithm.name()));
        let bytes = fs::read(&trial.path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let text = header.metadata().as_ref().unwrap()[DIGESTS_KEY].clone();
        // No tensor is longer than a group.
        let text = match algorithm {
            Algorithm::Blake3 => text.strip_suffix(":1048576:").unwrap(),
            _ => &text,
        };
        let [name, hex, encoded] = text.split(':').collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(name, algorithm.name());
        let blank = String::from_utf8(bytes[..8 + length].to_vec()).unwrap().replace(hex, &"0".repeat(64));
        assert_eq!(algorithm.digest(blank.as_bytes()).hex(), hex);
        let digests = base64::Engine::decode(&base64::engine::general_purpose::URL_SAFE_NO_PAD, encoded).unwrap();
        let mut tensors = sample();
        tensors.sort();
        let expected: Vec<u8> =
            tensors.iter().flat_map(|(_, bytes)| algorithm.digest(bytes).bytes().to_vec()).collect();
        assert_eq!(digests, expected);
    }
}

#[test]
fn saves_and_writers_write_digests_that_loads_accept() {
    for algorithm in ALGORITHMS {
        let trial = Trial::saved(&metadata(algorithm.name()));
        let directory = TempDir::new().unwrap();
        let written = directory.path().join("x.safetensors");
        write(&written, metadata(algorithm.name())).unwrap();
        for path in [&trial.path, &written] {
            assert_eq!(load_errors(path, &Verify::Digests), vec![None; 9]);
            let checkpoint = open(path);
            assert_is_sample(&checkpoint, &load(&checkpoint, &regions(&checkpoint), tight()).unwrap());
            assert_eq!(load_errors(path, &manifest_of(path, Algorithm::Blake3)), vec![None; 9]);
            assert_eq!(load_errors(path, &manifest_of(path, Algorithm::Sha256)), vec![None; 9]);
        }
    }
}

#[test]
fn a_damaged_tensor_ends_every_load() {
    for algorithm in ALGORITHMS {
        let trial = Trial::saved(&metadata(algorithm.name()));
        let checkpoint = open(&trial.path);
        for region in regions(&checkpoint).iter().filter(|region| region.bytes() > 0) {
            let offset = region.range.begin + region.bytes() - 1;
            let manifest = manifest_of(&trial.path, algorithm);
            let before = damage(&trial.path, offset);
            for error in load_errors(&trial.path, &Verify::Digests) {
                let error = error.unwrap();
                assert_eq!(error.kind(), Kind::Integrity, "{error}");
                let text = error.to_string();
                assert!(text.contains(&*region.name) && text.contains("x.safetensors"), "{text}");
            }
            for error in load_errors(&trial.path, &manifest) {
                assert_eq!(error.unwrap().kind(), Kind::Integrity);
            }
            fs::write(&trial.path, before).unwrap();
        }
    }
}

#[test]
fn a_changed_header_is_an_error() {
    let trial = Trial::saved(&metadata("blake3"));
    let text = fs::read(&trial.path).unwrap();
    let renamed = String::from_utf8_lossy(&text[..2000]).find("t003").unwrap();
    damage(&trial.path, renamed as u64);
    let error = Checkpoint::open_with(&[&trial.path], &Verify::Digests.into()).unwrap_err();
    assert_eq!(error.kind(), Kind::Integrity);
    assert!(error.to_string().contains("header"), "{error}");
}

#[test]
fn a_file_without_digests_says_what_to_do() {
    let trial = Trial::saved(&None);
    let error = Checkpoint::open_with(&[&trial.path], &Verify::Digests.into()).unwrap_err();
    assert_eq!(error.kind(), Kind::Integrity);
    assert!(error.to_string().contains("digests=\"blake3\""), "{error}");
    let other = Verify::Manifest(Manifest::parse(format!("{}  other\n", "0".repeat(64)).as_bytes()).unwrap());
    let error = Checkpoint::open_with(&[&trial.path], &other.clone().into()).unwrap_err();
    assert_eq!(error.kind(), Kind::Integrity);
    assert!(error.to_string().contains("manifest has no digest"), "{error}");
}

#[test]
fn copied_metadata_renew_the_digests() {
    let trial = Trial::saved(&metadata("sha256"));
    let checkpoint = Checkpoint::open(&[&trial.path]).unwrap();
    let mut copied = checkpoint.metadata().unwrap().cloned().unwrap();
    copied.insert("added".into(), "text".into());
    let copy = Trial::saved(&Some(copied));
    assert_eq!(load_errors(&copy.path, &Verify::Digests), vec![None; 9]);
    let error = save(&trial.path, &metadata("md5")).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidArgument);
}

#[test]
fn parts_of_tensors_are_not_covered() {
    let trial = Trial::saved(&metadata("sha256"));
    for (verify, covers_names) in [(Verify::Digests, true), (manifest_of(&trial.path, Algorithm::Sha256), false)] {
        let open = |partial| {
            let verify = Request { verify: verify.clone(), partial };
            Arc::new(Checkpoint::open_with(&[&trial.path], &OpenOptions { verify, ..OpenOptions::default() }).unwrap())
        };
        let checkpoint = open(Partial::Raise);
        let (source, entry) = checkpoint.find("t002").unwrap();
        let whole = TensorRegion::whole(source, entry).unwrap();
        let all = TensorRegion::slice(source, entry, 0, 0, 40_000).unwrap();
        let part = TensorRegion::slice(source, entry, 0, 1, 39_999).unwrap();
        let regions: Arc<[TensorRegion]> = vec![whole, all, part].into();
        for error in [
            load(&checkpoint, &regions, tight()).unwrap_err(),
            check::check_regions(&checkpoint, &regions, &tight()).unwrap_err(),
            views_of_regions(&checkpoint, &regions).err().unwrap(),
        ] {
            assert_eq!(error.kind(), Kind::Integrity, "{error}");
            assert!(error.to_string().contains("\"t002\""), "{error}");
        }
        let checkpoint = open(Partial::Allow);
        let coverage = checkpoint.coverage(&regions).unwrap().unwrap();
        let covered: Vec<bool> = coverage.covers.iter().map(|cover| *cover != Cover::Nothing).collect();
        assert_eq!(covered, [covers_names, covers_names, false]);
        assert_eq!(checkpoint.without_digests(&regions).unwrap(), ["t002"]);
        let loaded = load(&checkpoint, &regions, tight()).unwrap();
        assert!(loaded[0] == loaded[1] && loaded[0][1..] == loaded[2]);
    }
    assert!(Checkpoint::open(&[&trial.path]).unwrap().coverage(&[]).unwrap().is_none());
}

#[test]
fn a_stream_returns_no_damaged_tensor() {
    let trial = Trial::saved(&metadata("blake3"));
    let checkpoint = open(&trial.path);
    let region = regions(&checkpoint).iter().find(|region| &*region.name == "t010").unwrap().clone();
    damage(&trial.path, region.range.begin + 50_000);
    let checkpoint = open(&trial.path);
    let regions = regions(&checkpoint);
    let mut memory: Vec<Vec<u8>> = regions.iter().map(|region| vec![0; region.bytes() as usize]).collect();
    let destinations = destinations(&mut memory);
    let stream = Stream::open(&checkpoint, Arc::clone(&regions), Arc::new(Host), tight(), Order::Ready).unwrap();
    let batch = stream.planner().prepare(&destinations).unwrap();
    let all: Vec<usize> = (0..regions.len()).collect();
    // SAFETY: the memory outlives the stream.
    unsafe { stream.submit(&all, batch) }.unwrap();
    let mut taken = Vec::new();
    let error = loop {
        match stream.take() {
            Ok(tensor) => taken.push(tensor),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), Kind::Integrity);
    assert!(taken.iter().all(|&tensor| &*regions[tensor].name != "t010"));
    drop(stream);
    let manifest = manifest_of(&trial.path, Algorithm::Sha256);
    let checkpoint = Checkpoint::open_with(&[&trial.path], &manifest.clone().into()).unwrap();
    let refused = Stream::open(&checkpoint, regions, Arc::new(Host), tight(), Order::Ready).err().unwrap();
    assert_eq!(refused.kind(), Kind::InvalidArgument);
}

#[test]
fn several_files_are_compared_with_a_manifest() {
    let directory = TempDir::new().unwrap();
    let mut lines = String::new();
    for index in 0..3 {
        let name = format!("{index}.safetensors");
        let data = files::pattern(index, 50_000);
        let tensor = [(&*format!("t{index}"), safetensors::tensor::Dtype::U8, vec![50_000], data)];
        let path = files::written(&directory, &name, &tensor);
        lines += &format!("{}  ./{name}\n", Algorithm::Sha256.digest(&fs::read(path).unwrap()).hex());
    }
    fs::write(directory.path().join("note"), "note").unwrap();
    lines += &format!("BLAKE3 (note) = {}\n", Algorithm::Blake3.digest(b"note").hex());
    let manifest = Manifest::parse(lines.as_bytes()).unwrap();
    check::check_manifest(&manifest, directory.path(), &tight()).unwrap();
    let verify = Verify::Manifest(manifest.clone());
    let checkpoint = Arc::new(Checkpoint::open_with(&[directory.path()], &verify.clone().into()).unwrap());
    load(&checkpoint, &regions(&checkpoint), tight()).unwrap();
    damage(&directory.path().join("2.safetensors"), 40_000);
    for error in [
        check::check_manifest(&manifest, directory.path(), &tight()).unwrap_err(),
        load(&checkpoint, &regions(&checkpoint), tight()).unwrap_err(),
    ] {
        assert!(error.kind() == Kind::Integrity && error.to_string().contains("2.safetensors"), "{error}");
    }
}

#[test]
fn invalid_manifests_are_refused() {
    let hex = "0".repeat(64);
    let other = "1".repeat(64);
    for text in [
        String::new(),
        "{}".into(),
        "{".into(),
        "[1]".into(),
        format!("{hex} x"),
        format!("{}  x", &hex[1..]),
        format!("{hex}  "),
        format!("{hex}  ../x"),
        format!("{hex}  x\n{other}  x"),
        format!("MD5 (x) = {hex}"),
        r#"{"x": 1}"#.into(),
        format!(r#"{{"x": "md5:{hex}"}}"#),
        format!(r#"{{"x": "sha256:{hex}", "./x": "sha256:{other}"}}"#),
    ] {
        assert_eq!(Manifest::parse(text.as_bytes()).unwrap_err().kind(), Kind::Malformed, "{text}");
    }
    assert!(Manifest::parse(format!("\\{hex}  a\\nb").as_bytes()).unwrap().find("a\nb").is_some());
    assert!(Manifest::parse(format!("{hex} *a b").as_bytes()).unwrap().find("dir/a b").is_some());
}

#[test]
fn bytes_that_are_only_compared_are_in_profiles() {
    let trial = Trial::saved(&metadata("blake3"));
    let checkpoint = open(&trial.path);
    let profile = fst::profile::start();
    check::check_regions(&checkpoint, &regions(&checkpoint), &tight()).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&fst::profile::stop(profile).unwrap()).unwrap();
    let is_read = |event: &&serde_json::Value| {
        let path = event["args"]["path"].as_str().is_some_and(|path| Path::new(path) == trial.path);
        event["name"] == "read" && path && event["args"]["reader"] == "pread"
    };
    let events = trace["traceEvents"].as_array().unwrap();
    assert!(events.iter().any(|event| is_read(&event)));
    assert!(events.iter().any(|event| event["name"] == "hash"));
}
