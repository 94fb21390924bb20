//! Parses arbitrary bytes as a signature, as a signed statement and as a key.
//!
//! `make fuzz`, or `cargo fuzz run signatures` with a nightly compiler.
#![no_main]

use fst::signature::key::PublicKey;
use fst::signature::statement::Statement;
use fst::signature::verify;
use libfuzzer_sys::fuzz_target;

const KEY: &[u8] = include_bytes!("../../tests/signatures/p256.pub");

fuzz_target!(|bytes: &[u8]| {
    let _ = verify(bytes, &PublicKey::from_pem(KEY).expect("the key is valid"));
    if let Ok(signed) = Statement::parse(bytes) {
        for (name, _) in signed.manifest.entries() {
            assert!(signed.manifest.find(&format!("directory/{name}")).is_some());
        }
    }
    let _ = PublicKey::from_pem(bytes);
});
