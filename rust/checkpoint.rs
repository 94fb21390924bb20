//! Open checkpoint: its files, their checked headers, and an index of tensor names across all files.

mod beside;
pub mod dtype_rules;
pub mod lazy;
mod one_save;
pub mod region;
pub mod selection;
mod shared;
pub(crate) mod suggest;
mod tensor_headers;
pub mod verify;

use self::shared::HeaderDigest;
use self::verify::{Partial, Request, Stated, Unverified, Verify};
use crate::encryption::key::EncryptionKey;
use crate::encryption::keyring;
use crate::error::{Error, Kind, Result};
use crate::format::encryption::{self, Encrypted};
use crate::format::foreign;
use crate::format::header::{Entry, Header};
use crate::format::shard::{self, Shard};
use crate::os::retry::{Check, SharedCheck};
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::profile::{self, Stage};
use crate::remote::find::location::Location;
use crate::source::files::{Files, IndexEntry, Listing};
use crate::source::replaced::SAVE_KEY;
use crate::source::{Place, Protection, Source, UnitSource};
use hashbrown::HashTable;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Number of headers that are read in parallel, to hide the latency of a slow file system.
const HEADER_THREADS: usize = 8;
/// The same for objects, whose headers are requested all at once.
const REMOTE_HEADER_THREADS: usize = 64;

/// Key of the metadata of files of torch.distributed.checkpoint, in which a tensor may be in several files.
const SHARDING_KEY: &str = "DCP_SHARDING_INFO";

/// Options to open a checkpoint with.
#[derive(Default)]
pub struct OpenOptions {
    /// Digests that loads compare. Encrypted files need none: every byte is authenticated.
    pub verify: Request,
    /// Key of the files, which must all be encrypted then. Without it, encrypted files are opened with the keys of the
    /// [`keyring`].
    pub key: Option<EncryptionKey>,
    /// Whether files are accepted that are not encrypted or that keys of the [`keyring`] open, although there is a key.
    pub accepts_plain: bool,
    /// Headers of the files that another process has exported. No header is read then.
    pub headers: Option<Vec<u8>>,
}

impl OpenOptions {
    /// Returns whether the options are the defaults.
    fn is_default(&self) -> bool {
        let OpenOptions { verify, key, accepts_plain, headers } = self;
        verify.verify == Verify::Nothing && key.is_none() && !accepts_plain && headers.is_none()
    }
}

impl From<Verify> for OpenOptions {
    fn from(verify: Verify) -> OpenOptions {
        OpenOptions { verify: Request { verify, ..Request::default() }, ..OpenOptions::default() }
    }
}

impl From<&EncryptionKey> for OpenOptions {
    fn from(key: &EncryptionKey) -> OpenOptions {
        OpenOptions { key: Some(key.clone()), ..OpenOptions::default() }
    }
}

/// Open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<Arc<OpenFile>>,
    /// Hash table of file and position of each name. Empty for a single file, whose header has its own index.
    merged: HashTable<(usize, usize)>,
    hasher: RandomState,
    /// Number of tensors in each file and all files before it.
    counts: Vec<usize>,
    /// Loads that should be verified, but that no digest covers.
    partial: Partial,
    /// Directories and index files that stand for several of the files.
    listings: Vec<Listing>,
    /// Ids of the saves that index files state.
    saves: Vec<String>,
    /// The caller's URLs of objects and prefixes.
    urls: Vec<Location>,
    /// Entries of index files for tensors that their files do not hold.
    absent: Vec<IndexEntry>,
    /// Names of tensors in files that are listed, but were not opened.
    unopened: Vec<String>,
    /// Tensors that loads have not verified.
    unverified: Arc<Unverified>,
}

#[derive(Debug)]
struct OpenFile {
    source: Source,
    header: Header,
    /// Digest of the header that another process read, if this process has not read the header itself.
    expected: Option<HeaderDigest>,
    /// Place of an encrypted file among the files of its save.
    shard: Option<Shard>,
    /// Digests that the data must have.
    stated: Stated,
    /// Whether all of them were compared, so that loads compare none.
    is_verified: AtomicBool,
}

