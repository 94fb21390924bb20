//! Which tensors need no copy on the CPU: those that can be used where they
//! lie in a mapped file.

use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::options::Options;
use crate::plan::Wanted;
use crate::profile::{self, Stage};
use crate::reader::mmap::Mapping;
use crate::reader::{self, Chosen, ReaderKind, Target, read_ahead};
use crate::source::Source;
use serde_json::json;
use std::ops::Range;
use std::sync::Arc;

/// For each wanted tensor its place in a mapping, or none if it has to be read.
pub struct Views {
    files: Vec<File>,
    /// For each tensor its file and its address.
    places: Vec<(usize, Option<u64>)>,
}

/// A file, mapped if any of its tensors is a view.
#[derive(Default)]
struct File {
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
        wanted: &[Wanted],
        dtypes: &[Option<Dtype>],
        options: &Options,
    ) -> Result<Views> {
        let sources = checkpoint.sources();
        let chosen: Vec<Chosen> =
            sources.map(|source| reader::choose(options, source, Target::NewHostMemory)).collect::<Result<_>>()?;
        let mut files: Vec<File> = chosen.iter().map(|_| File::default()).collect();
        for (tensor, (wanted, dtype)) in wanted.iter().zip(dtypes).enumerate() {
            let kind = chosen.get(wanted.source).map(|chosen| chosen.kind);
            let is_mapped = kind == Some(ReaderKind::Mmap) && *dtype == Some(wanted.dtype);
            let file = files.get_mut(wanted.source).filter(|_| is_mapped);
            if let (Some(file), Some(range)) = (file, viewable(wanted)) {
                file.views.push((tensor, range));
            }
        }
        let mut places: Vec<(usize, Option<u64>)> = wanted.iter().map(|wanted| (wanted.source, None)).collect();
        for ((source, file), chosen) in checkpoint.sources().zip(&mut files).zip(chosen) {
            if !file.views.is_empty() {
                chosen.log(source);
                file.map(source, &mut places)?;
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
        let mapping = self.files.get(source).and_then(|file| file.mapping.as_ref());
        mapping.cloned().ok_or_else(|| Error::new(Kind::Internal, format!("file {source} is not mapped")))
    }
}

impl File {
    /// Gives the views their addresses. Bytes that are wanted twice are a view once, since two tensors of which
    /// changing one changed the other would be one tensor; the second is read.
    fn map(&mut self, source: &Arc<Source>, places: &mut [(usize, Option<u64>)]) -> Result<()> {
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
        let mapping = Arc::new(Mapping::open(source)?);
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
