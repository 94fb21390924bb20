//! Groups of BLAKE3's tree: their chaining values in the header, and loads of parts of tensors that compare them.

use crate::files::{self, assert_fails, damage};
use crate::host_load::{load, regions};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use blake3::hazmat::HasherExt;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::{IndexRange, TensorRegion};
use fst::checkpoint::verify::{Cover, Verify};
use fst::digest::groups::{GROUP_BYTES, GROUP_BYTES_MAX, group_bytes_of, value_count};
use fst::digest::tree::{self, Piece, Tree};
use fst::digest::{Algorithm, Hash};
use fst::error::{Error, Kind};
use fst::load::check;
use fst::options::{Options, ReaderChoice};
use proptest::prelude::*;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

fn tight(reader: ReaderChoice) -> Options {
    Options { chunk_bytes: 8 << 10, staging_bytes: 16 << 10, threads: 5, reader, ..Options::default() }
}

/// Returns the chaining values of the groups of a tensor that is longer than a group, as the documentation says.
fn values_of(bytes: &[u8], group_bytes: usize) -> Vec<u8> {
    let value = |(index, group): (usize, &[u8])| {
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset((index * group_bytes) as u64).update(group).finalize_non_root()
    };
    match bytes.len() {
        length if length <= group_bytes => Vec::new(),
        _ => bytes.chunks(group_bytes).enumerate().flat_map(value).collect(),
    }
}

/// Writes a file of tensors of bytes with two dimensions, with groups of this size.
pub fn write_matrices(directory: &TempDir, row_bytes: &[usize], rows: &[usize], group_bytes: usize) -> PathBuf {
    let sizes = row_bytes.iter().zip(rows);
    let tensors: Vec<_> = sizes.enumerate().map(|(index, (row, rows))| files::pattern(index, row * rows)).collect();
    let shape = |index: usize| format!("{},{}", rows[index], row_bytes[index]);
    write_shaped(directory, &tensors, &Text::of(&tensors, group_bytes), shape)
}

/// Fields of the text in the metadata.
struct Text {
    name: String,
    digests: Vec<u8>,
    /// Size of a group, and the chaining values.
    tree: Option<(String, Vec<u8>)>,
}

impl Text {
    fn of(tensors: &[Vec<u8>], group_bytes: usize) -> Text {
        let digests = tensors.iter().flat_map(|bytes| *blake3::hash(bytes).as_bytes()).collect();
        let values = tensors.iter().flat_map(|bytes| values_of(bytes, group_bytes)).collect();
        Text { name: "blake3".into(), digests, tree: Some((group_bytes.to_string(), values)) }
    }
}

/// Writes a file with this text, whose digest of the header is right.
fn write(directory: &TempDir, tensors: &[Vec<u8>], text: &Text) -> PathBuf {
    write_shaped(directory, tensors, text, |index| tensors[index].len().to_string())
}

