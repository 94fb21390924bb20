//! Decodes arbitrary bytes as the frame of a tensor, and encodes a tensor as frames that decode to it.
//!
//! `make fuzz`, or `cargo fuzz run deltas` with a nightly compiler.
#![no_main]

use fst::delta::Encoding;
use fst::delta::decode::{Frame, Tensor, changes};
use fst::delta::encode::{Pair, Values, frames};
use fst::digest::Algorithm;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

/// Tensor of `old` with one frame, or with a patch whose last fifth is the values.
fn tensor<'a>(old: &'a [u8], new: &[u8], encoding: Encoding, bytes: &'a [u8]) -> Tensor<'a> {
    let (checksum, path) = (Some(Algorithm::Xxh3.digest(new)), Path::new("d.safetensors"));
    let frames = vec![Frame { encoding, bytes, values_begin: bytes.len() / 5 * 4, checksum, path, begin: 0 }];
    Tensor { name: "w", old, item_bytes: 1, tensor_bytes: old.len() as u64, region: None, frames }
}

fuzz_target!(|bytes: &[u8]| {
    let (old, new) = (vec![7; bytes.len()], bytes);
    let check = || Ok(());
    for &encoding in Encoding::ALL {
        // Random bytes have another checksum, if they are a frame at all.
        let _ = changes(&tensor(&old, new, encoding, bytes), &check);
        if Encoding::OF_PATCHES.contains(&encoding) {
            continue;
        }
        let pair = Pair { name: "w", bytes: new.len(), old: Values::Memory(&old), new: Values::Memory(new) };
        let frame = frames(1, &[pair], encoding, Algorithm::Xxh3, &check).expect("a small tensor is encoded").pop();
        let Some(frame) = frame.flatten() else { continue };
        let changes = changes(&tensor(&old, new, encoding, &frame.bytes), &check).expect("the frame is valid");
        let mut decoded = old.clone();
        match changes.positions {
            None => decoded = changes.values,
            Some(positions) => {
                for (position, value) in positions.into_iter().zip(changes.values) {
                    decoded[position as usize] = value;
                }
            }
        }
        assert_eq!(decoded, new);
    }
});
