//! Changes that deltas make, against plain assignment.

use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::{Stride, StridedRange};
use fst::delta::changes::Changes;
use fst::delta::decode::{self, Frame, Tensor};
use fst::delta::encode::{self, Pair, Values};
use fst::delta::{CHECKSUMS, Encoding};
use fst::digest::Algorithm;
use fst::error::Kind;
use fst::options::Options;
use proptest::prelude::*;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

const ENCODINGS: [Encoding; 2] = [Encoding::Xor, Encoding::Overwrite];

fn no_check() -> fst::Result<()> {
    Ok(())
}

/// Frame and checksum of the change from `old` to `new`.
fn encode(old: &[u8], new: &[u8], encoding: Encoding, checksum: Algorithm) -> Option<encode::NewFrame> {
    let pair = Pair { name: "w", bytes: new.len(), old: Values::Memory(old), new: Values::Memory(new) };
    encode::frames(2, &[pair], encoding, checksum, &no_check).unwrap().pop().unwrap()
}

fn frame(encoding: Encoding, bytes: &[u8], new: &[u8]) -> Frame<'static> {
    let bytes: &'static [u8] = bytes.to_vec().leak();
    let checksum = Some(Algorithm::Xxh3.digest(new));
    Frame { encoding, bytes, values_begin: 0, checksum, path: Path::new("d.safetensors"), begin: 96 }
}

fn decode(old: &[u8], item_bytes: usize, frames: Vec<Frame<'_>>) -> fst::Result<Changes> {
    let tensor = Tensor { name: "w", old, item_bytes, tensor_bytes: old.len() as u64, region: None, frames };
    decode::changes(&tensor, &no_check)
}

/// Old bytes with the changes.
fn assign(old: &[u8], item_bytes: usize, changes: &Changes) -> Vec<u8> {
    let Some(positions) = &changes.positions else { return changes.values.clone() };
    assert!(positions.is_sorted_by(|a, b| a < b));
    let mut new = old.to_vec();
    for (&position, value) in positions.iter().zip(changes.values.chunks(item_bytes)) {
        let range = position as usize * item_bytes..(position as usize + 1) * item_bytes;
        assert_ne!(&new[range.clone()], value);
        new[range].copy_from_slice(value);
    }
    new
}

/// zstd frame with these bytes, without compression: a block of its bytes as they are.
fn raw_frame(content: &[u8]) -> Vec<u8> {
    let size = u32::try_from(content.len()).unwrap();
    let block = size << 3 | 1;
    // Magic number; a descriptor for a single segment with a size of 4 bytes; the size; the header of the last block.
    [&[0x28, 0xb5, 0x2f, 0xfd, 0xa0], &size.to_le_bytes()[..], &block.to_le_bytes()[..3], content].concat()
}

fn overwrite_content(changes: &[(u32, u8)]) -> Vec<u8> {
    let positions = changes.iter().flat_map(|(position, _)| position.to_le_bytes());
    let count = u32::try_from(changes.len()).unwrap().to_le_bytes();
    count.into_iter().chain(positions).chain(changes.iter().map(|(_, value)| *value)).collect()
}

