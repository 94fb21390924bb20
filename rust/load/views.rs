//! Views of mapped files: CPU tensors that are used in place, without a copy.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::checkpoint::verify::{Cover, Coverage, Input};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::load::check;
use crate::num::to_u64;
use crate::options::Options;
use crate::os::local_file::LocalFile;
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use crate::profile::{self, Stage};
use crate::reader::mmap::Mapping;
use crate::reader::{self, Access, ChosenReader, ReaderKind, read_ahead};
use crate::source::Source;
use serde_json::json;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::Range;
use std::sync::Arc;

/// Mappings that the loads of one checkpoint share.
///
/// Each byte of a mapping backs at most one tensor, because a write to one tensor must not change another. A second
/// request for the same tensor creates a new mapping.
pub struct Mappings {
    files: PerProcess<Mutex<BTreeMap<usize, LentRanges>>>,
}

impl Default for Mappings {
    fn default() -> Self {
        Mappings { files: PerProcess::new(Mutex::default) }
    }
}

/// Mapping and its borrowed ranges.
struct LentRanges {
    mapping: Arc<Mapping>,
    /// End of each range, by its beginning.
    ends: BTreeMap<u64, u64>,
}

/// Guard of one view. Keeps its mapping alive, and drops the pages of the view when it is dropped.
pub struct ViewGuard {
    mapping: Arc<Mapping>,
    range: Range<u64>,
}

impl Drop for ViewGuard {
    fn drop(&mut self) {
        // The last guard drops the whole mapping.
        if Arc::strong_count(&self.mapping) > 1 {
            // SAFETY: the view is gone, and no other view has its bytes.
            unsafe { self.mapping.forget(&self.range) };
        }
    }
}

impl Mappings {
    /// Borrows ranges of a file, which are sorted and disjoint, from a mapping in which they are free. Also returns
    /// whether the first of them follows one that was borrowed before. Returns `None` without such a mapping.
    fn lend(
        &self,
        index: usize,
        source: &LocalFile,
        ranges: &[(usize, Range<u64>)],
    ) -> Result<Option<(Arc<Mapping>, bool)>> {
        let mut files = self.files.get().lock();
        let is_free = |lent: &LentRanges| ranges.iter().all(|(_, range)| lent.is_free(range));
        if !files.get(&index).is_some_and(is_free) {
            let Some(mapping) = Mapping::open(source)? else { return Ok(None) };
            files.insert(index, LentRanges { mapping: Arc::new(mapping), ends: BTreeMap::new() });
        }
        let Some(lent) = files.get_mut(&index) else { return Ok(None) };
        let is_sequential = ranges.first().is_some_and(|(_, range)| lent.has_end_near(range.start));
        lent.ends.extend(ranges.iter().map(|(_, range)| (range.start, range.end)));
        Ok(Some((Arc::clone(&lent.mapping), is_sequential)))
    }
}

/// Largest distance between ranges that are used one after the other, in bytes. The kernel reads at least so far ahead.
const NEAR_BYTES: u64 = 128 << 10;

impl LentRanges {
    fn has_end_near(&self, begin: u64) -> bool {
        self.ends.range(..begin).next_back().is_some_and(|(_, &end)| begin - end <= NEAR_BYTES)
    }

    fn is_free(&self, range: &Range<u64>) -> bool {
        self.ends.range(..range.end).next_back().is_none_or(|(_, &end)| end <= range.start)
    }
}

/// Views among the regions of a load.
pub struct Views {
    /// Mapped range of each region, or `None` if the region has to be read.
    ranges: Vec<Option<MappedRange>>,
    /// Inputs of views whose digests were not compared yet.
    unverified: Mutex<BTreeMap<usize, Input>>,
    /// Digests that cover each region, if the checkpoint is to be verified.
    covers: Vec<Cover>,
    sources: Vec<Source>,
    options: Options,
}

/// Range of a mapping.
struct MappedRange {
    mapping: Arc<Mapping>,
    range: Range<u64>,
}

/// File with the regions that may be views of it.
struct File {
    chosen: ChosenReader,
    views: Vec<(usize, Range<u64>)>,
}

