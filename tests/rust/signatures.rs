//! Signatures of OpenSSF Model Signing with a key: the reference's (tests/signatures), and damaged ones.
//! `tests/python/load/test_signatures.py` tests those that only Python verifies.

use crate::files::assert_fails;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use fst::checkpoint::verify::{SignatureRequest, Verify};
use fst::digest::Algorithm;
use fst::error::{Error, Kind};
use fst::load::model::{self, Rules, StatementRequest};
use fst::options::Options;
use fst::signature::key::PublicKey;
use fst::signature::statement::Statement;
use fst::signature::{Signed, verify};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/signatures").join(name)
}

fn read(name: &str) -> Vec<u8> {
    fs::read(fixture(name)).unwrap()
}

fn key(name: &str) -> PublicKey {
    PublicKey::from_pem(&read(name)).unwrap()
}

fn request(signature: &Path, key: &Path) -> String {
    json!({"signature": {"path": signature, "public_key": key}}).to_string()
}

fn request_of(name: &str) -> String {
    let curve = if name.starts_with("single") { "p256" } else { &name[..4] };
    request(&fixture(name), &fixture(&format!("{curve}.pub")))
}

fn copy_of_model() -> TempDir {
    let directory = TempDir::new().unwrap();
    fs::create_dir(directory.path().join("part")).unwrap();
    for name in ["model.safetensors", "part/adapter.safetensors", "config.json"] {
        fs::copy(fixture("model").join(name), directory.path().join(name)).unwrap();
    }
    directory
}

fn check(model: &Path, request: &str, rules: &Rules) -> fst::Result<usize> {
    model::verify(&SignatureRequest::parse(request).unwrap().unwrap(), rules, model, &Options::default())
}

const OF_MODEL: [&str; 4] =
    ["p256-files-sha256.sig", "p384-files-blake2.sig", "p256-shards-sha256.sig", "p384-shards-blake2.sig"];

#[test]
fn signatures_of_the_reference_are_verified() {
    for name in OF_MODEL {
        assert_eq!(check(&fixture("model"), &request_of(name), &Rules::default()).unwrap(), 3, "{name}");
    }
    for name in ["single-file.sig", "single-file-shards.sig"] {
        let file = fixture("model/model.safetensors");
        assert_eq!(check(&file, &request_of(name), &Rules::default()).unwrap(), 1, "{name}");
        assert_fails(check(&fixture("model"), &request_of(name), &Rules::default()), Kind::Integrity, &[]);
    }
}

#[test]
fn every_byte_of_every_file_is_compared() {
    for name in OF_MODEL {
        let model = copy_of_model();
        for file in ["model.safetensors", "config.json"] {
            let path = model.path().join(file);
            let content = fs::read(&path).unwrap();
            for position in (0..content.len()).step_by(37).chain([content.len() - 1]) {
                let mut changed = content.clone();
                changed[position] ^= 1;
                fs::write(&path, changed).unwrap();
                let checked = check(model.path(), &request_of(name), &Rules::default());
                assert_fails(checked, Kind::Integrity, &[file, "the signature states"]);
            }
            for length in [0, content.len() - 1, content.len() + 1] {
                let mut changed = content.clone();
                changed.resize(length, b' ');
                fs::write(&path, changed).unwrap();
                assert_fails(check(model.path(), &request_of(name), &Rules::default()), Kind::Integrity, &[]);
            }
            fs::write(&path, content).unwrap();
        }
    }
}

#[test]
fn missing_and_additional_files_are_errors() {
    let model = copy_of_model();
    let check = |rules: &Rules| check(model.path(), &request_of("p256-files-sha256.sig"), rules);
    // Git's files and those that the signature says to ignore.
    fs::create_dir(model.path().join(".git")).unwrap();
    fs::write(model.path().join(".git/config"), "x").unwrap();
    fs::write(model.path().join("model.sig"), "x").unwrap();
    check(&Rules::default()).unwrap();
    fs::write(model.path().join("part/more.py"), "x").unwrap();
    assert_fails(check(&Rules::default()), Kind::Integrity, &["does not name these files: part/more.py"]);
    check(&Rules { ignored: vec!["part/more.py".into()], ..Rules::default() }).unwrap();
    check(&Rules { ignore_unsigned: true, ..Rules::default() }).unwrap();
    fs::rename(model.path().join("config.json"), model.path().join("part/more.py")).unwrap();
    let lenient = Rules { ignore_unsigned: true, ..Rules::default() };
    assert_fails(check(&lenient), Kind::FileNotFound, &[]);
    // The file that is named must not be a link either.
    std::os::unix::fs::symlink(model.path().join("part/more.py"), model.path().join("config.json")).unwrap();
    let error = check(&lenient).unwrap_err();
    assert!(error.to_string().contains("symbolic link"), "{error}");
    check(&Rules { ignore_unsigned: true, allow_symlinks: true, ..Rules::default() }).unwrap();
}

