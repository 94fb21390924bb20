//! All files of a checkpoint, opened, with their headers checked and the names
//! resolved across them.

pub mod region;
pub mod selection;
mod shared;

use self::shared::HeaderDigest;
use crate::error::{Error, Kind, Result};
use crate::format::header::{Entry, Header};
use crate::os::threads;
use crate::profile::{self, Stage};
use crate::source::{Files, Source};
use hashbrown::HashTable;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Headers are small; this many are read at a time so that a slow file system answers several.
const HEADER_THREADS: usize = 8;
/// How many near names an error suggests.
const SUGGESTIONS: usize = 3;
/// Names less like the one asked for than this are no help.
const SIMILARITY_MIN: f64 = 0.7;

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<OpenFile>,
    /// For each name its file and its position there. Built only for several files; one header knows its names.
    merged: HashTable<(usize, usize)>,
    hasher: RandomState,
    /// For each file the number of tensors in it and in all before it.
    counts: Vec<usize>,
}

#[derive(Debug)]
struct OpenFile {
    source: Arc<Source>,
    header: Header,
    /// What somebody else has read the header of, and this process not yet.
    expected: Option<HeaderDigest>,
}

impl Checkpoint {
    /// Opens every file that `paths` stand for and reads the headers, nothing more.
    ///
    /// # Errors
    /// Those of [`Files::resolve`] and [`Header::read`]; `duplicate-tensor` for a name in two files;
    /// `malformed` where an index file promises a name that its file does not hold.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Checkpoint> {
        let files = Files::resolve(paths)?;
        Checkpoint::of(files, |_, source| {
            let header = Header::read(&source)?;
            Ok(OpenFile { source: Arc::new(source), header, expected: None })
        })
    }

    /// Opens the files and has `open` learn what is in each.
    fn of(files: Files, open: impl Fn(usize, Source) -> Result<OpenFile> + Sync) -> Result<Checkpoint> {
        let _span = profile::span(Stage::Open);
        let Files { paths, index_entries } = files;
        let opened: Vec<OnceLock<OpenFile>> = paths.iter().map(|_| OnceLock::new()).collect();
        threads::for_each(HEADER_THREADS, paths.len(), |index| {
            if let (Some(path), Some(place)) = (paths.get(index), opened.get(index)) {
                let file = open(index, Source::open(path)?)?;
                place.get_or_init(|| file);
            }
            Ok(())
        })?;
        let files: Vec<OpenFile> = opened.into_iter().filter_map(OnceLock::into_inner).collect();
        let add = |count: &mut usize, file: &OpenFile| {
            *count += file.header.entries().len();
            Some(*count)
        };
        let counts = files.iter().scan(0, add).collect();
        let mut checkpoint = Checkpoint { files, merged: HashTable::new(), hasher: RandomState::new(), counts };
        checkpoint.merge()?;
        for index_entry in index_entries {
            let held =
                checkpoint.files.get(index_entry.file).filter(|file| file.header.find(&index_entry.name).is_none());
            if let Some(file) = held {
                let message =
                    format!("the index says that {} holds this tensor, but it does not", file.source.path.display());
                return Err(Error::new(Kind::Malformed, message).at(index_entry.index).tensor(index_entry.name));
            }
        }
        Ok(checkpoint)
    }

    /// The open files.
    pub fn sources(&self) -> impl ExactSizeIterator<Item = &Arc<Source>> {
        self.files.iter().map(|file| &file.source)
    }

    /// One open file.
    ///
    /// # Errors
    /// `internal` if there is no such file.
    pub fn source(&self, index: usize) -> Result<&Arc<Source>> {
        let missing = || Error::new(Kind::Internal, format!("no file {index} among {}", self.files.len()));
        self.files.get(index).map(|file| &file.source).ok_or_else(missing)
    }

    /// Every tensor with the index of its file, in the order of the files and of the bytes in each.
    pub fn entries(&self) -> impl Iterator<Item = (usize, Entry<'_>)> {
        self.files.iter().enumerate().flat_map(|(index, file)| file.header.entries().map(move |entry| (index, entry)))
    }

    /// How many tensors there are.
    pub fn count(&self) -> usize {
        self.counts.last().copied().unwrap_or(0)
    }

    /// The tensor at a position of that order, and the index of its file.
    pub fn entry(&self, position: usize) -> Option<(usize, Entry<'_>)> {
        let index = self.counts.partition_point(|&count| count <= position);
        let before = index.checked_sub(1).map_or(Some(0), |last| self.counts.get(last).copied())?;
        Some((index, self.files.get(index)?.header.get(position.checked_sub(before)?)?))
    }

    /// The tensor with this name and the index of its file.
    ///
    /// # Errors
    /// `tensor-not-found`, with the nearest names that there are.
    pub fn find(&self, name: &str) -> Result<(usize, Entry<'_>)> {
        let (file, position) = self.place(name)?;
        let entry = self.files.get(file).and_then(|file| file.header.get(position));
        entry.map(|entry| (file, entry)).ok_or_else(|| self.not_found(name))
    }

    /// The position of the tensor with this name among all.
    ///
    /// # Errors
    /// Those of [`Checkpoint::find`].
    pub fn position(&self, name: &str) -> Result<usize> {
        let (file, position) = self.place(name)?;
        let before = file.checked_sub(1).and_then(|last| self.counts.get(last));
        Ok(before.copied().unwrap_or(0) + position)
    }

    /// The index of the file that holds a tensor, and its position there.
    fn place(&self, name: &str) -> Result<(usize, usize)> {
        let found = match self.files.as_slice() {
            [file] => file.header.position(name).map(|position| (0, position)),
            _ => self.merged.find(self.hasher.hash_one(name), |&place| self.name_at(place) == name).copied(),
        };
        found.ok_or_else(|| self.not_found(name))
    }

    /// The files with free text in their headers, and that text.
    pub fn metadata_by_file(&self) -> impl Iterator<Item = (&Path, &BTreeMap<String, String>)> {
        self.files.iter().filter_map(|file| Some((file.source.path.as_path(), file.header.metadata()?)))
    }

    /// The free text in the header of the one file there is, if it has any.
    ///
    /// # Errors
    /// `is-a-directory` when there are several files, each of which has its own.
    pub fn metadata(&self) -> Result<Option<&BTreeMap<String, String>>> {
        match self.files.as_slice() {
            [file] => Ok(file.header.metadata()),
            files => Err(Error::new(
                Kind::IsADirectory,
                format!("the checkpoint has {} files, each with its own metadata; name one of them", files.len()),
            )),
        }
    }

    fn not_found(&self, name: &str) -> Error {
        let mut near: Vec<(f64, &str)> = self
            .entries()
            .map(|(_, entry)| (strsim::jaro_winkler(name, entry.name), entry.name))
            .filter(|(similarity, _)| *similarity >= SIMILARITY_MIN)
            .collect();
        near.sort_by(|a, b| b.0.total_cmp(&a.0));
        let near: Vec<String> = near.iter().take(SUGGESTIONS).map(|(_, name)| format!("{name:?}")).collect();
        let hint = if near.is_empty() { String::new() } else { format!("; the nearest names are {}", near.join(", ")) };
        let place = match self.files.as_slice() {
            [file] => {
                "the file does not hold it".to_owned() + &format!(" among its {} tensors", file.header.entries().len())
            }
            files => format!("none of the {} files holds it", files.len()),
        };
        let error = Error::new(Kind::TensorNotFound, place + &hint).tensor(name);
        match self.files.first() {
            Some(file) => error.at(&file.source.path),
            None => error,
        }
    }

    /// Indexes all names, and fails on one that stands in two files.
    fn merge(&mut self) -> Result<()> {
        if self.files.len() < 2 {
            return Ok(());
        }
        let mut merged: HashTable<(usize, usize)> = HashTable::with_capacity(self.count());
        for (index, file) in self.files.iter().enumerate() {
            for (position, entry) in file.header.entries().enumerate() {
                let hash = self.hasher.hash_one(entry.name);
                if let Some(&(first, _)) = merged.find(hash, |&place| self.name_at(place) == entry.name) {
                    let other = self.files.get(first).map(|file| file.source.path.display().to_string());
                    let message =
                        format!("the name stands in {} too; load the files one by one", other.unwrap_or_default());
                    return Err(Error::new(Kind::DuplicateTensor, message)
                        .at(&file.source.path)
                        .tensor(entry.name)
                        .offset(entry.begin));
                }
                merged.insert_unique(hash, (index, position), |&place| self.hasher.hash_one(self.name_at(place)));
            }
        }
        self.merged = merged;
        Ok(())
    }

    fn name_at(&self, (file, position): (usize, usize)) -> &str {
        self.files.get(file).and_then(|file| file.header.get(position)).map_or("", |entry| entry.name)
    }
}
