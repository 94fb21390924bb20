//! Parses arbitrary bytes as a signature with a key and with certificates, as a signed statement, as a certificate and as
//! keys.
//!
//! `make fuzz`, or `cargo fuzz run signatures` with a nightly compiler.
#![no_main]

use fst::signature::certificate::Certificate;
use fst::signature::key::PrivateKey;
use fst::signature::statement::Statement;
use fst::signature::{Trust, verify};
use libfuzzer_sys::fuzz_target;

const KEY: &[u8] = include_bytes!("../../tests/signatures/p256.pub");
const ROOT: &[u8] = include_bytes!("../../tests/signatures/older/root.pem");

fuzz_target!(|bytes: &[u8]| {
    let root = Certificate::parse_pem(ROOT).expect("the root is a certificate");
    for trust in [Trust::from_public_key(KEY), Trust::from_certificates(root)] {
        let _ = verify(bytes, &trust.expect("the trust is valid"));
    }
    if let Ok(signed) = Statement::parse(bytes) {
        for (name, _) in signed.manifest.entries() {
            assert!(signed.manifest.find(&format!("directory/{name}")).is_some());
        }
    }
    let _ = Certificate::parse(bytes);
    let _ = Certificate::parse_pem(bytes);
    let _ = Trust::from_public_key(bytes);
    let _ = PrivateKey::from_pem(bytes);
});
