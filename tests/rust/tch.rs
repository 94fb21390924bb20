//! Tests of the functions on `tch::Tensor`, compared bit by bit with the safetensors crate.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "these are tests, helpers included")]

use fst::error::Kind as ErrorKind;
use fst_tch::{
    Dtypes, IndexRange, Region, Slice, load_boxes, load_file, load_files, load_into, load_slices, load_tensors,
    save_file, serialize, stream, verify,
};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

/// Dtypes with a kind in tch.
const KINDS: [(&str, Dtype, Kind); 14] = [
    ("bool", Dtype::BOOL, Kind::Bool),
    ("u8", Dtype::U8, Kind::Uint8),
    ("i8", Dtype::I8, Kind::Int8),
    ("i16", Dtype::I16, Kind::Int16),
    ("i32", Dtype::I32, Kind::Int),
    ("i64", Dtype::I64, Kind::Int64),
    ("f16", Dtype::F16, Kind::Half),
    ("bf16", Dtype::BF16, Kind::BFloat16),
    ("f32", Dtype::F32, Kind::Float),
    ("f64", Dtype::F64, Kind::Double),
    ("c64", Dtype::C64, Kind::ComplexFloat),
    ("f8_e4m3", Dtype::F8_E4M3, Kind::Float8e4m3fn),
    ("f8_e5m2", Dtype::F8_E5M2, Kind::Float8e5m2),
    ("f8_e5m2fnuz", Dtype::F8_E5M2FNUZ, Kind::Float8e5m2fnuz),
];

/// Dtypes of PyTorch without a kind in tch.
const NO_KINDS: [(&str, Dtype); 4] =
    [("u16", Dtype::U16), ("u32", Dtype::U32), ("u64", Dtype::U64), ("f8_e8m0", Dtype::F8_E8M0)];

/// Returns `length` bytes, which are also valid bools.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| u8::from(index * index % 7 > 2)).collect()
}

/// Writes tensors of shape [3, 4] with the safetensors crate.
fn write(path: &Path, dtypes: impl IntoIterator<Item = (&'static str, Dtype)>) {
    let dtypes: Vec<_> = dtypes.into_iter().collect();
    let bytes = pattern(12 * 16);
    let view = |dtype: Dtype| TensorView::new(dtype, vec![3, 4], &bytes[..12 * dtype.bitsize() / 8]).unwrap();
    let views = dtypes.iter().map(|&(name, dtype)| (name, view(dtype)));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Writes a file with every dtype of [`KINDS`] to a temporary directory.
fn checkpoint() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    write(&path, KINDS.map(|(name, dtype, _)| (name, dtype)));
    (directory, path)
}

/// Returns the bytes of a contiguous tensor.
fn bytes(tensor: &Tensor, length: usize) -> Vec<u8> {
    assert!(tensor.is_contiguous());
    // SAFETY: the tensor is contiguous and on the CPU, and the callers pass its length.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast(), length) }.to_vec()
}

/// Asserts that the tensors equal the contents of a file as read by the safetensors crate.
fn assert_equals_reference(path: &Path, tensors: &[(String, Tensor)]) {
    let file = std::fs::read(path).unwrap();
    let reference = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.len(), reference.len());
    for (name, tensor) in tensors {
        let view = reference.tensor(name).unwrap();
        let shape: Vec<usize> = tensor.size().iter().map(|&size| usize::try_from(size).unwrap()).collect();
        assert_eq!(shape, view.shape(), "{name}");
        assert_eq!(bytes(tensor, view.data().len()), view.data(), "{name}");
    }
}

#[test]
fn every_dtype_loads_bit_for_bit() {
    let (directory, path) = checkpoint();
    let tensors = load_file(&path, Device::Cpu, None, None).unwrap();
    assert_equals_reference(&path, &tensors);
    for (name, tensor) in &tensors {
        let (.., kind) = KINDS.iter().find(|row| row.0 == name).unwrap();
        assert_eq!(tensor.kind(), *kind);
    }
    let path = directory.path().join("others.safetensors");
    write(&path, NO_KINDS);
    let tensors = load_file(&path, Device::Cpu, None, None).unwrap();
    assert_equals_reference(&path, &tensors);
    assert!(tensors.iter().all(|(_, tensor)| tensor.f_kind().is_err()));
}

