//! Safetensors files for the tests, written by the reference implementation or byte by byte.

use fst::source::Source;
use safetensors::tensor::{Dtype, TensorView};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// A file with this header text and these data bytes, whatever they are worth.
pub fn raw(directory: &TempDir, name: &str, json: &str, data: &[u8]) -> PathBuf {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.extend_from_slice(data);
    let path = directory.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A file of tensors as `safetensors` writes it.
pub fn written(directory: &TempDir, name: &str, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) -> PathBuf {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let path = directory.path().join(name);
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    path
}

/// Bytes that differ from place to place, so that a misplaced one is seen.
pub fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|index| (index.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 7) as u8).collect()
}

pub fn source(path: &Path) -> Arc<Source> {
    Arc::new(Source::open(path).unwrap())
}