fn write_shaped(directory: &TempDir, tensors: &[Vec<u8>], text: &Text, shape: impl Fn(usize) -> String) -> PathBuf {
    let tree = |(size, values): &(String, Vec<u8>)| format!(":{size}:{}", URL_SAFE_NO_PAD.encode(values));
    let tree = text.tree.as_ref().map(tree).unwrap_or_default();
    let zeros = "0".repeat(64);
    let value = format!("{}:{zeros}:{}{tree}", text.name, URL_SAFE_NO_PAD.encode(&text.digests));
    let mut json = format!(r#"{{"__metadata__":{{"fst.digests":"{value}"}}"#);
    let mut begin = 0;
    for (index, bytes) in tensors.iter().enumerate() {
        let end = begin + bytes.len();
        let shape = shape(index);
        json += &format!(r#","t{index}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[{begin},{end}]}}"#);
        begin = end;
    }
    json += "}";
    let header = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
    let algorithm = Algorithm::from_name(&text.name).unwrap();
    let json = json.replacen(&zeros, &algorithm.digest(&header).hex(), 1);
    files::raw(directory, "x.safetensors", &json, &tensors.concat())
}

fn open(path: &Path) -> fst::Result<Arc<Checkpoint>> {
    Checkpoint::open_with(&[path], &Verify::Digests.into()).map(Arc::new)
}

/// Returns the region with these indices of a tensor of bytes.
fn part(checkpoint: &Checkpoint, name: &str, indices: IndexRange) -> TensorRegion {
    let (source, entry) = checkpoint.find(name).unwrap();
    TensorRegion::indexed(source, entry, &[indices]).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn pieces_in_any_order_have_the_digest_and_the_values_of_the_input(
        length in prop_oneof![0_usize..5000, 60_000_usize..70_000, Just(1024), Just(2048), Just(65_536)],
        level in prop::option::of(0_u32..6),
        cuts in prop::collection::vec(0_usize..70_000, 0..12),
        seed in any::<u64>(),
    ) {
        let bytes = files::pattern(3, length);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (length + 1)).chain([0, length]).collect();
        cuts.sort_unstable();
        let mut pieces: Vec<Range<usize>> = cuts.windows(2).map(|pair| pair[0]..pair[1]).collect();
        pieces.sort_by_key(|piece| (piece.start as u64).wrapping_mul(seed | 1).wrapping_add(seed));
        // Without groups, subtrees are as large as a piece allows.
        let group_bytes = level.map(|level| 1024_u64 << level);
        let mut tree = Tree::new(length as u64);
        let mut root = None;
        for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
            prop_assert!(root.is_none());
            let begin = piece.start as u64;
            let piece = Piece::new(begin, &bytes[piece], length as u64, group_bytes.unwrap_or(u64::MAX));
            root = tree.add(piece).unwrap();
        }
        prop_assert_eq!(root, (length > 0).then(|| *blake3::hash(&bytes).as_bytes()));
        if let Some(group_bytes) = group_bytes.filter(|&group_bytes| length as u64 > group_bytes) {
            let values = tree.groups(group_bytes).unwrap();
            prop_assert_eq!(values.concat(), values_of(&bytes, group_bytes as usize));
            prop_assert_eq!(tree::root_of(values.clone()), root);
            if length as u64 > 2 * group_bytes {
                prop_assert_eq!(tree::parents(&values).concat(), values_of(&bytes, 2 * group_bytes as usize));
            }
        }
    }

    #[test]
    fn parts_compare_the_groups_that_they_touch(
        lengths in prop::collection::vec(prop_oneof![0_usize..5000, 8192_usize..40_000, Just(4096)], 1..5),
        (tensor, start, count, step) in (0_usize..4, 0_u64..40_000, 0_u64..40_000, prop_oneof![Just(1_u64), 1_u64..9000]),
        group_bytes in prop_oneof![Just(4096_usize), Just(8192), Just(65_536)],
        (changed, reader) in (any::<u64>(), prop_oneof![Just(ReaderChoice::Pread), Just(ReaderChoice::Auto)]),
    ) {
        let tensors: Vec<Vec<u8>> = lengths.iter().enumerate().map(|(seed, &length)| files::pattern(seed, length)).collect();
        let directory = TempDir::new().unwrap();
        let path = write(&directory, &tensors, &Text::of(&tensors, group_bytes));
        let bytes = &tensors[tensor % tensors.len()];
        let length = bytes.len() as u64;
        let start = start.min(length);
        let count = count.min((length - start).div_ceil(step));
        let checkpoint = open(&path).unwrap();
        let name = format!("t{}", tensor % tensors.len());
        let requested: Arc<[TensorRegion]> = vec![part(&checkpoint, &name, IndexRange { start, length: count, step })].into();
        let expected: Vec<u8> = (0..count).map(|index| bytes[(start + index * step) as usize]).collect();
        prop_assert_eq!(&load(&checkpoint, &requested, tight(reader)).unwrap()[0], &expected);
        prop_assume!(length > 0);
        let offset = changed % length;
        let begin = requested[0].tensor_begin;
        damage(&path, begin + offset);
        let group = offset / group_bytes as u64;
        let is_touched = (0..count).any(|index| (start + index * step) / group_bytes as u64 == group);
        match load(&open(&path).unwrap(), &requested, tight(reader)) {
            Err(error) => {
                let text = error.to_string();
                prop_assert!(error.kind() == Kind::Integrity && text.contains(&name), "{}", text);
                // Rows that are near each other are read with the gap between them.
                prop_assert!(is_touched || step > 1, "{}", text);
            }
            Ok(_) => prop_assert!(!is_touched),
        }
    }

    #[test]
    fn mutated_values_are_refused(position in 0_usize..2000, byte in any::<u8>()) {
        let directory = TempDir::new().unwrap();
        let tensors = [files::pattern(0, 20_000), files::pattern(1, 9000)];
        let path = write(&directory, &tensors, &Text::of(&tensors, 4096));
        let mut bytes = fs::read(&path).unwrap();
        let position = position % files::data_begin(&bytes);
        prop_assume!(bytes[position] != byte);
        bytes[position] = byte;
        fs::write(&path, bytes).unwrap();
        let kind = open(&path).unwrap_err().kind();
        prop_assert!([Kind::Integrity, Kind::Malformed].contains(&kind), "{:?}", kind);
    }
}