#[test]
fn patterns_choose_dtypes() {
    let (_directory, path) = checkpoint();
    let stored = load_file(&path, Device::Cpu, None, None).unwrap();
    // A name takes precedence over patterns, and a pattern over later ones.
    let dtypes = Dtypes::from([("f1*", None), ("*", Some(Kind::BFloat16)), ("f64", Some(Kind::Float))]);
    let expected = |name: &str, kind| match name {
        "f64" => Kind::Float,
        "f32" => Kind::BFloat16,
        _ => kind,
    };
    let loaded = load_file(&path, Device::Cpu, dtypes.clone(), None).unwrap();
    let kinds = |tensors: &[(String, Tensor)]| tensors.iter().map(|(_, tensor)| tensor.kind()).collect::<Vec<_>>();
    let expected = stored.iter().map(|(name, stored)| expected(name, stored.kind()));
    assert_eq!(kinds(&loaded), expected.collect::<Vec<_>>());
    let named = load_tensors(&[&path], &["f64", "f16", "f32"], Device::Cpu, dtypes.clone(), None).unwrap();
    assert_eq!(named.iter().map(Tensor::kind).collect::<Vec<_>>(), [Kind::Float, Kind::Half, Kind::BFloat16]);
    let slice = Slice { name: "f64".into(), dim: 0, start: 0, length: 1 };
    assert_eq!(load_slices(&[&path], &[slice], Device::Cpu, dtypes.clone(), None).unwrap()[0].kind(), Kind::Float);
    let range = IndexRange { start: 0, length: 2, step: 1 };
    let region = Region { name: "f32".into(), ranges: vec![range, range] };
    assert_eq!(load_boxes(&[&path], &[region], Device::Cpu, dtypes.clone(), None).unwrap()[0].kind(), Kind::BFloat16);
    let streamed: Vec<_> = stream(&[&path], Device::Cpu, dtypes, None).unwrap().map(Result::unwrap).collect();
    assert_eq!(kinds(&streamed), kinds(&loaded));

    let error = load_file(&path, Device::Cpu, [("f65", Some(Kind::Half))], None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains(r#""f65" matches no tensor"#), "{error}");
    let error = load_file(&path, Device::Cpu, [("f64", Some(Kind::Int))], None).unwrap_err();
    assert!(error.to_string().contains("dtype is Int"), "{error}");
}

#[test]
fn loads_compare_digests() {
    let (directory, path) = checkpoint();
    let tensors = load_file(&path, Device::Cpu, None, None).unwrap();
    let missing = verify(&[&path], "digests").unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Integrity, "the file has no digests: {missing}");

    let digested = directory.path().join("digested.safetensors");
    save_file(&tensors, &digested, &[("fst.digests", "blake3")]).unwrap();
    let slice = [Slice { name: "f64".into(), dim: 0, start: 0, length: 3 }];
    let range = |length| IndexRange { start: 0, length, step: 1 };
    let region = [Region { name: "f64".into(), ranges: vec![range(3), range(4)] }];
    let output = Tensor::zeros([3, 4], (Kind::Double, Device::Cpu));
    let failures = |request: Option<&str>| {
        let paths = [&digested];
        [
            load_file(&digested, Device::Cpu, None, request).err(),
            load_tensors(&paths, &["f64"], Device::Cpu, None, request).err(),
            load_slices(&paths, &slice, Device::Cpu, None, request).err(),
            load_boxes(&paths, &region, Device::Cpu, None, request).err(),
            load_into(&paths, &[("f64", &output)], request).err(),
            stream(&paths, Device::Cpu, None, request).and_then(Iterator::collect::<Result<Vec<_>, _>>).err(),
            request.and_then(|request| verify(&paths, request).err()),
        ]
    };
    assert!(failures(Some("digests")).iter().all(Option::is_none), "{:?}", failures(Some("digests")));
    let (_, f64) = tensors.iter().find(|(name, _)| name == "f64").unwrap();
    assert_eq!(&output, f64);

    // Changes the last byte of the tensor.
    let mut file = std::fs::read(&digested).unwrap();
    let header = SafeTensors::read_metadata(&file).unwrap();
    let (_, end) = header.1.tensors()["f64"].data_offsets;
    file[8 + header.0 + end - 1] ^= 1;
    std::fs::write(&digested, file).unwrap();
    for error in failures(Some("digests")) {
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Integrity, "{error}");
        assert!(error.to_string().contains("f64"), "{error}");
    }
    assert!(failures(None).iter().all(Option::is_none));
}

