//! Transfers to host memory: bytes are exact whatever the options.

use crate::files;
use crate::host_load::load;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::checkpoint::verify::Verify;
use fst::device::host::Host;
use fst::digest::manifest::Manifest;
use fst::error::Kind;
use fst::format::layout::{Layout, Tensor};
use fst::load::background::BackgroundTransfer;
use fst::load::transfer::Transfer;
use fst::options::{Options, ReaderChoice};
use safetensors::tensor::Dtype;
use std::fs::OpenOptions;
use std::sync::Arc;
use tempfile::TempDir;

fn options(reader: ReaderChoice) -> Options {
    Options { reader, chunk_bytes: 64 << 10, staging_bytes: 256 << 10, threads: 4, ..Options::default() }
}

fn sample(directory: &TempDir) -> Vec<(String, Vec<u8>)> {
    let sizes = (0..300).map(|index| index % 17).chain([1 << 20, 3, (1 << 18) + 1, 200_000, 0, 5]);
    let tensors: Vec<_> =
        sizes.enumerate().map(|(index, size)| (format!("t{index:04}"), files::pattern(index, size))).collect();
    let list: Vec<_> =
        tensors.iter().map(|(name, bytes)| (name.as_str(), Dtype::U8, vec![bytes.len()], bytes.clone())).collect();
    files::written(directory, "x.safetensors", &list);
    tensors
}

fn whole(checkpoint: &Checkpoint, names: &[&str]) -> Arc<[TensorRegion]> {
    names
        .iter()
        .map(|name| {
            let (source, entry) = checkpoint.find(name).unwrap();
            TensorRegion::whole(source, entry).unwrap()
        })
        .collect()
}

#[test]
fn a_file_truncated_during_the_load_is_an_error() {
    for reader in [ReaderChoice::Mmap, ReaderChoice::Pread, ReaderChoice::Uring, ReaderChoice::Auto] {
        let directory = TempDir::new().unwrap();
        let tensors = sample(&directory);
        let checkpoint = Checkpoint::open(&[directory.path()]).unwrap();
        let regions = whole(&checkpoint, &tensors.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>());
        let path = directory.path().join("x.safetensors");
        OpenOptions::new().write(true).open(&path).unwrap().set_len(100_000).unwrap();
        let error = load(&checkpoint, &regions, options(reader)).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.to_string().contains("x.safetensors") && error.to_string().contains("byte "), "{error}");
    }
}

#[test]
fn only_large_loads_of_many_tensors_have_windows() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("x.safetensors");
    let manifest = Manifest::parse(format!("{}  x.safetensors\n", "0".repeat(64)).as_bytes()).unwrap();
    for (count, bytes, verify, windows) in [
        (2000, 256 << 10, Verify::Nothing, 8),
        (2000, 256 << 10, Verify::Manifest(manifest), 1),
        (1999, 256 << 10, Verify::Nothing, 1),
        (2000, 1 << 10, Verify::Nothing, 1),
    ] {
        let tensor = |index| Tensor::new(format!("t{index}"), fst::dtype::Dtype::U8, vec![bytes]).unwrap();
        let tensors: Vec<Tensor> = (0..count).map(tensor).collect();
        let layout = Layout::new(&tensors, &None).unwrap();
        std::fs::write(&path, layout.header()).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(layout.file_bytes()).unwrap();
        let checkpoint = Checkpoint::open_with(&[&path], &verify.into()).unwrap();
        let names: Vec<_> = tensors.iter().map(|tensor| tensor.name()).collect();
        let open = Transfer::open(&checkpoint, whole(&checkpoint, &names), Arc::new(Host), Options::default());
        assert_eq!(BackgroundTransfer::new(open.unwrap(), &checkpoint).windows(), windows, "{count} of {bytes}");
    }
}