#[test]
fn upper_case_digits_are_refused() {
    let directory = TempDir::new().unwrap();
    let tensors = [files::pattern(0, 9000)];
    let path = write(&directory, &tensors, &Text::of(&tensors, 4096));
    let mut bytes = fs::read(&path).unwrap();
    let name = b"blake3:";
    let digits = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    bytes[digits..digits + 64].make_ascii_uppercase();
    assert_ne!(bytes, fs::read(&path).unwrap());
    fs::write(&path, bytes).unwrap();
    assert_fails(open(&path), Kind::Malformed, &[]);
}

/// Returns the error of opening a file whose text was changed.
fn refused(change: impl FnOnce(&mut Text)) -> Error {
    let directory = TempDir::new().unwrap();
    let tensors = [files::pattern(0, 20_000), files::pattern(1, 100), files::pattern(2, 9000)];
    let mut text = Text::of(&tensors, 4096);
    change(&mut text);
    open(&write(&directory, &tensors, &text)).unwrap_err()
}

#[test]
fn values_that_do_not_merge_to_the_digest_are_refused() {
    let values = |text: &mut Text, change: &dyn Fn(&mut Vec<u8>)| change(&mut text.tree.as_mut().unwrap().1);
    for (error, name) in [
        (refused(|text| text.digests[0] ^= 1), "t0"),
        (refused(|text| text.digests[70] ^= 1), "t2"),
        (refused(|text| values(text, &|values| values[5 * 32 + 40] ^= 1)), "t2"),
        (refused(|text| values(text, &|values| values[4 * 32] ^= 1)), "t0"),
        (refused(|text| values(text, &|values| values[..64].rotate_left(32))), "t0"),
        // Values of the right number that belong to another tensor.
        (refused(|text| values(text, &|values| values.rotate_left(3 * 32))), "t0"),
    ] {
        assert_fails::<()>(Err(error), Kind::Integrity, &[&format!("\"{name}\"")]);
    }
}

#[test]
fn texts_with_another_form_are_refused() {
    let size = |size: &str| {
        let size = size.to_owned();
        refused(move |text| text.tree.as_mut().unwrap().0 = size)
    };
    let too_many = refused(|text| text.tree.as_mut().unwrap().1.extend([0; 32]));
    let too_few = refused(|text| text.tree.as_mut().unwrap().1.truncate(7 * 32));
    let no_values = refused(|text| text.tree.as_mut().unwrap().1.clear());
    let cut = refused(|text| text.tree.as_mut().unwrap().1.truncate(7 * 32 + 31));
    let sequential = refused(|text| text.name = "sha256".into());
    let no_digests = refused(|text| text.digests.clear());
    let errors = [too_many, too_few, no_values, cut, sequential, no_digests];
    // Among them a size with a small number of groups, of which the text has not so many.
    let sizes =
        ["", "0", "1024", "2048", "8192", "4095", "+4096", "04096", "8388608", "18446744073709551616", "-1", "4096:"];
    for error in errors.into_iter().chain(sizes.map(size)) {
        assert_fails::<()>(Err(error), Kind::Malformed, &["x.safetensors", "fst.digests"]);
    }
}

