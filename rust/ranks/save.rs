//! Plan of a save by a group of ranks: which rank writes which bytes of which file, and which bytes ranks exchange for
//! that. Pure, and equal on every rank: the only inputs are the names, dtypes, shapes and layouts of the tensors.
//!
//! Every block of a file has one writer, which is the writer of its first byte. Bytes of a block that its writer does not
//! hold are sent to it in the window of the block:
//!
//! ```text
//! file     | header     |    tensor a           | b |        tensor c        |
//! parts    | rank 0     | rank 0    | rank 1    | 0 | rank 0    | rank 1     |
//! blocks   |   |   |   |   |   |   |   |   |   |   |   |   |   |   |   |   |
//! writers  | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 1 | 1 | 0 | 0 | 0 | 1 | 1 | 1 |
//! ```
//!
//! A rank computes only what concerns itself, apart from the windows, to which each tensor adds a bound that is known from
//! its layout.

mod rank;
mod regions;
mod windows;
mod writers;

pub use self::rank::{RankPlan, RankWindow, Send, Source, Write};
pub use self::writers::run_bytes_min;
pub use super::layout::{IndexBox, Layout};

use self::regions::Regions;
use self::windows::Cut;
use self::writers::{Run, Writers};
use crate::digest::Algorithm;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::Metadata;
use crate::format::layout as file_layout;
use crate::format::{digests, encryption};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

/// Most ranks of a save. The plan has numbers for each of them.
const RANKS_MAX: usize = 1 << 20;
/// Usual size of the largest range that a rank writes at once, in bytes.
pub const WRITE_BYTES_MAX: u64 = 32 << 20;

/// Tensor of a save by ranks.
#[derive(Clone, Debug, Hash)]
pub struct SaveTensor {
    /// Name in its file.
    pub name: String,
    /// Dtype in its file.
    pub dtype: Dtype,
    /// Sizes of the full tensor, in elements of PyTorch.
    pub shape: Vec<u64>,
    /// Index of its file.
    pub file: usize,
    /// Index of its layout.
    pub layout: usize,
}

/// Description of a save, equal on all ranks.
#[derive(Clone, Debug, Hash)]
pub struct SaveRequest {
    /// Metadata of each file.
    pub files: Vec<Metadata>,
    /// Layouts of the tensors.
    pub layouts: Vec<Layout>,
    /// The tensors.
    pub tensors: Vec<SaveTensor>,
    /// Number of ranks.
    pub ranks: usize,
    /// Largest size of a rank's send and receive buffers together, in bytes.
    pub window_bytes: u64,
    /// Size of the blocks of a file that have one writer, in bytes.
    pub block_bytes: u64,
    /// Smallest part of a tensor that one rank writes, in bytes: [`run_bytes_min`].
    pub run_bytes_min: u64,
    /// Largest range of a file that a rank writes at once, in bytes, if a block is not larger: [`WRITE_BYTES_MAX`]. Its
    /// bytes may have to be copied first.
    pub write_bytes_max: u64,
}

/// Plan of a save by a group.
#[derive(Debug)]
pub struct SavePlan {
    ranks: usize,
    block_bytes: u64,
    /// Largest range of a rank, a multiple of blocks.
    write_bytes_max: u64,
    files: Vec<File>,
    /// Tensors in the order of the files and of their bytes.
    tensors: Vec<Tensor>,
    /// For each tensor of the request, its index in `tensors`.
    indices: Vec<usize>,
    windows: usize,
    digest: u64,
}

/// File of a save.
#[derive(Debug)]
struct File {
    layout: Arc<file_layout::Layout>,
    /// Its tensors.
    tensors: Range<usize>,
    /// Window in which its header is written.
    window: usize,
}

/// Tensor of a file.
#[derive(Debug)]
struct Tensor {
    /// Index in the request.
    position: usize,
    /// First byte in the file.
    begin: u64,
    /// One past the last byte in the file.
    end: u64,
    dtype: Dtype,
    writers: Arc<Writers>,
    /// First window of its blocks.
    window: usize,
    cut: Cut,
}

impl Tensor {
    fn run_at(&self, byte: u64) -> Option<Run<'_>> {
        self.writers.run_at(byte, self.position)
    }
}

/// Writer of a block, and the window of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    rank: usize,
    window: usize,
}

