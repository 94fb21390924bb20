//! Checkpoints of files, directories and indexes, and names across files.

use crate::files;
use fst::checkpoint::{Checkpoint, OpenOptions};
use fst::error::{Kind, Result};
use safetensors::tensor::Dtype;
use std::path::Path;
use tempfile::TempDir;

fn shard(directory: &TempDir, file: &str, names: &[&str]) {
    let tensors: Vec<_> = names.iter().map(|name| (*name, Dtype::U8, vec![3], vec![1, 2, 3])).collect();
    files::written(directory, file, &tensors);
}

fn names(checkpoint: &Checkpoint) -> Vec<String> {
    checkpoint.entries().map(|(_, entry)| entry.name.to_string()).collect()
}

fn open_with_headers(paths: &[&Path], headers: &[u8]) -> Result<Checkpoint> {
    Checkpoint::open_with(paths, &OpenOptions { headers: Some(headers.to_vec()), ..OpenOptions::default() })
}

#[track_caller]
fn rejected(path: &Path, kind: Kind, expected: &str) {
    let error = Checkpoint::open(&[path]).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(expected), "{expected:?} is not in {error}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "no path in {error}");
}

#[test]
fn an_index_lists_the_files_of_a_checkpoint() {
    let directory = TempDir::new().unwrap();
    shard(&directory, "one.safetensors", &["x"]);
    shard(&directory, "two.safetensors", &["y"]);
    shard(&directory, "other.safetensors", &["x", "y"]);
    let index = directory.path().join("model.safetensors.index.json");
    std::fs::write(&index, r#"{"weight_map":{"x":"one.safetensors","y":"two.safetensors"}}"#).unwrap();
    for path in [directory.path(), &index] {
        assert_eq!(names(&Checkpoint::open(&[path]).unwrap()), ["x", "y"]);
    }

    for (text, expected) in [
        (r#"{"weight_map":{"x":"../one.safetensors"}}"#, "beside the index"),
        (r#"{"weight_map":{"x":"/etc/passwd"}}"#, "beside the index"),
        (r#"{"weight_map":{"x":5}}"#, "tensor \"x\""),
        (r#"{"metadata":{}}"#, "weight_map"),
        ("not json", "not JSON"),
    ] {
        std::fs::write(&index, text).unwrap();
        rejected(&index, Kind::Malformed, expected);
    }
    std::fs::write(&index, r#"{"weight_map":{"x":"missing.safetensors","y":"two.safetensors"}}"#).unwrap();
    let error = Checkpoint::open(&[&index]).unwrap_err();
    assert_eq!(error.kind(), Kind::FileNotFound);
    for part in ["missing.safetensors: ", "; 1 of the 2 files that ", "model.safetensors.index.json lists are missing"]
    {
        assert!(error.to_string().contains(part), "{error}");
    }
    // Editors of Windows write the mark. Tensors that a file lacks are missing only when they are requested.
    let text = "\u{feff}{\"weight_map\":{\"x\":\"one.safetensors\",\"q\":\"two.safetensors\"}}";
    std::fs::write(&index, text).unwrap();
    let checkpoint = Checkpoint::open(&[&index]).unwrap();
    assert_eq!(names(&checkpoint), ["x", "y"]);
    let errors = [checkpoint.find("q").unwrap_err(), checkpoint.check_index().unwrap_err()];
    for (error, kind) in errors.into_iter().zip([Kind::TensorNotFound, Kind::Malformed]) {
        assert_eq!(error.kind(), kind);
        assert!(error.to_string().contains("two.safetensors holds this tensor, but it does not"), "{error}");
    }
}

#[test]
fn an_index_has_metadata() {
    let directory = TempDir::new().unwrap();
    shard(&directory, "one.safetensors", &["x"]);
    let index = directory.path().join("model.safetensors.index.json");
    let deep = "[".repeat(1000) + &"]".repeat(1000);
    let nested = format!(r#"{{"a":"b","c":7,"d":true,"e":{{"f":"g"}},"h":{deep},"i":null}}"#);
    for (metadata, expected) in [
        (nested.as_str(), &[("a", "b"), ("c", "7"), ("d", "true")][..]),
        ("null", &[]),
        (r#"["a"]"#, &[]),
        (r#""a""#, &[]),
    ] {
        std::fs::write(&index, format!(r#"{{"metadata":{metadata},"weight_map":{{"x":"one.safetensors"}}}}"#)).unwrap();
        let checkpoint = Checkpoint::open(&[&index]).unwrap();
        let [listing] = checkpoint.listings() else { panic!("one index was opened") };
        let found: Vec<_> = listing.metadata.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!((found.as_slice(), listing.listed), (expected, 1));
    }
}

/// Files that are a checkpoint, or else a part of the error.
type Choice = std::result::Result<&'static [&'static str], (Kind, &'static str)>;

/// Files of a directory, each with one tensor of the file's own name, and what is chosen. An index names the file
/// `.indexed.safetensors`.
const DIRECTORIES: &[(&[&str], Choice)] = &[
    (&["any.safetensors"], Ok(&["any.safetensors"])),
    (&["rank-0.safetensors", "rank-10.safetensors"], Ok(&["rank-0.safetensors", "rank-10.safetensors"])),
    (&["rev1-v1.safetensors", "rev20-v1.safetensors"], Ok(&["rev1-v1.safetensors", "rev20-v1.safetensors"])),
    (&["v1.safetensors", "v2.safetensors"], Err((Kind::InvalidArgument, "2 checkpoints, such as v1.safetensors, v2."))),
    // Programs leave out hidden files.
    (&["a.safetensors", "._a.safetensors", ".old.safetensors"], Ok(&["a.safetensors"])),
    (&["a.safetensors", "._model.safetensors.index.json"], Ok(&["a.safetensors"])),
    (&["._a.safetensors"], Err((Kind::IsADirectory, "no *.safetensors file"))),
    // Shards without an index must be complete.
    (
        &["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"],
        Ok(&["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"]),
    ),
    (
        &["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors"],
        Ok(&["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors"]),
    ),
    (
        &["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"],
        Err((Kind::FileNotFound, "1 of the 3 shards are missing: m-00002-of-00003.safetensors;")),
    ),
    (
        &["m-00007-of-99999999.fp16.safetensors"],
        Err((
            Kind::FileNotFound,
            "99999998 of the 99999999 shards are missing: m-00001-of-99999999.fp16.safetensors, ",
        )),
    ),
    (
        &["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors", "m-00003-of-00003.safetensors"],
        Err((Kind::InvalidArgument, "mixes shards of 2, shards of 3")),
    ),
    // A name without a variant comes first, and an index or a whole file before shards.
    (&["m.safetensors", "m.fp16.safetensors", "m-00001-of-00002.safetensors"], Ok(&["m.safetensors"])),
    (&["m.fp16.safetensors", "m.safetensors.index.json"], Ok(&[".indexed.safetensors"])),
    (&["m.safetensors", "m.safetensors.index.fp16.json", "m.fp16-00001-of-00009.safetensors"], Ok(&["m.safetensors"])),
    (&["m.safetensors.index.fp16.json", "m-00001-of-00002.fp16.safetensors"], Ok(&[".indexed.safetensors"])),
    (&["m.fp16.safetensors.index.json", "m.safetensors.index.json"], Ok(&[".indexed.safetensors"])),
    (
        &["m.safetensors.index.fp16.json", "m.safetensors.index.bf16.json"],
        Err((Kind::InvalidArgument, "2 index files, m.safetensors.index.bf16.json, ")),
    ),
    (&["other.safetensors", "model-00001-of-00001.safetensors"], Ok(&["model-00001-of-00001.safetensors"])),
    (&["other.safetensors", "diffusion_pytorch_model.safetensors"], Ok(&["diffusion_pytorch_model.safetensors"])),
    (&["a.safetensors.index.json", "model.safetensors.index.json", "model.safetensors"], Ok(&[".indexed.safetensors"])),
    // Other files may belong to several models.
    (
        &["unet.safetensors", "vae.safetensors", "consolidated.safetensors"],
        Err((
            Kind::InvalidArgument,
            "3 checkpoints, such as consolidated.safetensors, unet.safetensors, vae.safetensors, and no index",
        )),
    ),
    (
        &["a-00001-of-00001.safetensors", "b-00001-of-00001.safetensors"],
        Err((
            Kind::InvalidArgument,
            "2 checkpoints, such as a-00001-of-00001.safetensors, b-00001-of-00001.safetensors",
        )),
    ),
];

#[test]
fn a_directory_has_the_checkpoint_that_other_programs_load() {
    for (files, expected) in DIRECTORIES {
        let directory = TempDir::new().unwrap();
        for name in *files {
            if name.ends_with(".json") {
                shard(&directory, ".indexed.safetensors", &[".indexed.safetensors"]);
                let index = r#"{"weight_map":{".indexed.safetensors":".indexed.safetensors"}}"#;
                std::fs::write(directory.path().join(name), index).unwrap();
            } else {
                shard(&directory, name, &[name]);
            }
        }
        match expected {
            Ok(expected) => assert_eq!(names(&Checkpoint::open(&[directory.path()]).unwrap()), *expected),
            Err((kind, message)) => rejected(directory.path(), *kind, message),
        }
    }
}

#[test]
fn a_file_url_names_a_local_path() {
    let directory = TempDir::new().unwrap();
    shard(&directory, "one two%.safetensors", &["x"]);
    let url = format!("file://{}/one%20two%25.safetensors", directory.path().display());
    assert_eq!(names(&Checkpoint::open(&[url]).unwrap()), ["x"]);
}

#[test]
fn invalid_checkpoints_are_rejected() {
    let directory = TempDir::new().unwrap();
    rejected(directory.path(), Kind::IsADirectory, "no *.safetensors file");
    rejected(&directory.path().join("missing"), Kind::FileNotFound, "No such file");
    rejected(Path::new("ftp://host/x.safetensors"), Kind::InvalidArgument, "\"ftp\"");
    rejected(Path::new("s3:///x.safetensors"), Kind::InvalidArgument, "names no host or bucket");
    rejected(Path::new("file://host/x.safetensors"), Kind::InvalidArgument, "write file:///path");
    rejected(Path::new("/dev/null"), Kind::InvalidArgument, "is a character device");
    let error = Checkpoint::open(&["a\0b"]).unwrap_err();
    assert_eq!(error.to_string(), "[invalid-argument] a\\u{0}b: a path cannot contain a NUL byte");
    let reversed = Checkpoint::open(&["é\u{202e}b"]).unwrap_err().to_string();
    assert!(reversed.starts_with("[file-not-found] é\\u{202e}b: "), "{reversed}");
    let none: [&Path; 0] = [];
    assert_eq!(Checkpoint::open(&none).unwrap_err().kind(), Kind::InvalidArgument);
}

#[test]
fn a_name_in_two_files_is_rejected() {
    let directory = TempDir::new().unwrap();
    shard(&directory, "a-1.safetensors", &["w", "x"]);
    shard(&directory, "a-2.safetensors", &["x", "y"]);
    let error = Checkpoint::open(&[directory.path()]).unwrap_err();
    assert_eq!(error.kind(), Kind::DuplicateTensor);
    for part in ["a-1.safetensors", "a-2.safetensors", "tensor \"x\""] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// The similarity of two names of 1 MiB would take minutes to compute, and of 20,000 names seconds in a debug build.
#[test]
fn a_missing_name_suggests_similar_names_among_few_short_ones() {
    let directory = TempDir::new().unwrap();
    let long = "x".repeat(1 << 20);
    let mut names = vec![long.clone()];
    names.push("pooler".into());
    names.extend((0..20_000).map(|index| format!("model.layers.{index:06}.self_attention.query.weight")));
    shard(&directory, "a.safetensors", &names.iter().map(String::as_str).collect::<Vec<_>>());
    let checkpoint = Checkpoint::open(&[directory.path()]).unwrap();
    for missing in [&format!("{long}y"), "zzz"] {
        let error = checkpoint.find(missing).unwrap_err();
        assert_eq!(error.kind(), Kind::TensorNotFound);
        assert!(!error.to_string().contains("nearest"), "{error}");
    }
    // A fault at the beginning, in the middle and at the end of the name.
    for wrong in [
        "odel.layers.014321.self_attention.query.weight",
        "model.layers.014321.self_atention.query.weight",
        "model.layers.014321.self_attention.query.wieght",
    ] {
        let text = checkpoint.find(wrong).unwrap_err().to_string();
        assert!(text.contains("nearest names are \"model.layers.014321.self_attention.query.weight\""), "{text}");
        assert!(!text.contains("pooler"), "{text}");
    }
}

#[test]
fn a_checkpoint_opens_with_shared_headers() {
    let (own, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    for directory in [&own, &other] {
        shard(directory, "x-1.safetensors", &["y", "z"]);
        shard(directory, "x-2.safetensors", &["x"]);
    }
    let checkpoint = Checkpoint::open(&[own.path()]).unwrap();
    let shared = checkpoint.export_headers().unwrap();
    let joined = open_with_headers(&[other.path()], &shared).unwrap();
    assert_eq!(names(&joined), names(&checkpoint));
    assert_eq!(joined.source(1).unwrap().path(), other.path().join("x-2.safetensors"));
    joined.check_headers(0..2).unwrap();

    let rejected = |expected: &str| {
        let error = open_with_headers(&[other.path()], &shared).unwrap_err();
        assert_eq!(error.kind(), Kind::Malformed, "{error}");
        assert!(error.to_string().contains(expected), "{expected:?} is not in {error}");
    };
    std::fs::rename(other.path().join("x-2.safetensors"), other.path().join("x-3.safetensors")).unwrap();
    rejected("describes \"x-2.safetensors\"");
    std::fs::remove_file(other.path().join("x-3.safetensors")).unwrap();
    rejected("found 1 files, but the shared headers describe 2");
    shard(&other, "x-2.safetensors", &["longer"]);
    rejected("bytes, but the shared header describes one of");
    for length in 0..shared.len() {
        assert!(open_with_headers(&[own.path()], &shared[..length]).is_err(), "cut off at {length}");
    }
}

#[test]
fn a_shared_header_that_differs_is_detected_before_the_data_is_read() {
    let (own, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    shard(&own, "a.safetensors", &["x", "y"]);
    shard(&other, "a.safetensors", &["x", "z"]);
    let shared = Checkpoint::open(&[own.path()]).unwrap().export_headers().unwrap();
    let joined = open_with_headers(&[other.path()], &shared).unwrap();
    joined.check_headers(std::iter::empty()).unwrap();
    let error = joined.check_headers(0..1).unwrap_err();
    assert_eq!(error.kind(), Kind::Malformed);
    assert!(error.to_string().contains("differs from the shared header"), "{error}");
    assert!(error.to_string().contains("a.safetensors"), "{error}");
}
