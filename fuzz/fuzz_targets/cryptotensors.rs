//! Signs arbitrary bytes, and parses them as the header of an encrypted file of CryptoTensors.
//!
//! `make fuzz`, or `cargo fuzz run cryptotensors` with a nightly compiler.
#![no_main]

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use fst::encryption::chunks::Chunks;
use fst::encryption::key::EncryptionKey;
use fst::format::cryptotensors::open;
use fst::format::header::Header;
use libfuzzer_sys::fuzz_target;
use ring::signature::Ed25519KeyPair;

/// Secret key and seed of the signer, of 32 bytes each.
const SECRETS: [u8; 32] = [7; 32];
const KEYS: &str = r#"{"keys": [
    {"kty": "oct", "k": "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc="},
    {"kty": "okp", "x": "6kpsY+KcUgq+9VB7Ey7F+ZVHdq6+vnuSQh7qaRRG0iw="}
]}"#;
/// Mark of the place where the signature is added.
const FIELD: &[u8] = b",\"__signature__\":\"";

fuzz_target!(|bytes: &[u8]| {
    let key = EncryptionKey::from_jwk(KEYS.as_bytes()).expect("the keys are valid");
    let Some(at) = bytes.windows(FIELD.len()).position(|window| window == FIELD) else { return };
    let (before, after) = (&bytes[..at], &bytes[at + FIELD.len()..]);
    let signer = Ed25519KeyPair::from_seed_unchecked(&SECRETS).expect("a seed has 32 bytes");
    let signature = STANDARD.encode(signer.sign(&[before, after].concat()));
    let json = [before, FIELD, signature.as_bytes(), b"\"", after].concat();
    // The data is not read.
    for data_bytes in [0, 1 << 20] {
        let Ok(mut header) = Header::parse(&json, 8 + json.len() as u64 + data_bytes) else { continue };
        if let Ok(chunks) = open(&mut header, &json, std::slice::from_ref(&key)) {
            for entry in header.entries().filter(|entry| entry.begin < entry.end) {
                assert_eq!(chunks.units().at_or_after(entry.begin).expect("a chunk").range.start, entry.begin);
                assert_eq!(chunks.units().at_or_after(entry.end - 1).expect("a chunk").range.end, entry.end);
            }
        }
    }
});
