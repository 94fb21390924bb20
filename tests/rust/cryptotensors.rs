//! Encrypted files of CryptoTensors, which its package has written, and headers that are changed and signed again.

use crate::host_load::{load, regions};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::verify::Verify;
use fst::encryption::key::EncryptionKey;
use fst::error::{Error, Kind};
use fst::options::Options;
use proptest::prelude::*;
use ring::signature::Ed25519KeyPair;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use tempfile::TempDir;

const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/encryption");
const FIELD: &str = ",\"__signature__\":\"";
/// Number of characters of a signature.
const SIGNATURE_CHARS: usize = 88;

struct Vector {
    bytes: Vec<u8>,
    key: EncryptionKey,
    signer: Ed25519KeyPair,
    /// SHA-256 of the tensors.
    digests: BTreeMap<String, String>,
    /// Tensors that are encrypted.
    encrypted: Vec<String>,
}

fn vectors() -> &'static [Vector] {
    static VECTORS: OnceLock<Vec<Vector>> = OnceLock::new();
    VECTORS.get_or_init(|| {
        let text = fs::read(format!("{DIRECTORY}/cryptotensors.json")).unwrap();
        let vector = |vector: &Value| {
            let bytes = fs::read(format!("{DIRECTORY}/{}", vector["file"].as_str().unwrap())).unwrap();
            let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
            let encryption = &header.metadata().as_ref().unwrap()["__encryption__"];
            let [_, signer] = vector["keys"].as_array().unwrap().as_slice() else { panic!("two keys") };
            let private = STANDARD.decode(signer["d"].as_str().unwrap()).unwrap();
            let keys = serde_json::json!({ "keys": vector["keys"] });
            Vector {
                encrypted: serde_json::from_str::<BTreeMap<String, Value>>(encryption).unwrap().into_keys().collect(),
                bytes,
                key: EncryptionKey::from_jwk(keys.to_string().as_bytes()).unwrap(),
                signer: Ed25519KeyPair::from_seed_unchecked(&private).unwrap(),
                digests: serde_json::from_value(vector["tensors"].clone()).unwrap(),
            }
        };
        serde_json::from_slice::<Value>(&text).unwrap().as_array().unwrap().iter().map(vector).collect()
    })
}

impl Vector {
    /// Returns the header as it is signed, and the data.
    fn parts(&self) -> (Vec<u8>, Vec<u8>) {
        let begin = 8 + u64::from_le_bytes(self.bytes[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8(self.bytes[8..begin].to_vec()).unwrap();
        let at = header.find(FIELD).unwrap();
        let rest = &header[at + FIELD.len() + SIGNATURE_CHARS + 1..];
        ([&header[..at], rest.trim_end()].concat().into_bytes(), self.bytes[begin..].to_vec())
    }

    /// Returns a file whose header is signed, with the signature in its place.
    fn signed(&self, header: &[u8], data: &[u8]) -> Vec<u8> {
        let signature = STANDARD.encode(self.signer.sign(header));
        let mark = b",\"format\":";
        let at = header.windows(mark.len()).position(|window| window == mark).unwrap_or(header.len());
        let field = format!("{FIELD}{signature}\"");
        let json = [&header[..at], field.as_bytes(), &header[at..]].concat();
        [&(json.len() as u64).to_le_bytes()[..], &json, data].concat()
    }
}

/// Returns the digests of all tensors.
fn digests(path: &Path, key: &EncryptionKey, options: Options) -> Result<BTreeMap<String, String>, Error> {
    let checkpoint = Arc::new(Checkpoint::open_with_key(&[path], &Verify::Nothing, key)?);
    let regions = regions(&checkpoint);
    let loaded = load(&checkpoint, &regions, options)?;
    let digest = |bytes: &Vec<u8>| fst::digest::Algorithm::Sha256.digest(bytes).hex();
    Ok(regions.iter().map(|region| region.name.to_string()).zip(loaded.iter().map(digest)).collect())
}

#[test]
fn files_of_the_package_load() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("x.safetensors");
    let tight = || Options { chunk_bytes: 4 << 10, staging_bytes: 20 << 10, threads: 3, ..Options::default() };
    for vector in vectors() {
        let (header, data) = vector.parts();
        // The signature is not random.
        let signed = vector.signed(&header, &data);
        for bytes in [&vector.bytes, &signed] {
            fs::write(&path, bytes).unwrap();
            for options in [Options::default(), tight()] {
                assert_eq!(digests(&path, &vector.key, options).unwrap(), vector.digests);
            }
        }
    }
}

#[test]
fn keys_are_not_shown() {
    for vector in vectors() {
        let shown = format!("{:?}", vector.key);
        assert_eq!(shown, "EncryptionKey(\"vault\", hidden)");
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("x.safetensors");
        fs::write(&path, &vector.bytes).unwrap();
        let shown = format!("{:?}", Checkpoint::open_with_key(&[&path], &Verify::Nothing, &vector.key).unwrap());
        assert!(shown.contains("KeyedCipher(hidden)"), "{shown}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn mutated_files_give_the_right_data_or_a_named_error(
        vector in 0_usize..3,
        position in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in prop::option::of(0_usize..2000),
    ) {
        let vector = &vectors()[vector];
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("x.safetensors");
        let mut bytes = vector.bytes.clone();
        let position = position.index(bytes.len());
        bytes[position] = byte;
        bytes.truncate(bytes.len() - cut.filter(|cut| cut % 3 == 0).unwrap_or(0));
        fs::write(&path, bytes).unwrap();
        match digests(&path, &vector.key, Options::default()) {
            // Nothing protects the data of the other tensors.
            Ok(loaded) => prop_assert!(vector.encrypted.iter().all(|name| loaded[name] == vector.digests[name])),
            Err(error) => prop_assert!([Kind::Integrity, Kind::Malformed].contains(&error.kind()), "{}", error),
        }
    }

    #[test]
    fn mutated_headers_are_errors_even_if_signed(
        vector in 0_usize..2,
        (position, length) in (any::<prop::sample::Index>(), 0_usize..40),
        text in prop_oneof![
            "[0-9]{0,20}",
            Just("\\\"tags\\\":\\\"".to_owned()),
            Just("null".to_owned()),
            Just("AAAA".to_owned()),
            "[ -~]{0,40}",
        ],
        repeated in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let vector = &vectors()[vector];
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("x.safetensors");
        let (mut header, data) = vector.parts();
        let begin = position.index(header.len());
        let end = (begin + length).min(header.len());
        let text = match repeated {
            Some(from) => {
                let from = from.index(header.len());
                header[from..(from + length).min(header.len())].to_vec()
            }
            None => text.into_bytes(),
        };
        header.splice(begin..end, text);
        fs::write(&path, vector.signed(&header, &data)).unwrap();
        // The owner of the keys may rename tensors, and change their dtypes and shapes.
        if let Err(error) = digests(&path, &vector.key, Options::default()) {
            let kinds = [Kind::Integrity, Kind::Malformed, Kind::InvalidArgument];
            prop_assert!(kinds.contains(&error.kind()), "{}", error);
        }
    }
}
