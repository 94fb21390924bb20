//! Headers: what the reference implementation writes is read the same; what is wrong is refused, with its place.

use crate::files;
use fst::error::Kind;
use fst::format::header::{HEADER_BYTES_MAX, Header};
use proptest::prelude::*;
use safetensors::SafeTensors;
use tempfile::TempDir;

fn parse(json: &str, data_bytes: u64) -> fst::Result<Header> {
    Header::parse(json.as_bytes(), 8 + json.len() as u64 + data_bytes)
}

/// A header that is refused, and what the error must say.
#[track_caller]
fn refused(json: &str, data_bytes: u64, expected: &[&str]) {
    let error = parse(json, data_bytes).expect_err(&json.chars().take(300).collect::<String>());
    assert_eq!(error.kind(), Kind::Malformed);
    let text = error.to_string();
    assert!(text.contains(": byte ") || text.starts_with("[malformed] byte "), "no offset: {text}");
    for part in expected {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn good_headers() {
    assert!(parse("{}", 0).unwrap().entries().len() == 0);
    assert!(parse("{}   ", 0).unwrap().entries().len() == 0);
    let header = parse(r#"{"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#, 4).unwrap();
    assert_eq!(header.metadata().unwrap()["a"], "b");
    let entry = header.find("x").unwrap();
    assert_eq!((entry.shape.len(), entry.end - entry.begin), (0, 4));
    // The order of the keys is free, and escapes in names are names.
    let json = r#"{"b\n":{"data_offsets":[4,8],"shape":[2,2],"dtype":"U8"},"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}"#;
    let header = parse(json, 8).unwrap();
    assert_eq!(header.entries().map(|entry| entry.name).collect::<Vec<_>>(), ["a", "b\n"]);
    // Fields that a later version may add.
    assert!(parse(r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"checksum":{"a":[1]}}}"#, 1).is_ok());
    assert!(parse(r#"{"__metadata__":{}}"#, 0).unwrap().metadata().unwrap().is_empty());
    for json in ["{}", r#"{"__metadata__":null}"#] {
        assert!(parse(json, 0).unwrap().metadata().is_none());
    }
    // Empty tensors, before and after others.
    let json = r#"{"e":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"f":{"dtype":"F64","shape":[3,0],"data_offsets":[1,1]}}"#;
    assert_eq!(parse(json, 1).unwrap().entries().len(), 3);
}

#[test]
fn not_the_right_json() {
    refused("", 0, &["begin with '{'"]);
    refused("[]", 0, &["begin with '{'"]);
    refused(" {}", 0, &["begin with '{'"]);
    refused("{", 0, &["EOF"]);
    refused("{}x", 0, &["byte 10", "trailing"]);
    refused(r#"{"x":1}"#, 0, &[r#"tensor "x""#, "dtype, shape and data_offsets"]);
    refused(r#"{"x":{}}"#, 0, &[r#"tensor "x""#, r#""dtype" is missing"#]);
    refused(r#"{"x":{"dtype":"U8"}}"#, 0, &[r#""shape" is missing"#]);
    refused(r#"{"x":{"dtype":"U8","shape":[1]}}"#, 0, &[r#""data_offsets" is missing"#]);
    let deep = format!(
        r#"{{"x":{{"dtype":"U8","shape":[1],"data_offsets":[0,1],"y":{}1{}}}}}"#,
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    refused(&deep, 1, &[r#"tensor "x""#, "recursion"]);
    let error = Header::parse(b"{\"\xff\":1}", 15).unwrap_err().to_string();
    assert!(error.contains("byte 10") && error.contains("UTF-8"), "{error}");
}

#[test]
fn keys_that_stand_twice() {
    let x = r#""x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    refused(&format!("{{{x},{x}}}"), 1, &[r#"tensor "x""#, "twice"]);
    let empty = r#""x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    refused(&format!("{{{empty},{empty}}}"), 0, &[r#"tensor "x""#, "twice"]);
    refused(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, &["__metadata__", "twice"]);
    refused(r#"{"__metadata__":{"a":"b","a":"c"}}"#, 0, &["\"a\"", "twice"]);
    refused(r#"{"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1, &["dtype", "twice"]);
}

#[test]
fn metadata_that_is_not_text() {
    for value in [r#"{"a":1}"#, r#"{"a":null}"#, r#"{"a":{}}"#, "[]", "\"text\"", "1"] {
        refused(&format!(r#"{{"__metadata__":{value}}}"#), 0, &["invalid type"]);
    }
}

#[test]
fn dtypes_shapes_and_offsets() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"x":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let x = r#"tensor "x""#;
    refused(&entry("\"F31\"", "[1]", "[0,4]"), 4, &[x, "F31"]);
    refused(&entry("1", "[1]", "[0,4]"), 4, &[x]);
    refused(&entry("\"F32\"", "[-1]", "[0,4]"), 4, &[x, "-1"]);
    refused(&entry("\"F32\"", "[1.5]", "[0,4]"), 4, &[x, "1.5"]);
    refused(&entry("\"F32\"", "1", "[0,4]"), 4, &[x]);
    refused(&entry("\"F32\"", "[1]", "[-4,0]"), 4, &[x, "-4"]);
    refused(&entry("\"F32\"", "[1]", "[0]"), 4, &[x, "two numbers"]);
    refused(&entry("\"F32\"", "[1]", "[0,4,4]"), 4, &[x, "at most 2"]);
    refused(&entry("\"F32\"", "[1]", "[4,0]"), 4, &[x, "reversed"]);
    refused(&entry("\"F32\"", "[1]", "[0,5]"), 5, &[x, "needs 4 bytes", "cover 5"]);
    refused(&entry("\"F32\"", "[2]", "[0,8]"), 4, &[x, "past the end", "cut off"]);
    refused(&entry("\"F32\"", "[1]", "[1,5]"), 5, &[x, "gap"]);
    refused(&entry("\"F32\"", "[1]", "[0,4]"), 5, &["must belong to a tensor"]);
    refused(&entry("\"F32\"", "[1]", "[0,18446744073709551615]"), 4, &[x, "past the end"]);
    refused(&entry("\"F32\"", "[1]", "[0,18446744073709551616]"), 4, &[x]);
    refused(&entry("\"F32\"", "[4611686018427387904,4611686018427387904]", "[0,0]"), 0, &[x, "overflows"]);
    refused(&entry("\"F32\"", "[0,9223372036854775807,9223372036854775807]", "[0,0]"), 0, &[x, "overflows"]);
    refused(&entry("\"F4\"", "[3]", "[0,2]"), 2, &[x, "whole number of bytes"]);
    let deep = format!("[{}1]", "1,".repeat(64));
    refused(&entry("\"U8\"", &deep, "[0,1]"), 1, &[x, "at most 64"]);
    let two =
        r#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"y":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#;
    refused(two, 4, &[r#"tensor "y""#, "overlap"]);
    let two =
        r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"y":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}"#;
    refused(two, 3, &[r#"tensor "y""#, "gap"]);
}

#[test]
fn length_fields() {
    let directory = TempDir::new().unwrap();
    let read = |bytes: &[u8]| {
        let path = directory.path().join("x.safetensors");
        std::fs::write(&path, bytes).unwrap();
        let error = Header::read(&files::source(&path)).unwrap_err();
        assert_eq!(error.kind(), Kind::Malformed);
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        error.to_string()
    };
    for length in 0..8 {
        assert!(read(&vec![0; length]).contains(&format!("has {length} bytes")));
    }
    for length in [1, HEADER_BYTES_MAX, HEADER_BYTES_MAX + 1, 1 << 62, u64::MAX] {
        let text = read(&length.to_le_bytes());
        assert!(text.contains(&format!("header length is {length}")), "{text}");
    }
}

#[test]
fn a_long_name_does_not_bury_the_message() {
    let name = "é".repeat(100_000);
    let error = parse(&format!(r#"{{"{name}":{{}}}}"#), 0).unwrap_err().to_string();
    assert!(error.len() < 2_000 && error.contains("missing"), "{} bytes", error.len());
}

fn tensors() -> impl Strategy<Value = Vec<(String, usize, Vec<usize>)>> {
    let shape = proptest::collection::vec(0_usize..6, 0..4);
    proptest::collection::btree_map("[a-z\\.\"\\\\é]{1,12}", (0_usize..17, shape), 0..12)
        .prop_map(|map| map.into_iter().map(|(name, (dtype, shape))| (name, dtype, shape)).collect())
}

/// A file as the reference implementation writes it.
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
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    &bytes[8..8 + length]
}

proptest! {
    #[test]
    fn what_safetensors_writes_is_read_the_same(tensors in tensors()) {
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

    /// Whatever stands in a header, the answer is a header or an error, and never one that safetensors refuses.
    #[test]
    fn a_damaged_header_is_never_worse_than_safetensors(
        tensors in tensors(), damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)
    ) {
        let mut bytes = serialize(&tensors);
        let length = split(&bytes).len();
        for (index, byte) in damage {
            let position = 8 + index.index(length);
            bytes[position] = byte;
        }
        if Header::parse(split(&bytes), bytes.len() as u64).is_ok() {
            prop_assert!(SafeTensors::deserialize(&bytes).is_ok());
        }
    }

    #[test]
    fn a_cut_file_is_always_refused(tensors in tensors(), cut in any::<prop::sample::Index>()) {
        let bytes = serialize(&tensors);
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("x.safetensors");
        std::fs::write(&path, &bytes[..cut.index(bytes.len())]).unwrap();
        prop_assert_eq!(Header::read(&files::source(&path)).unwrap_err().kind(), Kind::Malformed);
    }

    #[test]
    fn any_bytes_are_answered(json in proptest::collection::vec(any::<u8>(), 0..200), data_bytes in 0_u64..100) {
        // Reaching the end is the point: no panic, no overflow.
        let _ = Header::parse(&json, 8 + json.len() as u64 + data_bytes);
    }
}