impl SavePlan {
    /// Plans a save. Fails with `invalid-argument` if a layout does not fit its tensor, if a name or size cannot be
    /// saved, or if `window_bytes` is too small.
    pub fn new(request: &SaveRequest) -> Result<SavePlan> {
        let mut hasher = DefaultHasher::new();
        request.hash(&mut hasher);
        let digest = hasher.finish();
        let invalid = |message: String| Error::new(Kind::InvalidArgument, message);
        if !(1..=RANKS_MAX).contains(&request.ranks) || request.block_bytes == 0 {
            let message = format!(
                "a save by {} ranks in blocks of {} bytes; accepted are 1 to {RANKS_MAX} ranks",
                request.ranks, request.block_bytes
            );
            return Err(invalid(message));
        }
        let mut of_file: Vec<Vec<usize>> = vec![Vec::new(); request.files.len()];
        for (position, tensor) in request.tensors.iter().enumerate() {
            let missing = || invalid(format!("the save has no file {}", tensor.file)).tensor(&*tensor.name);
            of_file.get_mut(tensor.file).ok_or_else(missing)?.push(position);
        }
        let mut known: HashMap<(usize, &[u64], u64), Arc<Writers>> = HashMap::new();
        let mut plan = SavePlan {
            ranks: request.ranks,
            block_bytes: request.block_bytes,
            write_bytes_max: (request.write_bytes_max - request.write_bytes_max % request.block_bytes)
                .max(request.block_bytes),
            files: Vec::with_capacity(request.files.len()),
            tensors: Vec::with_capacity(request.tensors.len()),
            indices: vec![0; request.tensors.len()],
            windows: 0,
            digest,
        };
        for (positions, metadata) in of_file.iter().zip(&request.files) {
            let own: Vec<&SaveTensor> =
                positions.iter().filter_map(|&position| request.tensors.get(position)).collect();
            let new = own
                .iter()
                .map(|tensor| file_layout::Tensor::of_torch(&*tensor.name, tensor.dtype, tensor.shape.clone()))
                .collect::<Result<Vec<_>>>()?;
            if encryption::is_requested(metadata) {
                return Err(invalid("ranks cannot write an encrypted file together; save it from one process".into()));
            }
            if digests::requested(metadata)?.is_some_and(Algorithm::is_sequential) {
                let message = "ranks cannot compute this digest together; request \"blake3\", or save from one process";
                return Err(invalid(message.into()));
            }
            let layout = file_layout::Layout::new(&new, metadata)?;
            let first = plan.tensors.len();
            for (&index, range) in layout.order().iter().zip(layout.ranges()) {
                let (Some(&position), Some(tensor)) = (positions.get(index), own.get(index)) else { continue };
                let writers = match known.entry((tensor.layout, &tensor.shape, tensor.dtype.item_bytes())) {
                    Entry::Occupied(known) => Arc::clone(known.get()),
                    Entry::Vacant(place) => Arc::clone(place.insert(writers_of(request, tensor)?)),
                };
                if let Some(place) = plan.indices.get_mut(position) {
                    *place = plan.tensors.len();
                }
                plan.tensors.push(Tensor {
                    position,
                    begin: range.start,
                    end: range.end,
                    dtype: tensor.dtype,
                    writers,
                    window: 0,
                    cut: Cut::default(),
                });
            }
            plan.files.push(File { layout: Arc::new(layout), tensors: first..plan.tensors.len(), window: 0 });
        }
        plan.assign_windows(request.window_bytes)?;
        Ok(plan)
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the size of a block in bytes.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Returns the number of windows.
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Returns whether a file has digests.
    pub fn has_digests(&self) -> bool {
        self.files.iter().any(|file| file.layout.digests().is_some())
    }

    /// Returns the number of files.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Returns the layout of a file.
    pub fn file(&self, file: usize) -> Option<&Arc<file_layout::Layout>> {
        self.files.get(file).map(|file| &file.layout)
    }

    /// Returns a hash that is equal on two ranks if their requests are equal.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Returns the number of tensors.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Returns the dtype of a tensor of the request in its file.
    pub fn dtype(&self, position: usize) -> Option<Dtype> {
        self.tensor(position).map(|tensor| tensor.dtype)
    }

    /// Returns the shape of the local tensor of a rank, in elements of PyTorch, or `None` if the rank holds no bytes of the
    /// tensor at `position` of the request.
    pub fn local_shape(&self, position: usize, rank: usize) -> Option<Vec<u64>> {
        let regions = self.tensor(position)?.writers.regions();
        regions.of_rank(rank).map(|(region, _)| regions.local_shape(region))
    }

    fn tensor(&self, position: usize) -> Option<&Tensor> {
        self.indices.get(position).and_then(|&index| self.tensors.get(index))
    }

    /// Returns the first byte of the block with the byte at `at` of a file.
    fn block_begin(&self, at: u64) -> u64 {
        at - at % self.block_bytes
    }

    /// Returns the first byte of the first block that begins at `at` or later.
    fn block_end(&self, at: u64) -> u64 {
        at.div_ceil(self.block_bytes).saturating_mul(self.block_bytes)
    }

    /// Returns the writer of the block that begins at `block`, which is before the end of the tensor at `index`.
    fn owner(&self, file: &File, index: usize, block: u64) -> Option<Owner> {
        let mut index = index;
        while index > file.tensors.start && self.tensors.get(index)?.begin > block {
            index -= 1;
        }
        let tensor = self.tensors.get(index)?;
        if block < tensor.begin {
            // The header is longer than its last block.
            return Some(Owner { rank: 0, window: file.window });
        }
        let byte = block - tensor.begin;
        let run = tensor.run_at(byte)?;
        let part = run.part_at(byte);
        let first = self.block_end(tensor.begin + run.part_begin(part));
        let row = byte.checked_div(tensor.writers.row_bytes()).unwrap_or(0);
        let window = tensor.window + tensor.cut.window(row, (block - first) / self.block_bytes);
        Some(Owner { rank: run.writer(part), window })
    }
}

fn writers_of(request: &SaveRequest, tensor: &SaveTensor) -> Result<Arc<Writers>> {
    let refused = |message: String| Error::new(Kind::InvalidArgument, message).tensor(&*tensor.name);
    let missing = || refused(format!("the save has no layout {}", tensor.layout));
    let layout = request.layouts.get(tensor.layout).ok_or_else(missing)?;
    if let Some(misfit) = layout.misfit(&tensor.shape, request.ranks) {
        return Err(refused(misfit));
    }
    let regions = Regions::new(layout, &tensor.shape, tensor.dtype.item_bytes(), request.ranks);
    Ok(Arc::new(Writers::new(regions, request.run_bytes_min)))
}

/// Returns the number of bytes of a range.
fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}
