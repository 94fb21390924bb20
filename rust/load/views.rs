//! Which tensors need no copy on the CPU: those that can be used where they
//! lie in a mapped file.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::Wanted;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::options::Options;
use crate::profile::{self, Stage};
use crate::reader::mmap::Mapping;
use crate::reader::{self, Chosen, ReaderKind, Target, read_ahead};
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
    files: Mutex<BTreeMap<usize, Lent>>,
}

/// What is lent of a mapping: for each range its end.
struct Lent {
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
        let is_free = |lent: &Lent| ranges.iter().all(|(_, range)| lent.is_free(range));
        let fresh = || Ok(Lent { mapping: Arc::new(Mapping::open(source)?), ends: BTreeMap::new() });
        let lent = match files.entry(index) {
            Entry::Vacant(place) => place.insert(fresh()?),
            Entry::Occupied(mut place) => {
                if !is_free(place.get()) {
                    place.insert(fresh()?);
                }
                place.into_mut()
            }
        };
        lent.ends.extend(ranges.iter().map(|(_, range)| (range.start, range.end)));
        Ok(Arc::clone(&lent.mapping))
    }
}

impl Lent {
    fn is_free(&self, range: &Range<u64>) -> bool {
        self.ends.range(..range.end).next_back().is_none_or(|(_, &end)| end <= range.start)
    }
}

/// For each wanted tensor its place in a mapping, or none if it has to be read.
pub struct Views {
    places: Vec<Option<Place>>,
}

/// Where a view lies.
struct Place {
    mapping: Arc<Mapping>,
    range: Range<u64>,
}

/// A file that views are wanted of.
struct File {
    chosen: Chosen,
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
        wanted: &[Wanted],
        dtypes: &[Option<Dtype>],
        options: &Options,
    ) -> Result<Views> {
        checkpoint.check_headers(wanted.iter().map(|tensor| tensor.source))?;
        let mut files: BTreeMap<usize, File> = BTreeMap::new();
        for (tensor, (wanted, dtype)) in wanted.iter().zip(dtypes).enumerate() {
            let Some(range) = viewable(wanted).filter(|_| *dtype == Some(wanted.dtype)) else { continue };
            let file = match files.entry(wanted.source) {
                Entry::Occupied(file) => file.into_mut(),
                Entry::Vacant(place) => {
                    let chosen = reader::choose(options, checkpoint.source(wanted.source)?, Target::NewHostMemory)?;
                    place.insert(File { chosen, views: Vec::new() })
                }
            };
            if file.chosen.kind == ReaderKind::Mmap {
                file.views.push((tensor, range));
            }
        }
        let mut views = Views { places: wanted.iter().map(|_| None).collect() };
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
        self.places.get(tensor)?.as_ref().and_then(|place| place.mapping.address(place.range.start))
    }

    /// What keeps the bytes of a view for as long as it lives.
    ///
    /// # Errors
    /// `internal` where the tensor is no view.
    pub fn guard(&self, tensor: usize) -> Result<ViewGuard> {
        let none = || Error::new(Kind::Internal, format!("tensor {tensor} is no view"));
        let place = self.places.get(tensor).and_then(Option::as_ref).ok_or_else(none)?;
        Ok(ViewGuard { mapping: Arc::clone(&place.mapping), range: place.range.clone() })
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
            if let Some(place) = self.places.get_mut(tensor) {
                *place = Some(Place { mapping: Arc::clone(&mapping), range });
            }
        }
        Ok(())
    }
}

/// The bytes of a tensor that can be used where it lies: in one piece, and aligned as its elements need it.
fn viewable(wanted: &Wanted) -> Option<Range<u64>> {
    let is_aligned = |range: &Range<u64>| range.start.is_multiple_of(wanted.dtype.item_bytes());
    wanted.contiguous().filter(|range| !range.is_empty() && is_aligned(range))
}
