//! Saves by groups of ranks, and the part of one rank.

use super::ffi;
use super::guard::{guard, guard_with_log};
use super::save::decode_extents;
use super::tensor::{device_stream, metadata_of};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::layout;
use crate::group::save::{self, Layout, RankPlan, RankWindow, SaveRequest, SaveTensor, WRITE_BYTES_MAX, run_bytes_min};
use crate::num::to_u64;
use crate::options::Options;
use crate::save::direct_file::ALIGNMENT;
use crate::save::output;
use crate::save::rank_save::{self, SentPart};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Upper bound for the header of a file, in bytes.
const HEADER_BYTES_MAX: u64 = 100 << 20;

/// Plan that is identical on all ranks of a group.
pub(super) struct SavePlan {
    plan: Arc<save::SavePlan>,
    names: Vec<String>,
    /// Work of the rank that was asked for last.
    work: Mutex<Option<Arc<RankPlan>>>,
}

/// Plans a save. `numbers` has the count of layouts, the layouts as [`Layout::decode`] takes them, and for each tensor the
/// index of its file, its dtype as a value of `c10::ScalarType`, the index of its layout, the number of dimensions and the
/// sizes of the full tensor. Blocks are those of local files, or parts of objects.
pub(super) fn plan_save(
    names: &[String],
    numbers: &[i64],
    metadata: &[ffi::NewMetadata],
    ranks: i64,
    window_bytes: i64,
    has_parts: bool,
) -> Result<Box<SavePlan>> {
    guard_with_log(|| {
        let invalid = |message: String| Error::new(Kind::InvalidArgument, message);
        let size = |number: i64, name: &str| {
            u64::try_from(number).map_err(|_| invalid(format!("{name} is {number}; it cannot be negative")))
        };
        let (layouts, tensors) = decode(names, numbers)?;
        let files: Vec<_> = metadata.iter().map(|file| metadata_of(&file.entries, !file.entries.is_empty())).collect();
        let mut largest = vec![HEADER_BYTES_MAX; files.len()];
        for tensor in &tensors {
            if let Some(bytes) = largest.get_mut(tensor.file) {
                let elements = tensor.shape.iter().fold(1_u64, |product, &size| product.saturating_mul(size));
                *bytes = bytes.saturating_add(elements.saturating_mul(tensor.dtype.item_bytes()));
            }
        }
        let sum = largest.iter().fold(0_u64, |sum, &bytes| sum.saturating_add(bytes - HEADER_BYTES_MAX));
        let largest = largest.into_iter().max().unwrap_or_default();
        let request_bytes = Options::from_env()?.request_bytes;
        let part_bytes = has_parts.then(|| output::part_bytes(largest, request_bytes));
        let request = SaveRequest {
            run_bytes_min: run_bytes_min(&files, sum),
            write_bytes_max: WRITE_BYTES_MAX,
            files,
            layouts,
            tensors,
            ranks: usize::try_from(ranks).map_err(|_| invalid(format!("the group has {ranks} ranks")))?,
            window_bytes: size(window_bytes, "window_bytes")?,
            block_bytes: to_u64(part_bytes.unwrap_or(ALIGNMENT)),
        };
        let plan = Arc::new(save::SavePlan::new(&request)?);
        Ok(Box::new(SavePlan { plan, names: names.to_vec(), work: Mutex::default() }))
    })
}

/// Decodes layouts and tensors.
fn decode(names: &[String], numbers: &[i64]) -> Result<(Vec<Layout>, Vec<SaveTensor>)> {
    let incomplete = || Error::new(Kind::InvalidArgument, "the numbers of a save are incomplete or negative");
    let index = |number: i64| usize::try_from(number).map_err(|_| incomplete());
    let (&count, mut rest) = numbers.split_first().ok_or_else(incomplete)?;
    let mut layouts = Vec::new();
    for _ in 0..count {
        let (layout, used) = Layout::decode(rest)?;
        layouts.push(layout);
        rest = rest.get(used..).ok_or_else(incomplete)?;
    }
    let mut tensors = Vec::with_capacity(names.len());
    for name in names {
        let [file, scalar_type, layout, ndim, sizes @ ..] = rest else { return Err(incomplete()) };
        let (sizes, after) = sizes.split_at_checked(index(*ndim)?).ok_or_else(incomplete)?;
        let dtype = i8::try_from(*scalar_type).ok().and_then(Dtype::from_scalar_type);
        tensors.push(SaveTensor {
            name: name.clone(),
            dtype: layout::dtype_of_file(name, dtype)?,
            shape: sizes.iter().map(|&size| u64::try_from(size).map_err(|_| incomplete())).collect::<Result<_>>()?,
            file: index(*file)?,
            layout: index(*layout)?,
        });
        rest = after;
    }
    if rest.is_empty() { Ok((layouts, tensors)) } else { Err(incomplete()) }
}

impl SavePlan {
    pub(super) fn ranks(&self) -> usize {
        self.plan.ranks()
    }

    pub(super) fn windows(&self) -> usize {
        self.plan.windows()
    }

    pub(super) fn tensors(&self) -> usize {
        self.plan.tensors()
    }

    pub(super) fn tensor_name(&self, tensor: usize) -> String {
        self.names.get(tensor).cloned().unwrap_or_default()
    }

    /// Returns the dtype of a tensor in its file as a value of `c10::ScalarType`.
    pub(super) fn scalar_type(&self, tensor: usize) -> i8 {
        self.plan.dtype(tensor).and_then(Dtype::scalar_type).unwrap_or(-1)
    }

