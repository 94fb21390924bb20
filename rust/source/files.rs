//! Files of a checkpoint, from the path or URL of a file, of a directory, or of the index file of a sharded checkpoint.

use super::Place;
use super::directory::{Chosen, FILE_SUFFIX, INDEX_SUFFIX, choose, is_index, names_in};
use super::index::{self, Index, STATE};
use super::replaced::Version;
use crate::error::{Error, Kind, Result};
use crate::os::local_file::open_regular;
use crate::os::retry::Check;
use crate::remote::find::location::{self, Location, Service};
use crate::remote::find::name::Name;
use crate::remote::find::{self, Found};
use crate::remote::transfer::limits::FIRST_BYTES;
use crate::remote::transfer::object::{self, Object};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Upper bound for an index file, in bytes, the same as for a header. Real ones are far smaller.
pub const INDEX_BYTES_MAX: u64 = 100_000_000;

/// Usual end of the names of tensorizer's files. Their format is recognized by their first bytes; the name of an object
/// saves the request that finds out whether it is a prefix.
const TENSORS_SUFFIX: &str = ".tensors";

/// Number of names in a directory that are looked at for the error of a missing file.
const NAMES_BESIDE_MAX: usize = 1000;

/// Minimum Jaro-Winkler similarity of a name beside a missing file that is not the name of a checkpoint's file.
const SIMILARITY_MIN: f64 = 0.9;

/// Files of a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// The files, in the caller's order. The files of a directory are sorted by name.
    pub places: Vec<Place>,
    /// Entries of all index files.
    pub index_entries: Vec<IndexEntry>,
    /// Directories and index files that stand for several of the files.
    pub listings: Vec<Listing>,
    /// The caller's URLs of objects and prefixes.
    pub urls: Vec<Location>,
    /// Versions of the directories and index files, to compare once the files are open.
    pub versions: Vec<Version>,
    /// Names of tensors in files of an index that [`Files::holding`] has left out.
    pub unopened: Vec<String>,
}

/// Directory, prefix or index file that a caller named instead of the files.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// Its path or URL.
    pub path: PathBuf,
    /// Directory with the files, as [`Place::absolute`] shows its files.
    pub directory: String,
    /// Indices of its files in [`Files::places`].
    pub files: Range<usize>,
    /// Whether the content of the index was compared with a digest.
    pub is_compared: bool,
    /// Number of tensors that the index lists. 0 without an index.
    pub listed: usize,
    /// Metadata of the index. Empty without one.
    pub metadata: BTreeMap<String, String>,
    /// File beside the index with values that are not tensors, if the index names one.
    pub state: Option<Place>,
}

impl Listing {
    fn of(path: &Path, directory: &str) -> Listing {
        Listing { path: path.to_path_buf(), directory: directory.to_owned(), ..Listing::default() }
    }

    /// Returns the metadata of the index, with the path or URL of the file that it names in place of the name.
    pub fn metadata_with_paths(&self) -> BTreeMap<String, String> {
        let mut metadata = self.metadata.clone();
        metadata.extend(self.state.as_ref().map(|state| (STATE.to_owned(), state.to_text())));
        metadata
    }
}

/// Compares the content of the index at a path or URL with its digest. Returns whether it has one.
pub type CompareIndex<'a> = &'a dyn Fn(&Path, &[u8]) -> Result<bool>;

/// Entry of an index file.
#[derive(Clone, Debug)]
pub struct IndexEntry {
    /// Name of a tensor.
    pub name: String,
    /// Index in [`Files::places`] of the file with the tensor.
    pub file: usize,
    /// Path of the index file.
    pub index: Arc<Path>,
}

impl Files {
    /// Resolves paths and URLs to files. Opens only index files.
    ///
    /// # Errors
    /// `file-not-found`, `permission-denied` or `io` from the file system or the store; `is-a-directory` for a directory
    /// without safetensors files; `malformed` for an invalid index; `invalid-argument` for a URL with an unknown scheme
    /// or an empty list; the error of `check`.
    pub fn resolve<P: AsRef<Path>>(paths: &[P], check: Check<'_>) -> Result<Files> {
        Files::resolve_with(paths, None, check)
    }

