//! Parses arbitrary bytes as the header of an encrypted file.
//!
//! `make fuzz`, or `cargo fuzz run encryption` with a nightly compiler.
#![no_main]

use fst::encryption::key::EncryptionKey;
use fst::format::encryption::{Rotation, is_encrypted};
use fst::format::header::Header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let file_bytes = 8 + bytes.len() as u64;
    let key = EncryptionKey::from_bytes(&[7; 32]).expect("a key has 32 bytes");
    if let Ok(header) = Header::parse(bytes, file_bytes)
        && let Ok(rotation) = Rotation::new(&header, bytes, file_bytes, &key, &key)
    {
        assert!(is_encrypted(&header));
        for (offset, text) in rotation.writes {
            assert!(offset + text.len() as u64 <= file_bytes);
        }
    }
});
