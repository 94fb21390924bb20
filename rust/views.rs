//! Which tensors need no copy on the CPU: those that can be used where they
//! lie in a mapped file.

use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::options::Options;
use crate::profile::{self, Stage};
use crate::reader::mmap::Mapping;
use crate::reader::{self, Chosen, ReaderKind, Target, read_ahead};
use crate::source::Source;
use crate::wanted::Wanted;
use serde_json::json;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::{Arc, Mutex, TryLockError, Weak};

/// The mappings that loads of one checkpoint share. No byte of a mapping is lent twice, since two tensors of which
/// changing one changed the other would be one tensor.
#[derive(Default)]
pub struct Mappings {
    files: Mutex<BTreeMap<usize, Lent>>,
}

/// What is lent of a mapping: for each range its end.
struct Lent {
    /// It lives as long as views of it do.
    mapping: Weak<Mapping>,
    ends: BTreeMap<u64, u64>,
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
        let lent = files.get(&index).filter(|lent| ranges.iter().all(|(_, range)| lent.is_free(range)));
        let mapping = match lent.and_then(|lent| lent.mapping.upgrade()) {
            Some(mapping) => mapping,
            None => {
                let mapping = Arc::new(Mapping::open(source)?);
                files.insert(index, Lent { mapping: Arc::downgrade(&mapping), ends: BTreeMap::new() });
                mapping
            }
        };
        if let Some(lent) = files.get_mut(&index) {
            lent.ends.extend(ranges.iter().map(|(_, range)| (range.start, range.end)));
        }
        Ok(mapping)
    }
}

impl Lent {
    fn is_free(&self, range: &Range<u64>) -> bool {
        self.ends.range(..range.end).next_back().is_none_or(|(_, &end)| end <= range.start)
    }
}

/// For each wanted tensor its place in a mapping, or none if it has to be read.
pub struct Views {
    files: BTreeMap<usize, File>,
    /// For each tensor its file and its address.
    places: Vec<(usize, Option<u64>)>,
}

/// A file that tensors are wanted of, mapped if any of them is a view.
struct File {
    chosen: Chosen,
    mapping: Option<Arc<Mapping>>,
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
        let mut files: BTreeMap<usize, File> = BTreeMap::new();
        let mut places: Vec<(usize, Option<u64>)> = Vec::with_capacity(wanted.len());
        for (tensor, (wanted, dtype)) in wanted.iter().zip(dtypes).enumerate() {
            places.push((wanted.source, None));
            let Some(range) = viewable(wanted).filter(|_| *dtype == Some(wanted.dtype)) else { continue };
            let file = match files.entry(wanted.source) {
                Entry::Occupied(file) => file.into_mut(),
                Entry::Vacant(place) => {
                    let chosen = reader::choose(options, checkpoint.source(wanted.source)?, Target::NewHostMemory)?;
                    place.insert(File { chosen, mapping: None, views: Vec::new() })
                }
            };
            if file.chosen.kind == ReaderKind::Mmap {
                file.views.push((tensor, range));
            }
        }
        for (&index, file) in &mut files {
            if !file.views.is_empty() {
                let source = checkpoint.source(index)?;
                file.chosen.log(source);
                file.map(index, source, mappings, &mut places)?;
            }
        }
        Ok(Views { files, places })
    }

    /// Where a tensor lies, if it is a view.
    pub fn address(&self, tensor: usize) -> Option<u64> {
        self.places.get(tensor).and_then(|&(_, address)| address)
    }

    /// The file that holds a tensor.
    pub fn source(&self, tensor: usize) -> usize {
        self.places.get(tensor).map_or(0, |&(source, _)| source)
    }

    /// What keeps a file mapped for as long as it lives.
    ///
    /// # Errors
    /// `internal` where no tensor of the file is a view.
    pub fn hold(&self, source: usize) -> Result<Arc<Mapping>> {
        let mapping = self.files.get(&source).and_then(|file| file.mapping.as_ref());
        mapping.cloned().ok_or_else(|| Error::new(Kind::Internal, format!("file {source} is not mapped")))
    }
}

impl File {
    /// Gives the views their addresses. Bytes that are wanted twice are a view once, and the second is read.
    fn map(
        &mut self,
        index: usize,
        source: &Arc<Source>,
        mappings: &Mappings,
        places: &mut [(usize, Option<u64>)],
    ) -> Result<()> {
        self.views.sort_by_key(|(_, range)| range.start);
        let mut reached = 0;
        self.views.retain(|(_, range)| {
            let is_first = range.start >= reached;
            reached = reached.max(range.end);
            is_first
        });
        let bytes: u64 = self.views.iter().map(|(_, range)| range.end - range.start).sum();
        let detail = || json!({ "path": source.path.to_string_lossy(), "reader": ReaderKind::Mmap.name() }).into();
        let span = profile::span(Stage::Map).bytes(bytes).detail(detail);
        let mapping = mappings.lend(index, source, &self.views)?;
        drop(span);
        for (tensor, range) in &self.views {
            if let Some((_, address)) = places.get_mut(*tensor) {
                *address = mapping.address(range.start);
            }
        }
        read_ahead::start(source, &mapping, self.views.iter().map(|(_, range)| range.clone()));
        self.mapping = Some(mapping);
        Ok(())
    }
}

/// The bytes of a tensor that can be used where it lies: in one piece, and aligned as its elements need it.
fn viewable(wanted: &Wanted) -> Option<Range<u64>> {
    let is_aligned = |range: &Range<u64>| range.start.is_multiple_of(wanted.dtype.item_bytes());
    wanted.contiguous().filter(|range| !range.is_empty() && is_aligned(range))
}