#[test]
fn files_without_values_cover_whole_tensors_only() {
    let directory = TempDir::new().unwrap();
    let tensors = [files::pattern(0, 20_000)];
    let path = write(&directory, &tensors, &Text { tree: None, ..Text::of(&tensors, 4096) });
    let checkpoint = open(&path).unwrap();
    let whole = Arc::clone(&regions(&checkpoint));
    let indices = IndexRange { start: 1, length: 19_999, step: 1 };
    let requested: Arc<[TensorRegion]> = vec![whole[0].clone(), part(&checkpoint, "t0", indices)].into();
    assert_fails(load(&checkpoint, &requested, tight(ReaderChoice::Pread)), Kind::Integrity, &[]);
    let nothing = IndexRange { start: 1, length: 0, step: 1 };
    load(&checkpoint, &vec![part(&checkpoint, "t0", nothing)].into(), tight(ReaderChoice::Pread)).unwrap();
}

#[test]
fn whole_tensors_are_compared_beside_parts() {
    let directory = TempDir::new().unwrap();
    let tensors = [files::pattern(0, 20_000), files::pattern(1, 20_000)];
    let path = write(&directory, &tensors, &Text::of(&tensors, 4096));
    let checkpoint = open(&path).unwrap();
    let whole = regions(&checkpoint);
    assert_eq!(checkpoint.coverage(&whole).unwrap().unwrap().covers, [Cover::Input(0), Cover::Input(1)]);
    let indices = IndexRange { start: 0, length: 1, step: 1 };
    let requested: Arc<[TensorRegion]> = vec![part(&checkpoint, "t0", indices), whole[1].clone()].into();
    assert_eq!(checkpoint.coverage(&requested).unwrap().unwrap().covers, [Cover::Groups, Cover::Groups]);
    assert_eq!(load(&checkpoint, &requested, tight(ReaderChoice::Auto)).unwrap()[1], tensors[1]);
    damage(&path, whole[1].range.begin + 19_999);
    assert_fails(load(&checkpoint, &requested, tight(ReaderChoice::Auto)), Kind::Integrity, &["\"t1\""]);
    // Groups are compared when the load reads them.
    check::check_regions(&checkpoint, &requested, &tight(ReaderChoice::Auto)).unwrap();
}

#[test]
fn saves_keep_the_values_of_groups() {
    for length in [GROUP_BYTES, GROUP_BYTES + 1, 2 * GROUP_BYTES + 5000, 5 * GROUP_BYTES] {
        let bytes = files::pattern(5, length as usize);
        let hash = Hash::with_groups(Algorithm::Blake3, length);
        let (first, second) = bytes.split_at(bytes.len() / 3);
        hash.add(first.len() as u64, second, &|| Ok(())).unwrap();
        let digest = hash.add(0, first, &|| Ok(())).unwrap();
        let at_once = Hash::with_groups(Algorithm::Blake3, length);
        at_once.add(0, &bytes, &|| Ok(())).unwrap();
        for hash in [hash, at_once] {
            let found = hash.finish().unwrap();
            assert_eq!((Some(found.digest), found.length), (digest, length));
            for group_bytes in [GROUP_BYTES, 2 * GROUP_BYTES, GROUP_BYTES_MAX] {
                assert_eq!(found.values_of(group_bytes).concat(), values_of(&bytes, group_bytes as usize));
            }
        }
    }
    assert!(Hash::with_groups(Algorithm::Sha256, 1).finish().is_err());
    assert!(Hash::with_groups(Algorithm::Blake3, 0).finish().is_ok());
}

#[test]
fn groups_grow_with_the_file() {
    const GIB: u64 = 1 << 30;
    let of = |sizes: &[u64]| group_bytes_of(sizes.iter().copied());
    assert_eq!(of(&[]), GROUP_BYTES);
    assert_eq!(of(&[4 * GIB]), GROUP_BYTES);
    assert_eq!(of(&[4 * GIB, GROUP_BYTES]), GROUP_BYTES);
    assert_eq!(of(&[2 * GIB, 2 * GIB, GROUP_BYTES + 1]), 2 * GROUP_BYTES);
    assert_eq!(of(&[8 * GIB + 1]), GROUP_BYTES_MAX);
    let terabyte = [GIB; 1000];
    assert_eq!(of(&terabyte), GROUP_BYTES_MAX);
    // 43 characters for each value.
    assert!(value_count(terabyte.iter().copied(), GROUP_BYTES_MAX) * 43 < 12_000_000);
}
