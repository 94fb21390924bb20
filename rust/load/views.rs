//! Which tensors need no copy on the CPU: those that can be used where they
//! lie in a mapped file.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::options::Options;
use crate::profile::{self, Stage};
use crate::reader::mmap::Mapping;
use crate::reader::{self, ChosenReader, MemoryKind, ReaderKind, read_ahead};
use crate::source::Source;
use serde_json::json;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::{Arc, Mutex, TryLockError};

/// The mappings that loads of one checkpoint share. No byte of a mapping is lent twice, since two tensors of which
/// changing one changed the other would be one tensor.
#[derive(Default)]
pub struct Mappings {
    files: Mutex<BTreeMap<usize, LentRanges>>,
}

/// What is lent of a mapping: for each range its end.
struct LentRanges {
    mapping: Arc<Mapping>,
    ends: BTreeMap<u64, u64>,
}

/// Keeps a mapping for one view, and gives back the view's pages when it goes.
pub struct ViewGuard {
    mapping: Arc<Mapping>,
    range: Range<u64>,
}

impl Drop for ViewGuard {
    fn drop(&mut self) {
        // The last one takes the whole mapping with it.
        if Arc::strong_count(&self.mapping) > 1 {
            // SAFETY: the view is gone, and nobody else was lent its bytes.
            unsafe { self.mapping.forget(&self.range) };
        }
    }
}

impl Mappings {
    /// A mapping of the file with this index, of which nobody has these ranges. They are in the order of the file, and
    /// share no byte.
    fn lend(&self, index: usize, source: &Source, ranges: &[(usize, Range<u64>)]) -> Result<Arc<Mapping>> {
        let mut files = match self.files.try_lock() {
            Ok(files) => files,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // A child whose parent forked while another thread was here would wait for ever.
            Err(TryLockError::WouldBlock) => return Ok(Arc::new(Mapping::open(source)?)),
        };
        let is_free = |lent: &LentRanges| ranges.iter().all(|(_, range)| lent.is_free(range));
        let new_mapping = || Ok(LentRanges { mapping: Arc::new(Mapping::open(source)?), ends: BTreeMap::new() });
        let lent = match files.entry(index) {
            Entry::Vacant(vacant) => vacant.insert(new_mapping()?),
            Entry::Occupied(mut occupied) => {
                if !is_free(occupied.get()) {
                    occupied.insert(new_mapping()?);
                }
                occupied.into_mut()
            }
        };
        lent.ends.extend(ranges.iter().map(|(_, range)| (range.start, range.end)));
        Ok(Arc::clone(&lent.mapping))
    }
}

impl LentRanges {
    fn is_free(&self, range: &Range<u64>) -> bool {
        self.ends.range(..range.end).next_back().is_none_or(|(_, &end)| end <= range.start)
    }
}

/// For each wanted tensor its place in a mapping, or none if it has to be read.
pub struct Views {
    ranges: Vec<Option<MappedRange>>,
}

/// Where a view lies.
struct MappedRange {
    mapping: Arc<Mapping>,
    range: Range<u64>,
}

/// A file that views are wanted of.
struct File {
    chosen: ChosenReader,
    views: Vec<(usize, Range<u64>)>,
}

impl Views {
    /// Maps the files of tensors that can be views: those that are wanted with the dtype of the file, lie there in
    /// one piece and aligned, in a file that may be mapped.
    ///
    /// # Errors
    /// `io` where a file cannot be mapped.
    pub fn open(
        checkpoint: &Checkpoint,
        mappings: &Mappings,
        regions: &[TensorRegion],
        dtypes: &[Option<Dtype>],
        options: &Options,
    ) -> Result<Views> {
        checkpoint.check_headers(regions.iter().map(|tensor| tensor.source))?;
        let mut files: BTreeMap<usize, File> = BTreeMap::new();
        for (tensor, (region, dtype)) in regions.iter().zip(dtypes).enumerate() {
            let Some(range) = viewable(region).filter(|_| *dtype == Some(region.dtype)) else { continue };
            let file = match files.entry(region.source) {
                Entry::Occupied(file) => file.into_mut(),
                Entry::Vacant(vacant) => {
                    let chosen = reader::choose(options, checkpoint.source(region.source)?, MemoryKind::NewHostMemory)?;
                    vacant.insert(File { chosen, views: Vec::new() })
                }
            };
            if file.chosen.kind == ReaderKind::Mmap {
                file.views.push((tensor, range));
            }
        }
        let mut views = Views { ranges: regions.iter().map(|_| None).collect() };
        for (&index, file) in &mut files {
            if !file.views.is_empty() {
                let source = checkpoint.source(index)?;
                file.chosen.log(source);
                views.map(index, source, mappings, &mut file.views)?;
            }
        }
        Ok(views)
    }

    /// Where a tensor lies, if it is a view.
    pub fn address(&self, tensor: usize) -> Option<u64> {
        self.ranges.get(tensor)?.as_ref().and_then(|mapped| mapped.mapping.address(mapped.range.start))
    }

    /// What keeps the bytes of a view for as long as it lives.
    ///
    /// # Errors
    /// `internal` where the tensor is no view.
    pub fn guard(&self, tensor: usize) -> Result<ViewGuard> {
        let none = || Error::new(Kind::Internal, format!("tensor {tensor} is no view"));
        let mapped = self.ranges.get(tensor).and_then(Option::as_ref).ok_or_else(none)?;
        Ok(ViewGuard { mapping: Arc::clone(&mapped.mapping), range: mapped.range.clone() })
    }

    /// Gives the views of a file their places. Bytes that are wanted twice are a view once, and the second is read.
    fn map(
        &mut self,
        index: usize,
        source: &Arc<Source>,
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
        let mapping = mappings.lend(index, source, views)?;
        drop(span);
        read_ahead::start(source, &mapping, views.iter().map(|(_, range)| range.clone()));
        for (tensor, range) in views.drain(..) {
            if let Some(mapped) = self.ranges.get_mut(tensor) {
                *mapped = Some(MappedRange { mapping: Arc::clone(&mapping), range });
            }
        }
        Ok(())
    }
}

/// The bytes of a tensor that can be used where it lies: in one piece, and aligned as its elements need it.
fn viewable(region: &TensorRegion) -> Option<Range<u64>> {
    let is_aligned = |range: &Range<u64>| range.start.is_multiple_of(region.dtype.item_bytes());
    region.contiguous().filter(|range| !range.is_empty() && is_aligned(range))
}
