//! Checkpoints for tests: files in a directory of their own, with known bytes.

#![allow(dead_code, reason = "each test program uses its own part of this")]

use fst::dtype::Dtype;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

/// Tensor of a test file.
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    /// Shape, in elements of the file.
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// Files of a checkpoint, and their tensors in the order of the files.
pub struct Model {
    pub paths: Vec<PathBuf>,
    pub tensors: Vec<Tensor>,
    _folder: TempDir,
}

impl Model {
    /// Writes one file with tensors of these dtypes and shapes.
    pub fn new(tensors: &[(Dtype, &[u64])]) -> Model {
        Model::sharded(tensors, 1)
    }

    /// Writes several files with tensors of these dtypes and shapes.
    pub fn sharded(tensors: &[(Dtype, &[u64])], files: usize) -> Model {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<Tensor> =
            tensors.iter().enumerate().map(|(index, (dtype, shape))| Tensor::new(index, *dtype, shape)).collect();
        let shards = all.chunks(all.len().div_ceil(files).max(1)).enumerate();
        let paths = shards.map(|(index, shard)| {
            let path = folder.path().join(format!("shard-{index}.safetensors"));
            fs::write(&path, file_of(shard)).unwrap();
            path
        });
        Model { paths: paths.collect(), tensors: all, _folder: folder }
    }
}

impl Model {
    /// Rewrites the only file with finite floats: the highest bit of each exponent is cleared.
    pub fn write_finite(&mut self) {
        for tensor in &mut self.tensors {
            let item_bytes = usize::try_from(tensor.dtype.item_bytes()).unwrap();
            tensor.bytes.iter_mut().skip(item_bytes - 1).step_by(item_bytes).for_each(|byte| *byte &= 0xBF);
        }
        fs::write(&self.paths[0], file_of(&self.tensors)).unwrap();
    }
}

impl Tensor {
    fn new(index: usize, dtype: Dtype, shape: &[u64]) -> Tensor {
        let bits = shape.iter().product::<u64>() * dtype.bits();
        assert_eq!(bits % 8, 0, "a tensor is a whole number of bytes");
        // Bytes differ from position to position, so that a misplaced one is noticed.
        let seed = u64::try_from(index).unwrap();
        let byte = |at: u64| (seed * 7919 + at).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[6];
        Tensor {
            name: format!("tensor.{index}"),
            dtype,
            shape: shape.to_vec(),
            bytes: (0..bits / 8).map(byte).collect(),
        }
    }

    /// Returns the bytes of a slice along one dimension, copied index by index.
    pub fn slice(&self, dim: usize, start: u64, length: u64) -> Vec<u8> {
        let size = |of: &[u64]| usize::try_from(of.iter().product::<u64>()).unwrap();
        let inner_bytes = size(&self.shape[dim + 1..]) * usize::try_from(self.dtype.item_bytes()).unwrap();
        let row_bytes = inner_bytes * size(&self.shape[dim..=dim]);
        let mut bytes = Vec::new();
        for outer in 0..size(&self.shape[..dim]) {
            for index in start..start + length {
                let begin = outer * row_bytes + usize::try_from(index).unwrap() * inner_bytes;
                bytes.extend_from_slice(&self.bytes[begin..begin + inner_bytes]);
            }
        }
        bytes
    }
}

fn file_of(tensors: &[Tensor]) -> Vec<u8> {
    let mut data = Vec::new();
    let mut entries = Vec::new();
    for Tensor { name, dtype, shape, bytes } in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        let end = data.len();
        entries.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#));
    }
    let header = format!("{{{}}}", entries.join(","));
    let length = u64::try_from(header.len()).unwrap();
    [&length.to_le_bytes()[..], header.as_bytes(), &data].concat()
}