    /// Returns whether a rank has elements of a tensor.
    pub(super) fn holds(&self, tensor: usize, rank: usize) -> bool {
        self.plan.local_shape(tensor, rank).is_some()
    }

    pub(super) fn local_shape(&self, tensor: usize, rank: usize) -> Vec<i64> {
        self.plan.local_shape(tensor, rank).unwrap_or_default().into_iter().map(signed).collect()
    }

    /// Returns the range of each local tensor that a rank writes or sends, as its first byte and its length.
    pub(super) fn used_ranges(&self, rank: usize) -> Vec<i64> {
        let ranges = self.work(rank).used_ranges(self.plan.tensors());
        ranges.into_iter().flat_map(|range| [signed(range.start), signed(range.end - range.start)]).collect()
    }

    pub(super) fn file_bytes(&self) -> Vec<i64> {
        (0..self.plan.files()).filter_map(|file| self.plan.file(file)).map(|file| signed(file.file_bytes())).collect()
    }

    pub(super) fn send_splits(&self, rank: usize, window: usize) -> Vec<i64> {
        self.splits(rank, window).0.into_iter().map(signed).collect()
    }

    pub(super) fn receive_splits(&self, rank: usize, window: usize) -> Vec<i64> {
        self.splits(rank, window).1.into_iter().map(signed).collect()
    }

    /// Returns whether a file has digests, so that [`RankSave::hashes`] returns some.
    pub(super) fn has_digests(&self) -> bool {
        self.plan.has_digests()
    }

    pub(super) fn digest(&self) -> u64 {
        self.plan.digest()
    }

    fn splits(&self, rank: usize, window: usize) -> (Vec<u64>, Vec<u64>) {
        let work = self.work(rank);
        work.windows.get(window).map_or_else(Default::default, |window| window.splits(self.plan.ranks()))
    }

    fn work(&self, rank: usize) -> Arc<RankPlan> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        match &*work {
            Some(work) if work.rank == rank => Arc::clone(work),
            _ => Arc::clone(work.insert(Arc::new(self.plan.rank_plan(rank)))),
        }
    }
}

/// Save of one rank in progress.
pub(super) struct RankSave {
    save: rank_save::RankSave,
    plan: Arc<save::SavePlan>,
    work: Arc<RankPlan>,
}

pub(super) fn open_rank_save(
    plan: &SavePlan,
    rank: usize,
    paths: &[String],
    uploads: &[String],
    streams: &[ffi::DeviceStream],
) -> Result<Box<RankSave>> {
    guard(|| {
        let work = plan.work(rank);
        let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
        let streams = streams.iter().map(device_stream).collect::<Result<_>>()?;
        let plan = Arc::clone(&plan.plan);
        let options = Options::from_env()?;
        let save = rank_save::RankSave::open(Arc::clone(&plan), Arc::clone(&work), &paths, uploads, streams, &options)?;
        Ok(Box::new(RankSave { save, plan, work }))
    })
}

impl RankSave {
    pub(super) fn sends(&self, window: usize) -> Vec<ffi::SaveSend> {
        let send = |send: &save::Send| ffi::SaveSend {
            tensor: send.tensor,
            begin: send.range.start,
            end: send.range.end,
            offset: send.offset,
        };
        self.window(window).map_or_else(Vec::new, |window| window.sends.iter().map(send).collect())
    }

    pub(super) fn sources(&self, window: usize) -> Vec<ffi::SaveSource> {
        let source = |source: &save::Source| ffi::SaveSource {
            tensor: source.tensor,
            begin: source.local.start,
            end: source.local.end,
            is_received: source.received.is_some(),
            offset: source.received.unwrap_or(0),
            is_contiguous: self.plan.is_contiguous(source),
        };
        self.window(window).map_or_else(Vec::new, |window| window.sources.iter().map(source).collect())
    }

    /// Returns the number of sources of each range that the rank writes in a window.
    pub(super) fn source_counts(&self, window: usize) -> Vec<usize> {
        let counts = |window: &RankWindow| window.writes.iter().map(|write| write.sources.len()).collect();
        self.window(window).map_or_else(Vec::new, counts)
    }

    /// Writes `count` ranges of a window, from the range `first` on.
    ///
    /// # Safety
    /// That of [`rank_save::RankSave::write`].
    pub(super) unsafe fn write(
        &self,
        window: usize,
        first: usize,
        count: usize,
        sources: &[ffi::Extent],
    ) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        guard(|| unsafe { self.save.write(window, first..first.saturating_add(count), &decode_extents(sources)) })
    }

    /// Returns the hashes of what the rank has written.
    pub(super) fn hashes(&self) -> Result<Vec<u8>> {
        guard(|| self.save.hashes())
    }

    /// Writes the headers of files with digests, given the hashes of all other ranks, one after the other.
    pub(super) fn seal(&mut self, hashes: &[u8]) -> Result<()> {
        guard(|| self.save.seal(hashes))
    }

    fn window(&self, window: usize) -> Option<&RankWindow> {
        self.work.windows.get(window)
    }
}

pub(super) fn finish_rank_save(save: Box<RankSave>) -> Result<Vec<ffi::SentPart>> {
    guard(|| {
        let part = |SentPart { file, index, id }: SentPart| ffi::SentPart { file, index, id };
        Ok(save.save.finish()?.into_iter().map(part).collect())
    })
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
