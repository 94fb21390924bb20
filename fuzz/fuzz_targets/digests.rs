//! Parses arbitrary bytes as a manifest, as the digests of a header, and as pieces of an input in any order.
//!
//! `make fuzz`, or `cargo fuzz run digests` with a nightly compiler.
#![no_main]

use fst::digest::manifest::Manifest;
use fst::digest::{Algorithm, Hash};
use fst::format::digests::Digests;
use fst::format::header::Header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(manifest) = Manifest::parse(bytes) {
        for (name, _) in manifest.entries() {
            // Another entry may have a longer name.
            assert!(manifest.find(&format!("directory/{name}")).is_some());
        }
    }
    if let Ok(header) = Header::parse(bytes, 8 + bytes.len() as u64)
        && let Ok(digests) = Digests::read(&header, bytes)
    {
        assert!(digests.tensor(header.entries().len()).is_none());
        if let Some(groups) = digests.groups() {
            for entry in header.entries().filter(|entry| entry.begin < entry.end) {
                assert_eq!(groups.units().at_or_after(entry.end - 1).map(|group| group.range.end), Some(entry.end));
            }
        }
    }
    // Pieces whose lengths are the bytes, the last ones first.
    let input = vec![7; bytes.iter().map(|&byte| usize::from(byte) * 16).sum()];
    let hash = Hash::new(Algorithm::Blake3, input.len() as u64);
    if input.is_empty() {
        return;
    }
    let mut end = input.len();
    let mut found = None;
    for &byte in bytes {
        let begin = end - usize::from(byte) * 16;
        if let Some(digest) = hash.add(begin as u64, &input[begin..end], &|| Ok(())).expect("each byte is added once") {
            found = Some(digest);
        }
        end = begin;
        if end == 0 {
            break;
        }
    }
    assert_eq!(found, Some(Algorithm::Blake3.digest(&input)));
});