    /// Resolves paths and URLs, and compares index files before their content is used.
    pub fn resolve_with<P: AsRef<Path>>(
        paths: &[P],
        compare: Option<CompareIndex<'_>>,
        check: Check<'_>,
    ) -> Result<Files> {
        if paths.is_empty() {
            return Err(Error::new(Kind::InvalidArgument, "no path was given; give at least one file"));
        }
        let mut resolver = Resolver { files: Files::default(), compare, check };
        for path in paths {
            let path = path.as_ref();
            match url_of(path)? {
                Some(location) => {
                    resolver.add_url(&location)?;
                    resolver.files.urls.push(location);
                }
                None => resolver.add_path(&local_path(path)?)?,
            }
        }
        Ok(resolver.files)
    }

    /// Returns the files of a single index that hold the named tensors, or `None` if the index does not list a name.
    pub fn holding(&self, names: &[String]) -> Option<Files> {
        let [listing] = self.listings.as_slice() else { return None };
        let requested: HashSet<&str> = names.iter().map(String::as_str).collect();
        let entries = self.index_entries.iter().filter(|entry| requested.contains(&*entry.name));
        let found: HashSet<&str> = entries.clone().map(|entry| &*entry.name).collect();
        let files: BTreeSet<usize> = entries.map(|entry| entry.file).collect();
        if found.len() < requested.len() || files.is_empty() {
            return None;
        }
        let places = files.iter().filter_map(|&file| self.places.get(file).cloned()).collect();
        let (mut index_entries, mut unopened) = (Vec::new(), Vec::new());
        for entry in &self.index_entries {
            match files.iter().position(|&file| file == entry.file) {
                Some(file) => index_entries.push(IndexEntry { file, ..entry.clone() }),
                None => unopened.push(entry.name.clone()),
            }
        }
        let listings = vec![Listing { files: 0..files.len(), ..listing.clone() }];
        Some(Files { places, index_entries, listings, unopened, ..self.clone() })
    }
}

/// Files found so far, and how to open index files.
struct Resolver<'a> {
    files: Files,
    compare: Option<CompareIndex<'a>>,
    check: Check<'a>,
}