impl OpenFile {
    /// Opens a file of which `json` is the header. Loads decrypt an encrypted one, with `key` or one of the keyring.
    fn new(stored: Source, json: &[u8], options: &OpenOptions, check: Check<'_>) -> Result<OpenFile> {
        let at = |error: Error| error.at(stored.path());
        let mut header = Header::parse(json, stored.length()).map_err(at)?;
        let is_encrypted = encryption::is_encrypted(&header);
        let key = options.key.as_ref().filter(|_| is_encrypted || !options.accepts_plain);
        let stated = match key {
            // Fails below.
            Some(_) if !is_encrypted => Stated::Nothing,
            _ => options.verify.verify.stated(&stored, &header, json)?,
        };
        if key.is_none() && !is_encrypted {
            return Ok(OpenFile {
                source: stored,
                header,
                expected: None,
                shard: None,
                stated,
                is_verified: AtomicBool::new(false),
            });
        }
        let mut keys: Vec<_> = key.into_iter().cloned().collect();
        if key.is_none() || options.accepts_plain {
            keys.extend(keyring::keys()?);
        }
        let Encrypted { chunks, shard } = encryption::open(&mut header, json, &stored, &keys, check).map_err(at)?;
        let protection = Protection::Encrypted(chunks);
        let source = Source::Units(Arc::new(UnitSource { stored, protection }));
        Ok(OpenFile { source, header, expected: None, shard, stated, is_verified: AtomicBool::new(false) })
    }
}

/// Returns the number of tensors in each file and all files before it.
fn counts(files: &[Arc<OpenFile>]) -> Vec<usize> {
    let add = |count: &mut usize, file: &Arc<OpenFile>| {
        *count += file.header.entries().len();
        Some(*count)
    };
    files.iter().scan(0, add).collect()
}

/// Adds to the error of a file what lists the file, if it is missing, or that its download has not ended.
fn explain(error: Error, index: usize, places: &[Place], listings: &[Listing]) -> Error {
    let is_missing = |place: &&Place| matches!(place, Place::Path(path) if !path.exists());
    let listing = listings.iter().find(|listing| listing.listed > 0 && listing.files.contains(&index));
    match (error.kind(), listing, places.get(index)) {
        (Kind::FileNotFound, Some(Listing { path, files, .. }), _) => {
            let missing = places.get(files.clone()).unwrap_or_default().iter().filter(is_missing).count().max(1);
            let (path, count) = (path.display(), files.len());
            error.note(&format!("{missing} of the {count} files that {path} lists are missing; copy or download them"))
        }
        (Kind::Malformed, _, Some(Place::Path(path))) => foreign::note_download(error, path),
        _ => error,
    }
}

impl Checkpoint {
    /// Opens every file that `paths` resolve to, and reads only the headers.
    ///
    /// # Errors
    /// The errors of [`Files::resolve`], [`Header::read_bytes`], [`Header::parse`] and [`encryption::open`];
    /// `duplicate-tensor` for a name in two files; `malformed` if an index file lists a tensor that its file does not
    /// contain; the errors of [`shard::check`].
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Checkpoint> {
        Checkpoint::open_with(paths, &OpenOptions::default())
    }

    /// Opens files as the options say. Encrypted files and `.tensors` files with a manifest must be compared before the
    /// first load: [`is_due`](Checkpoint::is_due).
    ///
    /// With headers of another process, file names and lengths are compared at once, and a header before the first data of
    /// its file is read. For objects no request is sent: the other process's URLs and versions are taken, after the URLs
    /// of both were compared.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::open`] and of [`Verify::resolve`]; `integrity` if no digest of a file is known, its
    /// header differs, or it is not encrypted although there is a key; `malformed` if the files do not match the
    /// headers of the other process; `invalid-argument` if that process was given other URLs.
    pub fn open_with<P: AsRef<Path>>(paths: &[P], options: &OpenOptions) -> Result<Checkpoint> {
        if let Some(headers) = &options.headers {
            return Checkpoint::open_with_headers(paths, headers, options);
        }
        Checkpoint::open_found(paths, None, options)
    }

    /// Opens files, of which `found` are those that `paths` resolved to.
    fn open_found<P: AsRef<Path>>(paths: &[P], found: Option<Files>, options: &OpenOptions) -> Result<Checkpoint> {
        let watch = Watch::begin();
        let check: SharedCheck<'_> = &|| watch.check();
        let found = Cell::new(found);
        let resolve = || found.take().map_or_else(|| options.verify.verify.resolve(paths, check), Ok);
        one_save::open_files(resolve, |files| Checkpoint::open_resolved(files, options, check), check)
    }

    /// Opens files once. A save may replace them meanwhile.
    fn open_resolved(files: Files, options: &OpenOptions, check: SharedCheck<'_>) -> Result<Checkpoint> {
        let count = files.places.len();
        Checkpoint::from_files(files, options.verify.partial, |_, place| {
            let source = Source::open_one_of(count, place, check)?;
            let json = Header::read_bytes(&source, check)?;
            OpenFile::new(source, &json, options, check)
        })
    }

