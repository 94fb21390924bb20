//! Checkpoint behind an index in a store, of which files are opened when their tensors are requested.
//!
//! The index names the file of each tensor, so that one tensor of many files takes three requests besides its data: for
//! the index, the file, and the index again, which must not have changed. The first named tensors open the files that
//! hold them, and anything else opens all files.

use super::{Checkpoint, OpenOptions, Source, one_save};
use crate::error::{Error, Kind, Result};
use crate::os::sigint::Watch;
use crate::source::Place;
use crate::source::files::{Files, url_of};
use crate::source::replaced::Version;
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// Open checkpoint, or an index in a store whose files are not open yet.
pub struct LazyCheckpoint {
    paths: Vec<PathBuf>,
    /// Content of the index. `None` if all files were opened at once.
    index: Option<Files>,
    /// Some of the files, with the tensors that were requested first.
    part: OnceLock<Arc<Checkpoint>>,
    all: OnceLock<Arc<Checkpoint>>,
}

impl From<Arc<Checkpoint>> for LazyCheckpoint {
    fn from(all: Arc<Checkpoint>) -> LazyCheckpoint {
        LazyCheckpoint { paths: Vec::new(), index: None, part: OnceLock::new(), all: OnceLock::from(all) }
    }
}

impl LazyCheckpoint {
    /// Opens all files, or only the index if it is an object. With options, all files are opened: their digests and
    /// keys belong to whole checkpoints. `prepare` gets each checkpoint once its files are open.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::open_with`]; behind an index, files are opened later.
    pub fn open(
        paths: &[String],
        options: &OpenOptions,
        prepare: impl FnOnce(&Checkpoint) -> Result<()>,
    ) -> Result<LazyCheckpoint> {
        let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
        let mut found = None;
        if let [path] = paths.as_slice()
            && options.is_default()
            && url_of(path)?.is_some()
        {
            let watch = Watch::begin();
            let files = Files::resolve(&paths, &|| watch.check())?;
            if is_lazy(&files) {
                return Ok(LazyCheckpoint { paths, index: Some(files), part: OnceLock::new(), all: OnceLock::new() });
            }
            found = Some(files);
        }
        let all = match found {
            Some(files) => Checkpoint::open_found(&paths, Some(files), options)?,
            None => Checkpoint::open_with(&paths, options)?,
        };
        prepare(&all)?;
        Ok(LazyCheckpoint::from(Arc::new(all)))
    }

    /// Returns the checkpoint if all of its files are open.
    pub fn opened(&self) -> Option<&Arc<Checkpoint>> {
        self.all.get()
    }

    /// Returns the checkpoint, and opens the files that are not open yet. `prepare` gets it first.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::open_with`]; `source-changed` if another checkpoint has taken the place of the one
    /// of which files are open.
    pub fn all(&self, prepare: impl FnOnce(&Checkpoint) -> Result<()>) -> Result<&Arc<Checkpoint>> {
        if let Some(all) = self.all.get() {
            return Ok(all);
        }
        let (Some(index), options) = (&self.index, OpenOptions::default()) else {
            return Err(Error::new(Kind::Internal, "the files of a checkpoint are not open"));
        };
        let all = match self.part.get() {
            None => Checkpoint::open_found(&self.paths, Some(index.clone()), &options)?,
            Some(part) => {
                let watch = Watch::begin();
                let files = with_opened(index.clone(), part);
                let versions = files.versions.clone();
                let opened = Checkpoint::open_resolved(files, &options, &|| watch.check());
                if !versions.iter().all(|version| version.is_current(opened.is_ok(), &|| watch.check())) {
                    let message = "the checkpoint was replaced after it was opened; open it again";
                    let shown = index.listings.iter().map(|listing| &listing.path);
                    return Err(shown.fold(Error::new(Kind::SourceChanged, message), Error::at));
                }
                opened?
            }
        };
        prepare(&all)?;
        Ok(self.all.get_or_init(|| Arc::new(all)))
    }

    /// Returns a checkpoint whose open files hold the named tensors: some files, or all of them.
    ///
    /// # Errors
    /// Those of [`all`](LazyCheckpoint::all). A tensor that its file lacks is no error here.
    pub fn holding(
        &self,
        names: &[String],
        prepare: impl FnOnce(&Checkpoint) -> Result<()>,
    ) -> Result<&Arc<Checkpoint>> {
        let (None, Some(index)) = (self.all.get(), &self.index) else { return self.all(prepare) };
        if let Some(part) = self.part.get() {
            let is_open = |name: &String| part.find_position(name).is_some();
            return if names.iter().all(is_open) { Ok(part) } else { self.all(prepare) };
        }
        let Some(first) = index.holding(names) else { return self.all(prepare) };
        let watch = Watch::begin();
        let first = Cell::new(Some(first));
        let resolve = || match first.take() {
            Some(files) => Ok(files),
            None => {
                let files = Files::resolve(&self.paths, &|| watch.check())?;
                Ok(files.holding(names).unwrap_or(files))
            }
        };
        let open = |files: Files| Checkpoint::open_resolved(files, &OpenOptions::default(), &|| watch.check());
        let part = one_save::open_files(resolve, open, &|| watch.check())?;
        // Encrypted files are bound to each other, so that each needs all of them.
        if part.sources().any(Source::is_encrypted) {
            return self.all(prepare);
        }
        prepare(&part)?;
        Ok(self.part.get_or_init(|| Arc::new(part)))
    }

    /// Lists the names of all tensors: in the order of the files and of the bytes in each, or, while files of the index
    /// are not open, as the index lists them, by file and in alphabetical order.
    pub fn names(&self) -> Vec<String> {
        match (self.all.get(), &self.index) {
            (None, Some(index)) => index.index_entries.iter().map(|entry| entry.name.clone()).collect(),
            (all, _) => all.into_iter().flat_map(|all| all.entries()).map(|(_, entry)| entry.name.to_owned()).collect(),
        }
    }
}

/// Returns whether one index in a store lists the files.
fn is_lazy(files: &Files) -> bool {
    let Files { places, listings, versions, .. } = files;
    let is_index = matches!(listings.as_slice(), [listing] if listing.listed > 0);
    is_index
        && places.len() > 1
        && places.iter().all(|place| matches!(place, Place::Url(_)))
        && matches!(versions.as_slice(), [Version::Object(..)])
}

/// Replaces the places of files that are open.
fn with_opened(mut files: Files, part: &Checkpoint) -> Files {
    for source in part.sources() {
        let Source::Object(object) = source.stored() else { continue };
        for place in &mut files.places {
            if matches!(place, Place::Url(location) if location == object.location()) {
                *place = Place::Opened(Arc::clone(object));
            }
        }
    }
    files
}