#[test]
fn files_form_one_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let paths = [1, 2].map(|shard| directory.path().join(format!("model-{shard:05}-of-00002.safetensors")));
    write(&paths[0], [("i64", Dtype::I64)]);
    write(&paths[1], [("f32", Dtype::F32)]);
    let names = |tensors: &[(String, Tensor)]| tensors.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&load_files(&paths, Device::Cpu, None, None).unwrap()), ["i64", "f32"]);
    assert_eq!(names(&load_file(&directory, Device::Cpu, None, None).unwrap()), ["i64", "f32"]);
    write(&paths[1], [("i64", Dtype::I64)]);
    assert_eq!(load_files(&paths, Device::Cpu, None, None).unwrap_err().kind(), ErrorKind::DuplicateTensor);
}

#[test]
fn load_into_overwrites_tensors_in_place() {
    let (_directory, path) = checkpoint();
    let expected = load_tensors(&[&path], &["f32", "i64"], Device::Cpu, None, None).unwrap();
    let float = Tensor::zeros([4, 3], (Kind::Float, Device::Cpu)).transpose(0, 1);
    let long = Tensor::zeros([3, 4], (Kind::Int64, Device::Cpu));
    let address = float.data_ptr();
    let wrong = Tensor::zeros([3, 5], (Kind::Float, Device::Cpu));
    let error = load_into(&[&path], &[("i64", &long), ("f32", &wrong)], None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(long.sum(Kind::Int64).int64_value(&[]), 0, "all arguments are checked before the first write");
    load_into(&[&path], &[("f32", &float), ("i64", &long)], None).unwrap();
    assert_eq!([&float, &long], [&expected[0], &expected[1]]);
    assert_eq!(float.data_ptr(), address);
}

#[test]
fn saved_files_match_the_reference() {
    let (directory, path) = checkpoint();
    let tensors = load_file(&path, Device::Cpu, None, None).unwrap();
    let copy = directory.path().join("copy.safetensors");
    let texts = [("format", "pt"), ("step", "7")];
    // The second one replaces the file from which the tensors were loaded.
    for (path, texts) in [(&copy, &texts[..]), (&path, &texts[..0])] {
        save_file(&tensors, path, texts).unwrap();
        assert_equals_reference(path, &tensors);
        let file = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(header.metadata().is_some(), !texts.is_empty());
        let metadata = header.metadata().clone().unwrap_or_default();
        assert_eq!(metadata.len(), texts.len());
        assert!(texts.iter().all(|(key, text)| metadata[*key] == *text), "{metadata:?}");
        assert_eq!(serialize(&tensors, texts).unwrap(), file);
    }
    let error = serialize(&[("__metadata__", Tensor::from(1))], &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);

    let nowhere = directory.path().join("nowhere/copy.safetensors");
    assert_eq!(save_file(&tensors, nowhere, &[]).unwrap_err().kind(), ErrorKind::FileNotFound);
}

#[test]
fn stream_yields_all_tensors() {
    let (_directory, path) = checkpoint();
    for dtype in [None, Some(Kind::Double)] {
        let expected = load_file(&path, Device::Cpu, dtype, None).unwrap();
        let loader = stream(&[&path], Device::Cpu, dtype, None).unwrap();
        let lengths = expected.iter().map(|(_, tensor)| 12 * tensor.kind().elt_size_in_bytes());
        assert_eq!(loader.total_bytes(), lengths.sum::<usize>() as u64);
        // Iterate on another thread than the thread that created the stream.
        let streamed = std::thread::spawn(|| loader.collect::<Result<Vec<_>, _>>()).join().unwrap().unwrap();
        assert_eq!(streamed.len(), expected.len());
        for ((name, tensor), (expected_name, expected)) in streamed.iter().zip(&expected) {
            assert_eq!(name, expected_name);
            let length = 12 * expected.kind().elt_size_in_bytes();
            assert_eq!(bytes(tensor, length), bytes(expected, length), "{name}");
        }
    }
}

#[test]
fn stream_can_be_dropped_early_and_stays_exhausted() {
    let (_directory, path) = checkpoint();
    let mut loader = stream(&[&path], Device::Cpu, Some(Kind::Double), None).unwrap();
    let (name, tensor) = loader.next().unwrap().unwrap();
    drop(loader);
    let (expected_name, expected) = load_file(&path, Device::Cpu, Some(Kind::Double), None).unwrap().swap_remove(0);
    assert_eq!((name, tensor), (expected_name, expected));
    let mut loader = stream(&[&path], Device::Cpu, None, None).unwrap();
    assert_eq!(loader.by_ref().count(), KINDS.len());
    assert!(loader.next().is_none());
}

#[test]
fn errors_have_kind_and_text() {
    let (directory, path) = checkpoint();
    let missing = directory.path().join("missing.safetensors");
    let error = load_file(&missing, Device::Cpu, None, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FileNotFound);
    let start = format!("[file-not-found] {}: ", missing.display());
    assert!(error.to_string().starts_with(&start), "{error}");
    assert!(!error.to_string().contains("Exception raised from"), "PyTorch's backtrace is removed: {error}");

    assert_eq!(load_file(&path, Device::Mps, None, None).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let file = std::fs::read(&path).unwrap();
    std::fs::write(&path, &file[..file.len() - 1]).unwrap();
    assert_eq!(load_file(&path, Device::Cpu, None, None).unwrap_err().kind(), ErrorKind::Malformed);
    assert_eq!(stream(&[&path], Device::Cpu, None, None).err().unwrap().kind(), ErrorKind::Malformed);

    let not_utf8 = Path::new(OsStr::from_bytes(b"\xff.safetensors"));
    assert_eq!(load_file(not_utf8, Device::Cpu, None, None).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn memory_that_pytorch_does_not_have_is_an_error() {
    // A sparse file that is larger than the memory.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("huge.safetensors");
    let length: u64 = 4 << 40;
    let header = format!(r#"{{"w":{{"dtype":"F16","shape":[{}],"data_offsets":[0,{length}]}}}}"#, length / 2);
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(8 + header.len() as u64 + length).unwrap();
    let error = load_file(&path, Device::Cpu, Some(Kind::Double), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.to_string().contains("\"w\""), "{error}");
}

#[test]
fn example_lists_a_checkpoint() {
    let (_directory, path) = checkpoint();
    // The test is target/debug/deps/tch-..., and the example is target/debug/examples/load.
    let tests = std::env::current_exe().unwrap();
    let example = tests.ancestors().nth(2).unwrap().join("examples/load");
    let output = Command::new(&example).arg(&path).env_clear().output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!(lines.lines().count(), KINDS.len());
    let floats = load_tensors(&[&path], &["f64"], Device::Cpu, None, None).unwrap();
    let sum = floats[0].sum(Kind::Double).double_value(&[]);
    assert!(lines.contains(&format!("f64 Double [3, 4] sum {sum}\n")), "{lines}");

    let output = Command::new(&example).arg("missing.safetensors").env_clear().output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("[file-not-found] missing.safetensors"));
}