/// Versions of a tensor, each with some of its elements changed.
fn versions(items: usize, item_bytes: usize) -> impl Strategy<Value = Vec<Vec<u8>>> {
    let bytes = items * item_bytes;
    let change = (0..items.max(1), any::<[u8; 16]>());
    let step = prop_oneof![
        proptest::collection::vec(change, 0..40).boxed(),
        Just((0..items).map(|item| (item, [item as u8; 16])).collect::<Vec<_>>()).boxed(),
    ];
    (proptest::collection::vec(any::<u8>(), bytes), proptest::collection::vec(step, 1..4)).prop_map(
        move |(first, steps)| {
            let mut versions = vec![first];
            for step in steps {
                let mut next = versions.last().unwrap().clone();
                for (item, value) in step.into_iter().filter(|_| items > 0) {
                    next[item * item_bytes..(item + 1) * item_bytes].copy_from_slice(&value[..item_bytes]);
                }
                versions.push(next);
            }
            versions
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn chains_match_assignment(
        (item_bytes, versions) in (0_u32..5, 0_usize..200).prop_flat_map(|(log, items)| (Just(1 << log), versions(items, 1 << log))),
        encodings in proptest::collection::vec(0_usize..2, 3),
        checksum in 0_usize..3,
        split in (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1_u64..4),
    ) {
        let item_bytes: usize = item_bytes;
        let (old, new) = (versions.first().unwrap(), versions.last().unwrap());
        let mut frames = Vec::new();
        for (index, pair) in versions.windows(2).enumerate() {
            let encoding = ENCODINGS[encodings[index]];
            let Some(encoded) = encode(&pair[0], &pair[1], encoding, CHECKSUMS[checksum]) else {
                prop_assert_eq!(&pair[0], &pair[1]);
                continue;
            };
            frames.push((encoding, encoded));
        }
        let borrowed = || frames.iter().map(|(encoding, encoded)| Frame {
            encoding: *encoding,
            bytes: &encoded.bytes,
            values_begin: 0,
            checksum: Some(encoded.checksum),
            path: Path::new("d.safetensors"),
            begin: 8,
        }).collect::<Vec<_>>();
        let changes = decode(old, item_bytes, borrowed()).unwrap();
        prop_assert_eq!(&assign(old, item_bytes, &changes), new);
        prop_assert!(changes.values.len() + changes.positions.map_or(0, |positions| 4 * positions.len()) <= old.len() + 4 + item_bytes);

        // Every `step`th element of a range.
        let items = old.len() / item_bytes;
        if items == 0 {
            return Ok(());
        }
        let (start, other, step) = (split.0.index(items), split.1.index(items), split.2);
        let (start, end) = (start.min(other) as u64, start.max(other) as u64 + 1);
        let count = (end - start).div_ceil(step);
        let item = item_bytes as u64;
        let region = StridedRange {
            begin: start * item,
            row_bytes: item,
            strides: if count > 1 { vec![Stride { count, bytes: step * item }] } else { Vec::new() },
        };
        let of_region = |bytes: &[u8]| (0..count).flat_map(|row| {
            let begin = region.row_begin(row) as usize;
            bytes[begin..begin + item_bytes].to_vec()
        }).collect::<Vec<u8>>();
        let (old_part, new_part) = (of_region(old), of_region(new));
        let tensor = Tensor {
            name: "w",
            old: &old_part,
            item_bytes,
            tensor_bytes: old.len() as u64,
            region: Some(region.clone()),
            frames: borrowed(),
        };
        let changes = decode::changes(&tensor, &no_check).unwrap();
        prop_assert_eq!(assign(&old_part, item_bytes, &changes), new_part);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Damaged frames are errors, or have a content of the same bytes.
    #[test]
    fn damaged_frames_never_decode_to_other_bytes(
        encoding in 0_usize..2,
        is_compressed: bool,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        end in any::<prop::sample::Index>(),
        is_cut: bool,
    ) {
        let old: Vec<u8> = (0..200).collect();
        let mut new = old.clone();
        (new[3], new[90], new[199]) = (0, 0, 0);
        let encoding = ENCODINGS[encoding];
        let content = match encoding {
            Encoding::Xor => old.iter().zip(&new).map(|(old, new)| old ^ new).collect(),
            _ => overwrite_content(&[(3, 0), (90, 0), (199, 0)]),
        };
        let mut bytes = match is_compressed {
            true => encode(&old, &new, encoding, Algorithm::Xxh3).unwrap().bytes,
            false => raw_frame(&content),
        };
        for (index, byte) in damage {
            *index.get_mut(&mut bytes) = byte;
        }
        bytes.truncate(if is_cut { end.index(bytes.len()) } else { bytes.len() });
        let checksum = Some(Algorithm::Xxh3.digest(&new));
        let frame = Frame { encoding, bytes: &bytes, values_begin: 0, checksum, path: Path::new("d.safetensors"), begin: 0 };
        if let Ok(changes) = decode(&old, 1, vec![frame]) {
            prop_assert_eq!(assign(&old, 1, &changes), new);
        }
    }
}

/// A tensor that several threads encode, in blocks of which the last one is not full.
#[test]
fn frames_of_large_tensors_match_assignment() {
    let old = vec![1; (8 << 20) + 100];
    let mut new = old.clone();
    for position in (0..new.len()).step_by(10_001).chain([16_383, 16_384, (8 << 20) + 99]) {
        new[position] ^= 0x5a;
    }
    for encoding in ENCODINGS {
        let encoded = encode(&old, &new, encoding, Algorithm::Xxh3).unwrap();
        assert!(encoded.bytes.len() < 30_000);
        let changes = decode(&old, 2, vec![frame(encoding, &encoded.bytes, &new)]).unwrap();
        assert!(changes.positions.is_some());
        assert_eq!(assign(&old, 2, &changes), new);
    }
}

/// Tensors of which files are read in parts, against the same bytes in memory. The last is stored without data.
#[test]
fn values_in_files_encode_as_in_memory() {
    let directory = TempDir::new().unwrap();
    let stored = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, bytes.len());
        let length = (header.len() as u64).to_le_bytes();
        fs::write(&path, [&length, header.as_bytes(), bytes].concat()).unwrap();
        let checkpoint = Arc::new(Checkpoint::open(&[&path]).unwrap());
        encode::stored(&checkpoint, &["w"], &Options::default()).unwrap().pop().unwrap()
    };
    let old: Vec<u8> = (0..200_001_u32).map(|index| (index.wrapping_mul(index) >> 7) as u8).collect();
    let mut new = old.clone();
    new.iter_mut().skip(100_000).step_by(5003).for_each(|byte| *byte ^= 1);
    for encoding in ENCODINGS {
        let Values::Stored(reader, _) = stored("old", &old) else { panic!("read in parts") };
        for (old_values, old) in [(stored("old", &old), &old), (Values::Stored(reader, 0..0), &vec![0; old.len()])] {
            let pair = Pair { name: "w", bytes: new.len(), old: old_values, new: stored("new", &new) };
            let frames = encode::frames(2, &[pair], encoding, Algorithm::Xxh3, &no_check).unwrap();
            assert_eq!(frames, [encode(old, &new, encoding, Algorithm::Xxh3)]);
        }
    }
}

/// Frames of zstd's own encoder: at level 1 of bytes of known size, and at level 19 of a stream, with a checksum. Frames of
/// one block, of known size and of unknown size.
#[test]
fn frames_of_zstd_decode() {
    let old: Vec<u8> = (0..32).collect();
    let mut new = old.clone();
    (new[2], new[31]) = (9, 0);
    let frames = [
        (Encoding::Xor, "28b52ffd20205d00002800000b001f0100212002"),
        (Encoding::Xor, "28b52ffd04685d00002800000b001f01002120022a0b9aaa"),
        (Encoding::Overwrite, "28b52ffd200e71000002000000020000001f0000000900"),
        (Encoding::Overwrite, "28b52ffd000071000002000000020000001f0000000900"),
    ];
    for (encoding, hex) in frames {
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        let changes = decode(&old, 2, vec![frame(encoding, &bytes, &new)]).unwrap();
        assert_eq!(changes, Changes { positions: Some(vec![1, 15]), values: vec![9, 3, 30, 0] });
    }
}

/// Two bytes of one element, and an element whose byte is the old one.
#[test]
fn overwritten_elements_with_old_values_are_no_changes() {
    let old: Vec<u8> = (0..32).collect();
    let mut new = old.clone();
    (new[2], new[3], new[31]) = (9, 8, 0);
    let bytes = raw_frame(&overwrite_content(&[(2, 9), (3, 8), (5, 5), (31, 0)]));
    let changes = decode(&old, 2, vec![frame(Encoding::Overwrite, &bytes, &new)]).unwrap();
    assert_eq!(changes, Changes { positions: Some(vec![1, 15]), values: vec![9, 8, 30, 0] });
}

#[test]
fn checksums_match_their_definitions() {
    let digests = CHECKSUMS.map(|algorithm| algorithm.digest(b"abc").hex());
    assert_eq!(digests[0], "06b05ab6733a618578af5f94892f3950");
    assert_eq!(digests[1], "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
    assert_eq!(digests[2], "024d0127");
}

#[test]
fn malformed_frames_are_errors() {
    let old = [0_u8; 16];
    let new = [1_u8; 16];
    let xor = raw_frame(&new);
    let overwrite = |changes: &[(u32, u8)]| raw_frame(&overwrite_content(changes));
    // A window of 256 MiB in place of the size.
    let wide = [&[0x28, 0xb5, 0x2f, 0xfd, 0, 0x90], &xor[9..]].concat();
    let cases: [(Encoding, Vec<u8>, &str); 13] = [
        (Encoding::Xor, wide, "needs a window of 268435456 bytes"),
        (Encoding::Xor, xor[..xor.len() - 1].to_vec(), "incomplete"),
        (Encoding::Xor, xor[..4].to_vec(), "incomplete"),
        (Encoding::Xor, Vec::new(), "incomplete"),
        (Encoding::Xor, raw_frame(&[1; 15]), "decodes to 15 bytes; at least 16"),
        (Encoding::Xor, raw_frame(&[1; 4000]), "more than the 16 expected"),
        (Encoding::Xor, [&xor[..], &xor[..]].concat(), "28 bytes follow"),
        (Encoding::Xor, vec![7; 30], "not a valid zstd frame"),
        (Encoding::Overwrite, raw_frame(&17_u32.to_le_bytes()), "17 bytes change"),
        (Encoding::Overwrite, raw_frame(&2_u32.to_le_bytes()), "at least"),
        (Encoding::Overwrite, overwrite(&[(3, 1), (3, 1)]), "must ascend"),
        (Encoding::Overwrite, overwrite(&[(3, 1), (16, 1)]), "outside"),
        (Encoding::Overwrite, [&overwrite(&[(3, 1)])[..], b"x"].concat(), "1 bytes follow"),
    ];
    for (encoding, bytes, message) in cases {
        let error = decode(&old, 4, vec![frame(encoding, &bytes, &new)]).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), Kind::Malformed, "{text}");
        assert!(text.starts_with("[malformed] d.safetensors: tensor \"w\": byte 96: "), "{text}");
        assert!(text.contains(message), "{text}");
    }
}

#[test]
fn differing_checksums_are_errors() {
    let (old, new) = ([0_u8; 16], [1_u8; 16]);
    let error = decode(&[2; 16], 4, vec![frame(Encoding::Xor, &raw_frame(&new), &new)]).unwrap_err();
    assert_eq!(error.kind(), Kind::Integrity);
    assert!(error.to_string().contains("xxh3-128:"), "{error}");
    assert!(decode(&old, 4, vec![frame(Encoding::Xor, &raw_frame(&new), &new)]).is_ok());
}
