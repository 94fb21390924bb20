//! Saves by groups of ranks, and the part of one rank.

use super::calls::{answer, encode, parse, unknown};
use super::ffi;
use super::guard::{guard, guard_with_log};
use super::ranks::{ExchangePlan, outside, rank_range};
use super::save::decode_extents;
use super::tensor::device_stream;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::layout;
use crate::num::to_u64;
use crate::options::Options;
use crate::os::mutex::Mutex;
use crate::ranks::save::{self, Layout, RankPlan, RankWindow, SaveRequest, SaveTensor, WRITE_BYTES_MAX, run_bytes_min};
use crate::save::direct_file::ALIGNMENT;
use crate::save::output;
use crate::save::ranks_save::{self, SentPart};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Upper bound for the header of a file, in bytes.
const HEADER_BYTES_MAX: u64 = 100 << 20;

/// Plan that is identical on all ranks of a group.
pub(super) struct SavePlan {
    plan: Arc<save::SavePlan>,
    names: Vec<String>,
    /// Work of the rank that was asked for last.
    work: Mutex<Option<Arc<RankPlan>>>,
}

/// Request for a plan, without the numbers of layouts and tensors.
#[derive(Deserialize)]
struct PlanRequest {
    /// Names of the tensors.
    names: Vec<String>,
    /// Metadata of each file. An empty object is left out.
    metadata: Vec<BTreeMap<String, String>>,
    ranks: i64,
    window_bytes: i64,
    /// Whether the files are objects. A block, which has one writer, is a part of an object then.
    has_parts: bool,
}

/// Plans a save. `numbers` has the layouts as [`Layout::decode_all`] takes them, and for each tensor the index of its
/// file, its dtype as a value of `c10::ScalarType`, the index of its layout, the number of dimensions and the
/// sizes of the full tensor. Blocks belong to local files, or are parts of objects.
pub(super) fn plan_save(numbers: &[i64], request: &str) -> Result<Box<SavePlan>> {
    guard_with_log(|| {
        let PlanRequest { names, metadata, ranks, window_bytes, has_parts } = parse(request)?;
        let invalid = |message: String| Error::new(Kind::InvalidArgument, message);
        let size = |number: i64, name: &str| {
            u64::try_from(number).map_err(|_| invalid(format!("{name} is {number}; it cannot be negative")))
        };
        let (layouts, tensors) = decode(&names, numbers)?;
        let files: Vec<_> = metadata.into_iter().map(|file| (!file.is_empty()).then_some(file)).collect();
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
        Ok(Box::new(SavePlan { plan, names, work: Mutex::default() }))
    })
}