    /// Opens the files in parallel with `open`, and indexes their names.
    fn from_files(
        files: Files,
        partial: Partial,
        open: impl Fn(usize, &Place) -> Result<OpenFile> + Sync,
    ) -> Result<Checkpoint> {
        let _span = profile::span(Stage::Open);
        let Files { places, index_entries, listings, urls, unopened, .. } = files;
        let is_remote = !places.iter().all(|place| matches!(place, Place::Path(_)));
        let threads = if is_remote { REMOTE_HEADER_THREADS } else { HEADER_THREADS };
        let missing = || Error::new(Kind::Internal, "no such file");
        let open_at = |index| {
            let opened = open(index, places.get(index).ok_or_else(missing)?);
            opened.map_err(|error| explain(error, index, &places, &listings))
        };
        let files: Vec<Arc<OpenFile>> = threads::map(threads, places.len(), |index| open_at(index).map(Arc::new))?;
        let shards: Vec<_> = files.iter().map(|file| (file.source.path(), file.shard.as_ref())).collect();
        if unopened.is_empty() {
            shard::check(&shards, &listings)?;
        }
        let counts = counts(&files);
        let (merged, hasher) = (HashTable::new(), RandomState::new());
        let saves = listings.iter().filter_map(|listing| listing.metadata.get(SAVE_KEY).cloned()).collect();
        let (absent, unverified) = (Vec::new(), Arc::default());
        let mut checkpoint =
            Checkpoint { files, merged, hasher, counts, partial, listings, saves, urls, absent, unopened, unverified };
        checkpoint.merge()?;
        let is_absent = |entry: &IndexEntry| {
            checkpoint.files.get(entry.file).is_some_and(|file| file.header.find(&entry.name).is_none())
        };
        let absent: Vec<IndexEntry> = index_entries.into_iter().filter(is_absent).collect();
        checkpoint.absent = absent;
        if let Some(error) = checkpoint.absent_error(Kind::Malformed, |_| true) {
            tracing::warn!(%error, count = checkpoint.absent.len(), "the other tensors can be loaded");
        }
        Ok(checkpoint)
    }

    /// Returns a checkpoint with the open files of several. It finds tensors by their positions only, since files of
    /// different checkpoints may have tensors of one name.
    pub fn joined(checkpoints: &[&Checkpoint]) -> Checkpoint {
        let files: Vec<Arc<OpenFile>> = checkpoints.iter().flat_map(|own| own.files.iter().cloned()).collect();
        Checkpoint {
            counts: counts(&files),
            files,
            merged: HashTable::new(),
            hasher: RandomState::new(),
            partial: checkpoints.first().map(|first| first.partial).unwrap_or_default(),
            listings: Vec::new(),
            saves: Vec::new(),
            urls: Vec::new(),
            absent: Vec::new(),
            unopened: Vec::new(),
            unverified: checkpoints.first().map(|first| Arc::clone(&first.unverified)).unwrap_or_default(),
        }
    }

    /// Checks that files hold all tensors that their index lists.
    ///
    /// # Errors
    /// `malformed` for a tensor that its file does not hold. Loads of other tensors do without it.
    pub fn check_index(&self) -> Result<()> {
        self.absent_error(Kind::Malformed, |_| true).map_or(Ok(()), Err)
    }

    /// Returns the error for the first tensor that an index lists and its file lacks.
    fn absent_error(&self, kind: Kind, is_requested: impl Fn(&str) -> bool) -> Option<Error> {
        let entry = self.absent.iter().find(|entry| is_requested(&entry.name))?;
        let file = self.files.get(entry.file).map(|file| file.source.path().display().to_string()).unwrap_or_default();
        let message = format!(
            "the index says that {file} holds this tensor, but it does not; copy or download the index and the file again"
        );
        Some(Error::new(kind, message).at(&entry.index).tensor(&*entry.name))
    }

    /// Iterates over the open files.
    pub fn sources(&self) -> impl ExactSizeIterator<Item = &Source> {
        self.files.iter().map(|file| &file.source)
    }

    /// Returns the open file with this index.
    pub fn source(&self, index: usize) -> Result<&Source> {
        let missing = || Error::new(Kind::Internal, format!("no file {index} among {}", self.files.len()));
        self.files.get(index).map(|file| &file.source).ok_or_else(missing)
    }

    /// Adds the path of the file with this index to an error.
    pub(crate) fn locate(&self, source: usize, error: Error) -> Error {
        match self.files.get(source) {
            Some(file) => error.at(file.source.path()),
            None => error,
        }
    }

    /// Iterates over all tensors with the indices of their files, in the order of the files and of the bytes in each.
    pub fn entries(&self) -> impl Iterator<Item = (usize, Entry<'_>)> {
        self.files.iter().enumerate().flat_map(|(index, file)| file.header.entries().map(move |entry| (index, entry)))
    }

    /// Iterates over the names of all tensors: those in open files, and those that an index lists in other files.
    pub(crate) fn all_names(&self) -> impl Iterator<Item = &str> {
        self.entries().map(|(_, entry)| entry.name).chain(self.unopened.iter().map(String::as_str))
    }

    /// Returns the number of tensors.
    pub fn count(&self) -> usize {
        self.counts.last().copied().unwrap_or(0)
    }