#[test]
fn links_to_directories_are_not_followed() {
    let (model, elsewhere) = (copy_of_model(), TempDir::new().unwrap());
    let moved = elsewhere.path().join("part");
    fs::rename(model.path().join("part"), &moved).unwrap();
    std::os::unix::fs::symlink(&moved, model.path().join("part")).unwrap();
    for ignore_unsigned in [false, true] {
        for allow_symlinks in [false, true] {
            let rules = Rules { ignore_unsigned, allow_symlinks, ..Rules::default() };
            let error = check(model.path(), &request_of("p256-files-sha256.sig"), &rules).unwrap_err();
            assert!(error.to_string().contains("part: ") && error.to_string().contains("symbolic link"), "{error}");
        }
    }
}

#[test]
fn other_keys_are_refused() {
    let bundle = read("p256-files-sha256.sig");
    for other in ["p384.pub", "older/p384.pub"] {
        assert_fails(verify(&bundle, &key(other)), Kind::Integrity, &["another key"]);
    }
    // Without the hash of the key, the signature itself fails.
    let mut bundle: Value = serde_json::from_slice(&bundle).unwrap();
    bundle["verificationMaterial"]["publicKey"] = json!({});
    let bundle = bundle.to_string();
    verify(bundle.as_bytes(), &key("p256.pub")).unwrap();
    let other = verify(bundle.as_bytes(), &key("p384.pub"));
    assert_fails(other, Kind::Integrity, &["not valid for its content"]);
}

#[test]
fn a_changed_statement_is_refused() {
    let bundle: Value = serde_json::from_slice(&read("p256-files-sha256.sig")).unwrap();
    let payload = STANDARD.decode(bundle["dsseEnvelope"]["payload"].as_str().unwrap()).unwrap();
    for position in (0..payload.len()).step_by(97) {
        let mut changed = payload.clone();
        changed[position] ^= 1;
        let mut bundle = bundle.clone();
        bundle["dsseEnvelope"]["payload"] = STANDARD.encode(changed).into();
        let verified = verify(bundle.to_string().as_bytes(), &key("p256.pub"));
        assert_fails(verified, Kind::Integrity, &["not valid for its content"]);
    }
}

#[test]
fn only_python_verifies_other_signatures() {
    let p521 = PublicKey::from_pem(&read("p521.pub"));
    assert_fails(p521, Kind::InvalidArgument, &["fst.Signature in Python"]);
    for (name, expected) in [("keyless.sig", "keyless"), ("v0.3.1-certificate.sig", "has a certificate chain")] {
        let verified = verify(&read(&format!("older/{name}")), &key("p256.pub"));
        assert_fails(verified, Kind::Integrity, &[expected, "in Python"]);
    }
}

#[test]
fn older_signatures_are_verified() {
    // A file with a key may begin with other text.
    let key = PublicKey::from_pem(&[b"# A key\n".as_slice(), &read("older/p384.pub")].concat()).unwrap();
    let signed = verify(&read("older/v0.3.1-elliptic-key.sig"), &key).unwrap();
    assert_eq!(signed.manifest.entries().map(|(name, _)| name).collect::<Vec<_>>(), [""]);
}

fn statement_of(model: &Path, changes: Value) -> fst::Result<String> {
    let mut request = json!({"path": model.join("model.sig"), "algorithm": "sha256"});
    request.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let request: StatementRequest = serde_json::from_value(request).unwrap();
    model::statement(&request, model, &Options::default())
}

