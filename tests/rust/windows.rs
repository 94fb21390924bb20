//! Windows in which the tensors of a load are allocated.

use crate::host_load::regions;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::verify::Verify;
use fst::device::host::Host;
use fst::digest::manifest::Manifest;
use fst::dtype::Dtype;
use fst::format::layout::{Layout, Tensor};
use fst::load::background::BackgroundTransfer;
use fst::load::transfer::Transfer;
use fst::options::Options;
use std::fs::OpenOptions;
use std::sync::Arc;
use tempfile::TempDir;

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
        let tensor = |index| Tensor::new(format!("t{index}"), Dtype::U8, vec![bytes]).unwrap();
        let tensors: Vec<Tensor> = (0..count).map(tensor).collect();
        let layout = Layout::new(&tensors, &None).unwrap();
        std::fs::write(&path, layout.header()).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(layout.file_bytes()).unwrap();
        let checkpoint = Arc::new(Checkpoint::open_with(&[&path], &verify.into()).unwrap());
        let open = Transfer::open(&checkpoint, regions(&checkpoint), Arc::new(Host), Options::default());
        let order: Vec<usize> = (0..usize::try_from(count).unwrap()).collect();
        let ends = BackgroundTransfer::new(open.unwrap(), &checkpoint).window_ends(&order);
        assert_eq!((ends.len(), ends.last()), (windows, Some(&order.len())), "{count} of {bytes}");
    }
}