    /// Returns the tensor at a position of [`entries`](Checkpoint::entries), and the index of its file.
    pub fn entry(&self, position: usize) -> Option<(usize, Entry<'_>)> {
        let index = self.counts.partition_point(|&count| count <= position);
        let before = index.checked_sub(1).map_or(Some(0), |last| self.counts.get(last).copied())?;
        Some((index, self.files.get(index)?.header.get(position.checked_sub(before)?)?))
    }

    /// Returns the tensor with this name, and the index of its file.
    ///
    /// # Errors
    /// `tensor-not-found`, with the most similar names of at most 256 bytes.
    pub fn find(&self, name: &str) -> Result<(usize, Entry<'_>)> {
        let entry =
            self.location(name).and_then(|(file, position)| Some((file, self.files.get(file)?.header.get(position)?)));
        entry.ok_or_else(|| self.not_found(name))
    }

    /// Returns the position of the tensor with this name in [`entries`](Checkpoint::entries).
    pub fn position(&self, name: &str) -> Result<usize> {
        self.find_position(name).ok_or_else(|| self.not_found(name))
    }

    /// Returns the position of the tensor with this name, or `None` if there is no such tensor.
    pub fn find_position(&self, name: &str) -> Option<usize> {
        let (file, position) = self.location(name)?;
        let before = file.checked_sub(1).and_then(|last| self.counts.get(last));
        Some(before.copied().unwrap_or(0) + position)
    }

    /// Returns the index of the file that contains a tensor, and the position in that file.
    fn location(&self, name: &str) -> Option<(usize, usize)> {
        match self.files.as_slice() {
            [file] => file.header.position(name).map(|position| (0, position)),
            _ => self.merged.find(self.hasher.hash_one(name), |&location| self.name_at(location) == name).copied(),
        }
    }

    /// Iterates over the files whose headers have metadata, with that metadata.
    pub fn metadata_by_file(&self) -> impl Iterator<Item = (&Path, &BTreeMap<String, String>)> {
        self.files.iter().filter_map(|file| Some((file.source.path(), file.header.metadata()?)))
    }

    /// Returns the metadata in the header of the file with this index.
    pub fn file_metadata(&self, index: usize) -> Option<&BTreeMap<String, String>> {
        self.files.get(index)?.header.metadata()
    }

    /// Returns the directories and index files that stand for several of the files.
    pub fn listings(&self) -> &[Listing] {
        &self.listings
    }

    /// Returns the ids of the saves to which the files of index files belong, or those that another process has found.
    pub fn saves(&self) -> &[String] {
        &self.saves
    }

    /// Returns the metadata in the header of a checkpoint with a single file.
    ///
    /// # Errors
    /// `is-a-directory` if the checkpoint has several files.
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
        if let Some(error) = self.absent_error(Kind::TensorNotFound, |absent| absent == name) {
            return error;
        }
        let near = suggest::similar(name, self.entries().map(|(_, entry)| entry.name));
        let hint = suggest::hint("nearest names", &near);
        let message = match self.files.as_slice() {
            [file] => {
                format!("the file does not hold it among its {} tensors", file.header.entries().len())
            }
            files => format!("none of the {} files holds it", files.len()),
        };
        let error = Error::new(Kind::TensorNotFound, message + &hint).tensor(name);
        self.locate(0, error)
    }

    /// Indexes all names, and fails for a name in two files.
    fn merge(&mut self) -> Result<()> {
        if self.files.len() < 2 {
            return Ok(());
        }
        let mut merged: HashTable<(usize, usize)> = HashTable::with_capacity(self.count());
        for (index, file) in self.files.iter().enumerate() {
            for (position, entry) in file.header.entries().enumerate() {
                let hash = self.hasher.hash_one(entry.name);
                if let Some(&(first, _)) = merged.find(hash, |&location| self.name_at(location) == entry.name) {
                    let other = self.files.get(first).map(|file| file.source.path().display().to_string());
                    let remedy = match file.header.metadata().is_some_and(|own| own.contains_key(SHARDING_KEY)) {
                        true => "the files hold shards of tensors; load them with fst.dcp",
                        false => "load the files one by one",
                    };
                    let message = format!("the name is in {} too; {remedy}", other.unwrap_or_default());
                    return Err(Error::new(Kind::DuplicateTensor, message)
                        .at(file.source.path())
                        .tensor(entry.name)
                        .offset(entry.begin));
                }
                merged.insert_unique(hash, (index, position), |&location| self.hasher.hash_one(self.name_at(location)));
            }
        }
        self.merged = merged;
        Ok(())
    }

    fn name_at(&self, (file, position): (usize, usize)) -> &str {
        self.files.get(file).and_then(|file| file.header.get(position)).map_or("", |entry| entry.name)
    }
}