impl Resolver<'_> {
    fn add_path(&mut self, path: &Path) -> Result<()> {
        let kind = fs::metadata(path).map_err(|error| suggest(Error::from_io(error, path, "cannot open"), path))?;
        if kind.is_dir() {
            self.add_directory(path)
        } else if is_index(&file_name(path)) {
            self.add_index(path)
        } else {
            self.files.places.push(Place::Path(path.to_path_buf()));
            Ok(())
        }
    }

    fn add_directory(&mut self, directory: &Path) -> Result<()> {
        match choose(names_in(directory)?).map_err(|error| error.at(directory))? {
            Chosen::Index(name) => {
                let index = directory.join(name);
                match self.add_index(&index) {
                    // A save of a single file has removed it.
                    Err(error) if error.kind() == Kind::FileNotFound && fs::symlink_metadata(&index).is_err() => {
                        self.add_directory(directory)
                    }
                    added => added,
                }
            }
            Chosen::Files(names) => {
                self.files.versions.push(Version::Directory(directory.to_path_buf(), names.clone()));
                let places = names.into_iter().map(|name| Place::Path(directory.join(name))).collect();
                let shown = absolute(directory);
                self.add_listing(Listing::of(directory, shown.trim_end_matches('/')), places);
                Ok(())
            }
        }
    }

    fn add_url(&mut self, location: &Location) -> Result<()> {
        // The Hub resolves the revision in the URL of any file.
        let found = if location.key().ends_with(TENSORS_SUFFIX) && location.service() != Service::Hub {
            Found::Object(location.clone())
        } else {
            find::find(location, &[INDEX_SUFFIX, FILE_SUFFIX], self.check)?
        };
        match found {
            Found::Local(path) => self.add_path(&path),
            Found::Object(location) if is_index(location.key()) => self.add_remote_index(&location),
            Found::Object(location) => {
                self.files.places.push(Place::Url(location));
                Ok(())
            }
            Found::Opened(object) if is_index(object.location().key()) => self.add_opened_index(&object),
            Found::Opened(object) => {
                self.files.places.push(Place::Opened(Arc::new(object)));
                Ok(())
            }
            Found::Prefix(prefix, names) => match choose(names).map_err(|error| error.at(prefix.to_string()))? {
                Chosen::Index(name) => self.add_remote_index(&prefix.child(&name)?),
                Chosen::Files(names) => {
                    let places =
                        names.iter().map(|name| prefix.child(name).map(Place::Url)).collect::<Result<Vec<_>>>()?;
                    let path = PathBuf::from(prefix.to_string());
                    self.add_listing(Listing::of(&path, absolute(&path).trim_end_matches('/')), places);
                    Ok(())
                }
            },
        }
    }

    fn add_index(&mut self, index: &Path) -> Result<()> {
        let (file, metadata) = open_regular(index)?;
        let length = metadata.len();
        if length > INDEX_BYTES_MAX {
            let message = format!("the index has {length} bytes; at most {INDEX_BYTES_MAX} are accepted");
            return Err(Error::new(Kind::Malformed, message).at(index));
        }
        // A file that grows meanwhile is read only up to its length at the start.
        let mut content = (&file).take(length);
        let (is_compared, content) = match self.compare {
            None => (false, index::read(content)),
            Some(compare) => {
                let mut bytes = Vec::new();
                content.read_to_end(&mut bytes).map_err(|error| Error::from_io(error, index, "cannot read"))?;
                (compare(index, &bytes)?, index::read(bytes.as_slice()))
            }
        };
        let content = content.map_err(|fault| fault.at(index))?;
        self.files.versions.push(Version::File(index.to_path_buf(), Arc::new(file)));
        let directory = index.parent().unwrap_or(Path::new(""));
        self.add_shards(index, is_compared, content, |name| Ok(Place::Path(directory.join(name))))
    }

    fn add_remote_index(&mut self, index: &Location) -> Result<()> {
        self.add_opened_index(&object::open(index, FIRST_BYTES, self.check)?)
    }

    fn add_opened_index(&mut self, index: &Object) -> Result<()> {
        let bytes = find::read_all(index, INDEX_BYTES_MAX, self.check)?;
        let is_compared = self.compare.map_or(Ok(false), |compare| compare(index.path(), &bytes))?;
        let content = index::read(bytes.as_slice()).map_err(|fault| fault.at(index.path()))?;
        self.files.versions.push(Version::Object(index.location().clone(), index.version().clone()));
        self.add_shards(index.path(), is_compared, content, |name| index.location().sibling(name).map(Place::Url))
    }

    fn add_shards(
        &mut self,
        index: &Path,
        is_compared: bool,
        content: Index,
        place_of: impl Fn(&Name) -> Result<Place>,
    ) -> Result<()> {
        let path: Arc<Path> = Arc::from(index);
        let Index { shards, metadata, state } = content;
        let before = self.files.index_entries.len();
        let mut places = Vec::with_capacity(shards.len());
        for (file, names) in shards {
            let position = self.files.places.len() + places.len();
            self.files.index_entries.extend(names.into_iter().map(|name| IndexEntry {
                name,
                file: position,
                index: Arc::clone(&path),
            }));
            places.push(place_of(&file)?);
        }
        let listed = self.files.index_entries.len() - before;
        let state = state.as_ref().map(place_of).transpose()?;
        let listing =
            Listing { is_compared, listed, metadata, state, ..Listing::of(index, parent_of(&absolute(index))) };
        self.add_listing(listing, places);
        Ok(())
    }

    fn add_listing(&mut self, listing: Listing, places: Vec<Place>) {
        let begin = self.files.places.len();
        self.files.places.extend(places);
        self.files.listings.push(Listing { files: begin..self.files.places.len(), ..listing });
    }
}

/// Adds to the error for a missing path what the caller may have meant, or the name beside it that is most similar.
fn suggest(error: Error, path: &Path) -> Error {
    if let Some(file) = path.ancestors().map(|each| each.components().as_path()).find(|each| each.is_file()) {
        return error.note(&format!("{} is a file, not a directory", file.display()));
    }
    if let Some(intended) = intended(path).or_else(|| repository_of(path)) {
        return error.note(&intended);
    }
    let missing = file_name(path);
    let similarity = |name: &str| strsim::jaro_winkler(&missing, name);
    let mut names = names_beside(path);
    if names.iter().any(|name| is_checkpoint_name(name)) {
        names.retain(|name| is_checkpoint_name(name));
    } else {
        names.retain(|name| similarity(name) >= SIMILARITY_MIN);
    }
    names.sort_unstable();
    match names.iter().rev().max_by(|a, b| similarity(a).total_cmp(&similarity(b))) {
        Some(name) => error.note(&format!("check the path: its directory holds {name}")),
        None => error.note("check the path"),
    }
}

/// Returns what the caller may have meant by a path that does not exist: a URL with a mistake, or the home directory.
pub fn intended(path: &Path) -> Option<String> {
    if path.starts_with("~") {
        return Some("`~` is not replaced by the home directory here; pass an absolute path".to_owned());
    }
    location::with_slashes(path.to_str()?).map(|url| format!("the URL is {url}"))
}