#[test]
fn requests_for_statements_are_checked() {
    let model = copy_of_model();
    for (changes, expected) in [
        (json!({"algorithm": "md5"}), "must be sha256, blake2b or blake3"),
        (json!({"algorithm": "blake3", "shard_bytes": 9}), "no shards with blake3"),
        (json!({"shard_bytes": 0}), "at least one byte"),
    ] {
        assert_fails(statement_of(model.path(), changes), Kind::InvalidArgument, &[expected]);
    }
}

#[test]
fn requests_to_verify_are_told_from_manifests() {
    assert!(SignatureRequest::parse("model.sig").unwrap().is_none());
    assert!(SignatureRequest::parse(r#"{"signature": "sha256:00"}"#).unwrap().is_none());
    for text in [r#"{"signature": {}}"#, r#"{ "signature" : {"path": 3}}"#, r#"{"signature": {"path": "a"}, "b": 1}"#] {
        assert_fails(SignatureRequest::parse(text), Kind::InvalidArgument, &[]);
    }
    for keys in [json!({}), json!({"certificate_chain": ["b"]}), json!({"public_key": "a", "statement": "{}"})] {
        let mut request = json!({"signature": {"path": "model.sig"}});
        request["signature"].as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let error = Verify::read(&request.to_string()).unwrap_err();
        assert!(error.to_string().contains("needs a public key; fst.Signature in Python"), "{error}");
    }
}

fn statement() -> Value {
    let bundle: Value = serde_json::from_slice(&read("p256-shards-sha256.sig")).unwrap();
    let payload = STANDARD.decode(bundle["dsseEnvelope"]["payload"].as_str().unwrap()).unwrap();
    serde_json::from_slice(&payload).unwrap()
}

/// Parses a statement whose subject has the digest of its resources.
fn parse(mut statement: Value) -> Result<Signed, Error> {
    let resources = statement["predicate"]["resources"].as_array().unwrap();
    let digests: String = resources.iter().map(|resource| resource["digest"].as_str().unwrap_or_default()).collect();
    let bytes: Vec<u8> =
        (0..digests.len() / 2).map(|at| u8::from_str_radix(&digests[2 * at..2 * at + 2], 16).unwrap_or(0)).collect();
    statement["subject"][0]["digest"]["sha256"] = Algorithm::Sha256.digest(&bytes).hex().into();
    Statement::parse(statement.to_string().as_bytes())
}

#[test]
fn statements_are_checked() {
    let refused = |expected: &str, change: &dyn Fn(&mut Vec<Value>)| {
        let mut statement = statement();
        change(statement["predicate"]["resources"].as_array_mut().unwrap());
        assert_fails(parse(statement), Kind::Malformed, &[expected]);
    };
    parse(statement()).unwrap();
    for (name, expected) in [
        ("model.safetensors", "two offsets"),
        ("model.safetensors:0", "two offsets"),
        ("model.safetensors:a:b", "two offsets"),
        ("/model.safetensors:0:100", "inside a directory"),
        ("../model.safetensors:0:100", "inside a directory"),
        (":0:100", "inside a directory"),
        ("model.safetensors:50:100", "leave gaps"),
        ("model.safetensors:0:0", "leave gaps"),
        ("model.safetensors:0:101", "leave gaps"),
    ] {
        refused(expected, &|list| list[1]["name"] = name.into());
    }
    refused("unknown algorithm", &|list| list[1]["algorithm"] = "sha256".into());
    refused("unknown algorithm", &|list| list[1]["algorithm"] = "md5-sharded-100".into());
    refused("no valid digest of sha256", &|list| list[1]["digest"] = "00".into());
    refused("no digest of a file", &|list| list.clear());
    refused("without a name", &|list| list[0]["name"] = ".:0:23".into());
    let mut wrong = statement();
    wrong["subject"][0]["digest"]["sha256"] = "00".into();
    assert_fails(Statement::parse(wrong.to_string().as_bytes()), Kind::Malformed, &["digest of the subject"]);
    for (field, value) in [("_type", json!("x")), ("predicateType", json!("x")), ("predicate", json!(null))] {
        let mut statement = statement();
        statement[field] = value;
        assert_fails(Statement::parse(statement.to_string().as_bytes()), Kind::Malformed, &[]);
    }
}