/// Decodes layouts and tensors.
fn decode(names: &[String], numbers: &[i64]) -> Result<(Vec<Layout>, Vec<SaveTensor>)> {
    let incomplete = || Error::new(Kind::InvalidArgument, "the numbers of a save are incomplete or negative");
    let index = |number: i64| usize::try_from(number).map_err(|_| incomplete());
    let (layouts, mut rest) = Layout::decode_all(numbers)?;
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

impl ExchangePlan for SavePlan {
    fn ranks(&self) -> usize {
        self.plan.ranks()
    }

    fn windows(&self) -> usize {
        self.plan.windows()
    }

    fn traffic(&self, rank: usize, window: usize) -> (&'static str, Vec<u64>, Vec<u64>) {
        let ranks = self.plan.ranks();
        let work = self.work(rank);
        let (sent, received) = work.windows.get(window).map_or_else(Default::default, |window| window.splits(ranks));
        (if ranks == 1 { "none" } else { "exchange" }, sent, received)
    }

    fn digest(&self) -> u64 {
        self.plan.digest()
    }
}

impl SavePlan {
    /// Calls a method without tensors.
    pub(super) fn call(&self, method: &str, request: &str) -> Result<String> {
        answer(|_| match method {
            // Returns the length of each file.
            "file_bytes" => {
                let files = (0..self.plan.files()).filter_map(|file| self.plan.file(file));
                encode(&files.map(|file| file.file_bytes()).collect::<Vec<_>>())
            }
            // Returns whether a file has digests, so that a rank returns hashes.
            "has_digests" => encode(&self.plan.has_digests()),
            // Returns the elements of each local tensor that a rank writes or sends, in row-major order: the first one, and
            // their count.
            "used_elements" => {
                let tensors = self.rank_tensors(self.rank(parse(request)?)?);
                encode(&tensors.iter().map(|tensor| (tensor.first, tensor.count)).collect::<Vec<_>>())
            }
            _ => self.call_plan(method, request),
        })
    }

    /// Returns the local tensors of a rank.
    pub(super) fn local_tensors(&self, rank: i64) -> Result<Vec<ffi::LocalTensor>> {
        guard(|| Ok(self.rank_tensors(self.rank(rank)?)))
    }

    fn rank_tensors(&self, rank: usize) -> Vec<ffi::LocalTensor> {
        let used = self.work(rank).used_ranges(self.plan.tensors());
        let tensor = |(index, range): (usize, Range<u64>)| {
            let dtype = self.plan.dtype(index);
            let elements = |bytes: u64| signed(bytes / dtype.map_or(1, Dtype::item_bytes).max(1));
            let shape = self.plan.local_shape(index, rank);
            ffi::LocalTensor {
                name: self.names.get(index).cloned().unwrap_or_default(),
                scalar_type: dtype.and_then(Dtype::scalar_type).unwrap_or(-1),
                is_held: shape.is_some(),
                shape: shape.unwrap_or_default().into_iter().map(signed).collect(),
                first: elements(range.start),
                count: elements(range.end - range.start),
            }
        };
        used.into_iter().enumerate().map(tensor).collect()
    }

    fn work(&self, rank: usize) -> Arc<RankPlan> {
        let mut work = self.work.lock();
        match &*work {
            Some(work) if work.rank == rank => Arc::clone(work),
            _ => Arc::clone(work.insert(Arc::new(self.plan.rank_plan(rank)))),
        }
    }
}

/// Save of one rank in progress.
pub(super) struct RankSave {
    /// `None` once it is finished.
    save: Option<ranks_save::RankSave>,
    plan: Arc<save::SavePlan>,
    work: Arc<RankPlan>,
}

pub(super) fn open_ranks_save(
    plan: &SavePlan,
    rank: i64,
    paths: &[String],
    uploads: &[String],
    streams: &[ffi::DeviceStream],
) -> Result<Box<RankSave>> {
    guard(|| {
        let work = plan.work(plan.rank(rank)?);
        let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
        let streams = streams.iter().map(device_stream).collect::<Result<_>>()?;
        let plan = Arc::clone(&plan.plan);
        let options = Options::from_env()?;
        let save =
            ranks_save::RankSave::open(Arc::clone(&plan), Arc::clone(&work), &paths, uploads, streams, &options)?;
        Ok(Box::new(RankSave { save: Some(save), plan, work }))
    })
}

impl RankSave {
    /// Returns the bytes of local tensors that the rank sends in a window. They are one after the other in the send buffer.
    pub(super) fn sends(&self, window: i64) -> Result<Vec<ffi::RankRange>> {
        let send = |send: &save::Send| rank_range(send.tensor, 0, send.range.clone(), Some(send.offset));
        guard(|| Ok(self.window(window)?.sends.iter().map(send).collect()))
    }

    /// Returns the bytes that the rank writes in a window: from local tensors, and from the receive buffer. The item
    /// of each is the index of its range of a file.
    pub(super) fn sources(&self, window: i64) -> Result<Vec<ffi::RankRange>> {
        guard(|| {
            let RankWindow { writes, sources, .. } = self.window(window)?;
            let of_write = |(item, write): (usize, &save::Write)| {
                let of_write = sources.get(write.sources.clone()).unwrap_or_default();
                of_write.iter().map(move |source| ffi::RankRange {
                    is_contiguous: self.plan.is_contiguous(source),
                    ..rank_range(source.tensor, item, source.local.clone(), source.received)
                })
            };
            Ok(writes.iter().enumerate().flat_map(of_write).collect())
        })
    }

    /// Writes the ranges `begin` to `end` of a window, or those up to its last.
    ///
    /// # Safety
    /// The caller meets the conditions of [`ranks_save::RankSave::write`].
    pub(super) unsafe fn write(&self, window: i64, begin: usize, end: usize, sources: &[ffi::Extent]) -> Result<()> {
        guard(|| {
            let ranges = begin..end.min(self.window(window)?.writes.len());
            let window = usize::try_from(window).unwrap_or(usize::MAX);
            // SAFETY: the caller's promise is the same.
            unsafe { self.save.as_ref().ok_or_else(finished)?.write(window, ranges, &decode_extents(sources)) }
        })
    }

    /// Calls a method without tensors.
    pub(super) fn call(&mut self, method: &str, request: &str) -> Result<String> {
        answer(|_| match method {
            // Returns the hashes of what the rank has written, in Base64. Empty if no file has digests.
            "hashes" => encode(&STANDARD.encode(self.save.as_ref().ok_or_else(finished)?.hashes()?)),
            // Writes the headers of files with digests, given the hashes of all other ranks. Only the first rank does so.
            "seal" => {
                let invalid = |_| Error::new(Kind::InvalidArgument, "the hashes of a rank are not Base64");
                let decode = |hashes: &String| STANDARD.decode(hashes).map_err(invalid);
                let hashes = parse::<Vec<String>>(request)?.iter().map(decode).collect::<Result<Vec<_>>>()?;
                encode(&self.save.as_mut().ok_or_else(finished)?.seal(&hashes.concat())?)
            }
            // Flushes what the rank has written, and closes the files. Returns the parts of objects that it has sent: the
            // file, the index and the id of each.
            "finish" => {
                let parts = self.save.take().ok_or_else(finished)?.finish()?.into_iter();
                encode(&parts.map(|SentPart { file, index, id }| (file, index, id)).collect::<Vec<_>>())
            }
            _ => Err(unknown(method)),
        })
    }

    fn window(&self, window: i64) -> Result<&RankWindow> {
        self.save.as_ref().ok_or_else(finished)?;
        let windows = &self.work.windows;
        let found = usize::try_from(window).ok().and_then(|window| windows.get(window));
        found.ok_or_else(|| outside("window", window, windows.len(), "the plan"))
    }
}

fn finished() -> Error {
    Error::new(Kind::InvalidArgument, "the save is finished; create a new one")
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