impl Views {
    /// Maps the files of regions that can be views.
    ///
    /// Such a region is contiguous and aligned in a file that may be mapped, and requested with the dtype that it has
    /// there.
    ///
    /// # Errors
    /// `io` if a file has become shorter; the errors of [`Checkpoint::coverage`].
    pub fn open(
        checkpoint: &Checkpoint,
        mappings: &Mappings,
        regions: &[TensorRegion],
        dtypes: &[Option<Dtype>],
        options: &Options,
    ) -> Result<Views> {
        checkpoint.check_due()?;
        checkpoint.check_headers(regions.iter().map(|tensor| tensor.source))?;
        let (inputs, covers) =
            checkpoint.coverage(regions)?.map(|Coverage { inputs, covers, .. }| (inputs, covers)).unwrap_or_default();
        let mut files: BTreeMap<usize, File> = BTreeMap::new();
        for (tensor, (region, dtype)) in regions.iter().zip(dtypes).enumerate() {
            // A transfer compares groups while it reads them, so that nothing reads them a second time.
            let is_grouped = covers.get(tensor) == Some(&Cover::Groups);
            let Some(range) = viewable(region).filter(|_| *dtype == Some(region.dtype) && !is_grouped) else {
                continue;
            };
            let file = match files.entry(region.source) {
                Entry::Occupied(file) => file.into_mut(),
                Entry::Vacant(vacant) => {
                    let chosen = reader::choose(options, checkpoint.source(region.source)?, Access::View)?;
                    vacant.insert(File { chosen, views: Vec::new() })
                }
            };
            if file.chosen.kind == ReaderKind::Mmap {
                file.views.push((tensor, range));
            }
        }
        let mut views = Views {
            ranges: regions.iter().map(|_| None).collect(),
            unverified: Mutex::default(),
            covers,
            sources: checkpoint.sources().cloned().collect(),
            options: options.clone(),
        };
        for (&index, file) in &mut files {
            // The digest of a whole file is compared either for its views or by a transfer.
            let view_bytes: u64 = file.views.iter().map(|(_, range)| range.end - range.start).sum();
            let of_file = inputs.iter().find(|input| input.tensor.is_none() && input.source == index);
            let is_divided = of_file.is_some_and(|input| view_bytes + to_u64(input.header.len()) != input.end);
            if !file.views.is_empty() && !is_divided {
                let source = checkpoint.source(index)?;
                file.chosen.log(source);
                if let Some(local) = source.file() {
                    views.map(index, local, mappings, &mut file.views)?;
                }
            }
        }
        let viewed: BTreeSet<usize> = views
            .ranges
            .iter()
            .zip(&views.covers)
            .filter_map(|(range, cover)| range.as_ref().and(cover.input()))
            .collect();
        let inputs = inputs.into_iter().enumerate().filter(|(index, _)| viewed.contains(index));
        views.unverified = Mutex::new(inputs.collect());
        Ok(views)
    }

    /// Compares the digests of all views that were not compared yet.
    ///
    /// # Errors
    /// The errors of [`check::differences`]; `integrity` for the first difference.
    pub fn verify(&self) -> Result<()> {
        let unverified = mem::take(&mut *self.unverified.lock());
        self.verify_inputs(unverified.into_values().collect())
    }

    /// Returns the address of a region, or `None` if it is not a view.
    pub fn address(&self, tensor: usize) -> Option<u64> {
        self.ranges.get(tensor)?.as_ref().and_then(|mapped| mapped.mapping.address(mapped.range.start))
    }

    /// Returns the guard that keeps the bytes of a view alive, after it has compared their digest.
    pub fn guard(&self, tensor: usize) -> Result<ViewGuard> {
        let due = {
            let mut unverified = self.unverified.lock();
            self.covers.get(tensor).and_then(|cover| unverified.remove(&cover.input()?))
        };
        self.verify_inputs(due.into_iter().collect())?;
        let none = || Error::new(Kind::Internal, format!("tensor {tensor} is not a view"));
        let mapped = self.ranges.get(tensor).and_then(Option::as_ref).ok_or_else(none)?;
        Ok(ViewGuard { mapping: Arc::clone(&mapped.mapping), range: mapped.range.clone() })
    }

    fn verify_inputs(&self, inputs: Vec<Input>) -> Result<()> {
        if inputs.is_empty() { Ok(()) } else { check::first(check::differences(&self.sources, inputs, &self.options)?) }
    }

    /// Maps the views of a file, if it can be mapped. Of views that overlap, the first is mapped and the others are read.
    fn map(
        &mut self,
        index: usize,
        source: &Arc<LocalFile>,
        mappings: &Mappings,
        views: &mut Vec<(usize, Range<u64>)>,
    ) -> Result<()> {
        views.sort_by_key(|(_, range)| range.start);
        let mut reached = 0;
        views.retain(|(_, range)| {
            let is_first = range.start >= reached;
            reached = reached.max(range.end);
            is_first
        });
        let bytes: u64 = views.iter().map(|(_, range)| range.end - range.start).sum();
        let detail = || json!({ "path": source.path.to_string_lossy(), "reader": ReaderKind::Mmap.name() }).into();
        let span = profile::span(Stage::Map).bytes(bytes).detail(detail);
        let lent = mappings.lend(index, source, views)?;
        drop(span);
        let Some((mapping, is_sequential)) = lent else { return Ok(()) };
        read_ahead::start(source, &mapping, views.iter().map(|(_, range)| range.clone()), is_sequential);
        for (tensor, range) in views.drain(..) {
            if let Some(mapped) = self.ranges.get_mut(tensor) {
                *mapped = Some(MappedRange { mapping: Arc::clone(&mapping), range });
            }
        }
        Ok(())
    }
}

/// Returns the bytes of a region that is contiguous and aligned for its dtype in the file.
fn viewable(region: &TensorRegion) -> Option<Range<u64>> {
    let is_aligned = |range: &Range<u64>| range.start.is_multiple_of(region.dtype.item_bytes());
    region.contiguous().filter(|range| !range.is_empty() && is_aligned(range))
}