/// Returns the repository of the Hub that a path may name.
fn repository_of(path: &Path) -> Option<String> {
    let text = path.to_str()?;
    let is_name = |part: &str| {
        part.starts_with(|first: char| first.is_ascii_alphanumeric())
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
    };
    let (owner, rest) = text.strip_prefix("huggingface.co/").unwrap_or(text).split_once('/')?;
    let (name, file) = rest.split_once('/').unwrap_or((rest, FILE_SUFFIX));
    let is_repository = is_name(owner) && is_name(name) && !is_checkpoint_name(name) && is_checkpoint_name(file);
    (is_repository && !Path::new(owner).exists())
        .then(|| format!("a repository of the Hugging Face Hub is hf://{owner}/{rest}"))
}

fn is_checkpoint_name(name: &str) -> bool {
    is_index(name) || [FILE_SUFFIX, TENSORS_SUFFIX].iter().any(|suffix| name.ends_with(suffix))
}

/// Lists the first names in the directory of a path, or none if it cannot be read.
fn names_beside(path: &Path) -> Vec<String> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = fs::read_dir(directory).into_iter().flatten().take(NAMES_BESIDE_MAX).flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Returns an absolute path or a URL without its last part.
pub fn parent_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

/// Returns the absolute path of a local file as text, or a URL. The names of files in both are as a manifest lists them: in
/// URLs of HTTP they are encoded.
pub fn absolute(path: &Path) -> String {
    let text = path.to_string_lossy();
    match location::is_url(path) {
        true if text.starts_with("http") => percent_decode_str(&text).decode_utf8_lossy().into_owned(),
        true => text.into_owned(),
        false => std::path::absolute(path).as_deref().unwrap_or(path).to_string_lossy().into_owned(),
    }
}

/// Returns the `file://` URL of a local path, which any bytes can be part of.
pub(super) fn file_url(path: &Path) -> String {
    let absolute = std::path::absolute(path);
    let bytes = absolute.as_deref().unwrap_or(path).as_os_str().as_bytes();
    format!("file:///{}", percent_encode(bytes.strip_prefix(b"/").unwrap_or(bytes), NON_ALPHANUMERIC))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the location of a remote URL, or `None` for a local path or a `file://` URL.
///
/// # Errors
/// `invalid-argument` for a URL with an unknown scheme.
pub fn url_of(path: &Path) -> Result<Option<Location>> {
    match path.to_str() {
        Some(text) if location::is_url(path) && !text.starts_with("file://") => Location::parse(text).map(Some),
        _ => Ok(None),
    }
}

/// Returns the place of the one file that a path or URL names.
pub fn place_of(path: &Path) -> Result<Place> {
    Ok(match url_of(path)? {
        Some(location) => Place::Url(location),
        None => Place::Path(local_path(path)?),
    })
}

/// Returns the place of a file below a directory or the URL of one.
pub fn place_below(directory: &Path, name: &Name) -> Result<Place> {
    Ok(match url_of(directory)? {
        Some(location) => Place::Url(location.child(name)?),
        None => Place::Path(local_path(directory)?.join(name)),
    })
}

/// Returns the path of a local file, which a `file://` URL may name.
///
/// # Errors
/// `invalid-argument` for a path with a NUL byte, or a `file://` URL with a host.
pub fn local_path(path: &Path) -> Result<PathBuf> {
    let refused = |message: &str| Err(Error::new(Kind::InvalidArgument, message).at(path));
    if path.as_os_str().as_bytes().contains(&0) {
        return refused("a path cannot contain a NUL byte");
    }
    let Some(rest) = path.to_str().and_then(|text| text.strip_prefix("file://")) else {
        return Ok(path.to_path_buf());
    };
    let rest = rest.strip_prefix("localhost").unwrap_or(rest);
    if !rest.starts_with('/') {
        return refused("a file:// URL names a path of this machine; write file:///path");
    }
    let decoded: Vec<u8> = percent_decode_str(rest).collect();
    if decoded.contains(&0) {
        return refused("a path cannot contain a NUL byte");
    }
    Ok(PathBuf::from(OsString::from_vec(decoded)))
}

/// Checks that a path can belong to a local file.
///
/// # Errors
/// `invalid-argument` for a URL or a path with a NUL byte.
pub fn check_local(path: &Path) -> Result<PathBuf> {
    match url_of(path)? {
        None => local_path(path),
        Some(location) => {
            let message = "this step takes a local path only";
            Err(Error::new(Kind::InvalidArgument, message).at(location.to_string()))
        }
    }
}
