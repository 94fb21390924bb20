//! Headers: the `safetensors` crate's are read equally, and invalid ones are rejected with their location.

use crate::files::{self, any_damage, apply, assert_fails};
use fst::error::Kind;
use fst::format::header::{HEADER_BYTES_MAX, Header};
use proptest::prelude::*;
use safetensors::SafeTensors;

fn parse(json: &str, data_bytes: u64) -> fst::Result<Header> {
    Header::parse(json.as_bytes(), 8 + json.len() as u64 + data_bytes)
}

/// Checks that a header is rejected, and that the error contains all of `expected`.
#[track_caller]
fn rejected(json: &str, data_bytes: u64, expected: &[&str]) {
    let error = parse(json, data_bytes).expect_err(&json.chars().take(300).collect::<String>());
    assert_eq!(error.kind(), Kind::Malformed);
    let text = error.to_string();
    assert!(text.contains(": byte ") || text.starts_with("[malformed] byte "), "no offset: {text}");
    for part in expected {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn valid_headers_are_parsed() {
    assert!(parse("{}", 0).unwrap().entries().len() == 0);
    assert!(parse(" {}   ", 0).unwrap().entries().len() == 0);
    let header = parse(r#"{"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#, 4).unwrap();
    assert_eq!(header.metadata().unwrap()["a"], "b");
    let entry = header.find("x").unwrap();
    assert_eq!((entry.shape.len(), entry.end - entry.begin), (0, 4));
    // Keys may be in any order, and names may contain escapes.
    let json = r#"{"b\n":{"data_offsets":[4,8],"shape":[2,2],"dtype":"U8"},"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}"#;
    let header = parse(json, 8).unwrap();
    assert_eq!(header.entries().map(|entry| entry.name).collect::<Vec<_>>(), ["a", "b\n"]);
    // A later version of the format may add fields.
    assert!(parse(r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"checksum":{"a":[1]}}}"#, 1).is_ok());
    assert!(parse(r#"{"__metadata__":{}}"#, 0).unwrap().metadata().unwrap().is_empty());
    for json in ["{}", r#"{"__metadata__":null}"#] {
        assert!(parse(json, 0).unwrap().metadata().is_none());
    }
    // Empty tensors before and after others.
    let json = r#"{"e":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"f":{"dtype":"F64","shape":[3,0],"data_offsets":[1,1]}}"#;
    assert_eq!(parse(json, 1).unwrap().entries().len(), 3);
}

#[test]
fn invalid_json_is_rejected() {
    rejected("", 0, &["begin with '{'"]);
    rejected("[]", 0, &["begin with '{'"]);
    rejected("{", 0, &["EOF"]);
    rejected("{\0\0", 0, &["byte 9", "ends in zeros", "download the file again"]);
    rejected("{}x", 0, &["byte 10", "trailing"]);
    rejected(r#"{"x":1}"#, 0, &[r#"tensor "x""#, "dtype, shape and data_offsets"]);
    rejected(r#"{"x":{}}"#, 0, &[r#"tensor "x""#, r#""dtype" is missing"#]);
    rejected(r#"{"x":{"dtype":"U8"}}"#, 0, &[r#""shape" is missing"#]);
    rejected(r#"{"x":{"dtype":"U8","shape":[1]}}"#, 0, &[r#""data_offsets" is missing"#]);
    let deep = format!(
        r#"{{"x":{{"dtype":"U8","shape":[1],"data_offsets":[0,1],"y":{}1{}}}}}"#,
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    rejected(&deep, 1, &[r#"tensor "x""#, "recursion"]);
    assert_fails(Header::parse(b"{\"\xff\":1}", 15), Kind::Malformed, &["byte 10", "UTF-8"]);
}

#[test]
fn duplicate_keys_are_rejected() {
    let x = r#""x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    rejected(&format!("{{{x},{x}}}"), 1, &[r#"tensor "x""#, "twice"]);
    let empty = r#""x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    rejected(&format!("{{{empty},{empty}}}"), 0, &[r#"tensor "x""#, "twice"]);
    rejected(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, &["__metadata__", "twice"]);
    rejected(r#"{"__metadata__":{"a":"b","a":"c"}}"#, 0, &["\"a\"", "twice"]);
    rejected(r#"{"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1, &["dtype", "twice"]);
}

#[test]
fn metadata_other_than_strings_are_rejected() {
    for value in [r#"{"a":1}"#, r#"{"a":null}"#, r#"{"a":{}}"#, "[]", "\"text\"", "1"] {
        rejected(&format!(r#"{{"__metadata__":{value}}}"#), 0, &["invalid type"]);
    }
}

#[test]
fn invalid_dtypes_shapes_and_offsets_are_rejected() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"x":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let x = r#"tensor "x""#;
    rejected(&entry("\"F31\"", "[1]", "[0,4]"), 4, &[x, "F31"]);
    rejected(&entry("1", "[1]", "[0,4]"), 4, &[x]);
    rejected(&entry("\"F32\"", "[-1]", "[0,4]"), 4, &[x, "-1"]);
    rejected(&entry("\"F32\"", "[1.5]", "[0,4]"), 4, &[x, "1.5"]);
    rejected(&entry("\"F32\"", "1", "[0,4]"), 4, &[x]);
    rejected(&entry("\"F32\"", "[1]", "[-4,0]"), 4, &[x, "-4"]);
    rejected(&entry("\"F32\"", "[1]", "[0]"), 4, &[x, "two numbers"]);
    rejected(&entry("\"F32\"", "[1]", "[0,4,4]"), 4, &[x, "at most 2"]);
    rejected(&entry("\"F32\"", "[1]", "[4,0]"), 4, &[x, "reversed"]);
    rejected(&entry("\"F32\"", "[1]", "[0,5]"), 5, &[x, "needs 4 bytes", "cover 5"]);
    rejected(&entry("\"F32\"", "[2]", "[0,8]"), 4, &[x, "past the end", "cut off"]);
    rejected(&entry("\"F32\"", "[1]", "[1,5]"), 5, &[x, "gap"]);
    rejected(&entry("\"F32\"", "[1]", "[0,4]"), 5, &["must belong to a tensor"]);
    rejected(&entry("\"F32\"", "[1]", "[0,18446744073709551615]"), 4, &[x, "past the end"]);
    rejected(&entry("\"F32\"", "[1]", "[0,18446744073709551616]"), 4, &[x]);
    rejected(&entry("\"F32\"", "[4611686018427387904,4611686018427387904]", "[0,0]"), 0, &[x, "overflows"]);
    rejected(&entry("\"F32\"", "[0,9223372036854775807,9223372036854775807]", "[0,0]"), 0, &[x, "overflows"]);
    rejected(&entry("\"F4\"", "[3]", "[0,2]"), 2, &[x, "whole number of bytes"]);
    let deep = format!("[{}1]", "1,".repeat(64));
    rejected(&entry("\"U8\"", &deep, "[0,1]"), 1, &[x, "at most 64"]);
    let two =
        r#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"y":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#;
    rejected(two, 4, &[r#"tensor "y""#, "overlap"]);
    let two =
        r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"y":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}"#;
    rejected(two, 3, &[r#"tensor "y""#, "gap"]);
}

#[test]
fn invalid_length_fields_are_rejected() {
    let (_directory, path) = files::new_path("x.safetensors");
    let refused = |bytes: &[u8], expected: &str| {
        std::fs::write(&path, bytes).unwrap();
        assert_fails(Header::read(&files::source(&path)), Kind::Malformed, &[path.to_str().unwrap(), expected]);
    };
    for length in 0..8 {
        refused(&vec![0; length], &format!("has {length} bytes"));
    }
    for length in [1, HEADER_BYTES_MAX, HEADER_BYTES_MAX + 1, 1 << 62, u64::MAX] {
        refused(&length.to_le_bytes(), &format!("header length is {length}"));
    }
}

#[test]
fn a_long_name_is_shortened_in_errors() {
    let name = "é".repeat(100_000);
    let error = parse(&format!(r#"{{"{name}":{{}}}}"#), 0).unwrap_err().to_string();
    assert!(error.len() < 2_000 && error.contains("missing"), "{} bytes", error.len());
}

fn tensors() -> impl Strategy<Value = Vec<(String, usize, Vec<usize>)>> {
    let shape = proptest::collection::vec(0_usize..6, 0..4);
    proptest::collection::btree_map("[a-z\\.\"\\\\é]{1,12}", (0_usize..17, shape), 0..12)
        .prop_map(|map| map.into_iter().map(|(name, (dtype, shape))| (name, dtype, shape)).collect())
}

/// Serializes tensors with the `safetensors` crate.
fn serialize(tensors: &[(String, usize, Vec<usize>)]) -> Vec<u8> {
    let dtypes: Vec<fst::dtype::Dtype> = fst::dtype::Dtype::all().filter(|dtype| dtype.bits() >= 8).collect();
    let data: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape)| {
            let dtype = dtypes[*dtype];
            let reference = serde_json::from_str(&format!("{:?}", dtype.name())).unwrap();
            let bytes = shape.iter().product::<usize>() * dtype.item_bytes() as usize;
            (name, reference, shape.clone(), files::pattern(1, bytes))
        })
        .collect();
    let views = data.iter().map(|(name, dtype, shape, bytes)| {
        (*name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

fn split(bytes: &[u8]) -> &[u8] {
    &bytes[8..files::data_begin(bytes)]
}

proptest! {
    #[test]
    fn files_of_the_safetensors_crate_are_read_equally(tensors in tensors()) {
        let bytes = serialize(&tensors);
        let header = Header::parse(split(&bytes), bytes.len() as u64).unwrap();
        let reference = SafeTensors::deserialize(&bytes).unwrap();
        prop_assert_eq!(header.entries().len(), reference.len());
        for (name, view) in reference.iter() {
            let entry = header.find(name).unwrap();
            prop_assert_eq!(entry.dtype.name(), view.dtype().to_string());
            prop_assert_eq!(entry.shape.iter().map(|&size| size as usize).collect::<Vec<_>>(), view.shape());
            prop_assert_eq!(&bytes[entry.begin as usize..entry.end as usize], view.data());
        }
    }

    /// A damaged header is rejected or parsed, and every parsed header is one that the `safetensors` crate accepts.
    #[test]
    fn headers_accepted_are_accepted_by_the_safetensors_crate(tensors in tensors(), damage in any_damage()) {
        let mut bytes = serialize(&tensors);
        let end = files::data_begin(&bytes);
        apply(&damage, &mut bytes[8..end]);
        if Header::parse(split(&bytes), bytes.len() as u64).is_ok() {
            prop_assert!(SafeTensors::deserialize(&bytes).is_ok());
        }
    }

    #[test]
    fn a_truncated_file_is_rejected(tensors in tensors(), cut in any::<prop::sample::Index>()) {
        let bytes = serialize(&tensors);
        let (_directory, path) = files::new_path("x.safetensors");
        std::fs::write(&path, &bytes[..cut.index(bytes.len())]).unwrap();
        prop_assert_eq!(Header::read(&files::source(&path)).unwrap_err().kind(), Kind::Malformed);
    }
}
