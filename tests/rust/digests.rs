//! Digests: of pieces in any order, those that a save writes, and those that a load compares.

use crate::files::{self, assert_fails, damage};
use crate::host_load::{destinations, load, regions};
use crate::save;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::checkpoint::verify::Verify;
use fst::device::host::Host;
use fst::digest::manifest::Manifest;
use fst::digest::{Algorithm, Hash};
use fst::error::{Error, Kind};
use fst::format::Metadata;
use fst::format::digests::DIGESTS_KEY;
use fst::load::check;
use fst::load::stream::{Order, Stream};
use fst::load::views::{Mappings, Views};
use fst::options::{Options, ReaderChoice};
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

/// Streams all tensors, and returns their bytes. `taken` is called for each.
pub fn stream(
    checkpoint: &Checkpoint,
    regions: &Arc<[TensorRegion]>,
    options: Options,
    order: Order,
    mut taken: impl FnMut(usize),
) -> fst::Result<Vec<Vec<u8>>> {
    let mut memory: Vec<Vec<u8>> = regions.iter().map(|region| vec![0; region.bytes() as usize]).collect();
    let destinations = destinations(&mut memory);
    let stream = Stream::open(checkpoint, Arc::clone(regions), Arc::new(Host), options, order)?;
    let batch = stream.planner().prepare(&destinations)?;
    let all: Vec<usize> = (0..regions.len()).collect();
    // SAFETY: the memory lives until the stream is dropped.
    unsafe { stream.submit(&all, batch) }?;
    all.iter().try_for_each(|_| stream.take().map(&mut taken))?;
    drop(stream);
    Ok(memory)
}

/// Opens views of regions without casts.
fn views(checkpoint: &Checkpoint, regions: &[TensorRegion], options: &Options) -> fst::Result<Views> {
    let dtypes: Vec<_> = regions.iter().map(|region| Some(region.dtype)).collect();
    Views::open(checkpoint, &Mappings::default(), regions, &dtypes, options)
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
    let mapped = Options { reader: ReaderChoice::Mmap, ..tight() };
    errors.push(views(&checkpoint, &regions, &mapped).unwrap().verify().err());
    let guarded = views(&checkpoint, &regions, &mapped).unwrap();
    let mut viewed = (0..regions.len()).filter(|&tensor| guarded.address(tensor).is_some());
    errors.push(viewed.try_for_each(|tensor| guarded.guard(tensor).map(drop)).err());
    errors
}

fn manifest_of(path: &Path, algorithm: Algorithm) -> Verify {
    let json = format!(r#"{{"x.safetensors": "{}"}}"#, algorithm.digest(&fs::read(path).unwrap()));
    Verify::Manifest(Manifest::parse(json.as_bytes()).unwrap())
}

struct Trial {
    path: PathBuf,
    _directory: TempDir,
}

impl Trial {
    fn saved(metadata: &Metadata) -> Trial {
        let (directory, path) = files::new_path("x.safetensors");
        save(&path, metadata).unwrap();
        Trial { path, _directory: directory }
    }
}

#[test]
fn writers_reserve_space_for_the_values_of_groups() {
    let (_directory, path) = files::new_path("x.safetensors");
    for (algorithm, expected) in [("blake3", 428 << 10), ("sha256", 256 << 10)] {
        write(&path, metadata(algorithm)).unwrap();
        assert_eq!(files::data_begin(&fs::read(&path).unwrap()), expected, "{algorithm}");
        let checkpoint = open(&path);
        assert_is_sample(&checkpoint, &load(&checkpoint, &regions(&checkpoint), tight()).unwrap());
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
        for begin in [0, 4000] {
            assert_fails(hash.add(begin, &[1; 3000], &|| Ok(())), Kind::Internal, &[]);
        }
    }
}

#[test]
fn saved_digests_are_those_of_the_documented_text() {
    for algorithm in ALGORITHMS {
        let trial = Trial::saved(&metadata(algorithm.name()));
        let bytes = fs::read(&trial.path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let text = header.metadata().as_ref().unwrap()[DIGESTS_KEY].clone();
        // No tensor is longer than a group.
        let text = match algorithm {
            Algorithm::Blake3 => text.strip_suffix(":1048576:").unwrap(),
            _ => &text,
        };
        let [name, hex, encoded] = text.split(':').collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(name, algorithm.name());
        let blank =
            String::from_utf8(bytes[..files::data_begin(&bytes)].to_vec()).unwrap().replace(hex, &"0".repeat(64));
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
fn a_damaged_tensor_ends_every_load() {
    for algorithm in ALGORITHMS {
        let trial = Trial::saved(&metadata(algorithm.name()));
        let checkpoint = open(&trial.path);
        for region in regions(&checkpoint).iter().filter(|region| region.bytes() > 0) {
            let offset = region.range.begin + region.bytes() - 1;
            let manifest = manifest_of(&trial.path, algorithm);
            let before = damage(&trial.path, offset);
            for error in load_errors(&trial.path, &Verify::Digests) {
                assert_fails(error.map_or(Ok(()), Err), Kind::Integrity, &[&region.name, "x.safetensors"]);
            }
            for error in load_errors(&trial.path, &manifest) {
                assert_fails(error.map_or(Ok(()), Err), Kind::Integrity, &[]);
            }
            fs::write(&trial.path, before).unwrap();
        }
    }
}

#[test]
fn copied_metadata_renew_the_digests() {
    let trial = Trial::saved(&metadata("sha256"));
    let checkpoint = Checkpoint::open(&[&trial.path]).unwrap();
    let mut copied = checkpoint.metadata().unwrap().cloned().unwrap();
    copied.insert("added".into(), "text".into());
    let copy = Trial::saved(&Some(copied));
    assert_eq!(load_errors(&copy.path, &Verify::Digests), vec![None; 9]);
    assert_fails(save(&trial.path, &metadata("md5")), Kind::InvalidArgument, &[]);
}

#[test]
fn a_stream_returns_no_damaged_tensor() {
    let trial = Trial::saved(&metadata("blake3"));
    let checkpoint = open(&trial.path);
    let region = regions(&checkpoint).iter().find(|region| &*region.name == "t010").unwrap().clone();
    damage(&trial.path, region.range.begin + 50_000);
    let checkpoint = open(&trial.path);
    let regions = regions(&checkpoint);
    let mut taken = Vec::new();
    let streamed = stream(&checkpoint, &regions, tight(), Order::Ready, |tensor| taken.push(tensor));
    assert_fails(streamed, Kind::Integrity, &[]);
    assert!(taken.iter().all(|&tensor| &*regions[tensor].name != "t010"));
    let manifest = manifest_of(&trial.path, Algorithm::Sha256);
    let checkpoint = Checkpoint::open_with(&[&trial.path], &manifest.into()).unwrap();
    let refused = stream(&checkpoint, &regions, tight(), Order::Ready, |_| ());
    assert_fails(refused, Kind::InvalidArgument, &[]);
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
