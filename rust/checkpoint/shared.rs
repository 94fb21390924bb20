//! Headers that one process reads and shares with others, which open the same files without reading the headers again.
//! The first bytes of an object, which came with its header, are shared, too, so that no process requests them again.
//!
//! ```text
//! k as u64 | k bytes of URLs that the first process was given, and of the ids of the saves that it found
//! for each file   file length, n, k, h, m as u64
//!                 n bytes of name | k bytes of object | h first bytes of the object | m bytes of header
//! ```

use super::{Checkpoint, OpenFile, OpenOptions, one_save};
use crate::error::{Error, Kind, Result};
use crate::format::header::Header;
use crate::num::{to_u64, to_usize};
use crate::os::retry::SharedCheck;
use crate::os::sigint::Watch;
use crate::remote::find;
use crate::remote::find::location::Location;
use crate::remote::find::version::Version;
use crate::remote::transfer::object;
use crate::source::files::{self, Files};
use crate::source::replaced::SAVE_KEY;
use crate::source::{Place, Source};
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Size of an encoded number in bytes.
const NUMBER_BYTES: usize = 8;
/// Number of fields of a record that have a length.
const FIELDS: usize = 4;

/// Digest of a header that another process read. It is compared before data of the file is read.
#[derive(Debug)]
pub(super) struct HeaderDigest {
    digest: u64,
    is_checked: AtomicBool,
}

/// Decoded record of one file.
struct SharedHeader<'a> {
    file_bytes: u64,
    name: &'a [u8],
    /// Encoded [`SharedObject`], or nothing for a local file.
    object: &'a [u8],
    /// First bytes of the object.
    head: &'a [u8],
    header: &'a [u8],
}

/// Object of one version, which other processes open without a request.
#[derive(Serialize, Deserialize)]
struct SharedObject {
    url: String,
    version: Version,
}

impl Checkpoint {
    /// Encodes the headers of all files for [`OpenOptions::headers`] in another process. The URLs of objects are among
    /// them, with the secrets that they may have. Fails with the errors of [`Header::read_bytes`]. The headers are read
    /// again.
    pub fn export_headers(&self) -> Result<Vec<u8>> {
        let encode = |error: serde_json::Error| Error::new(Kind::Internal, error.to_string());
        let urls: Vec<String> = self.urls.iter().map(Location::secret_url).collect();
        let urls = serde_json::to_vec(&(urls, &self.saves)).map_err(encode)?;
        let watch = Watch::begin();
        let mut shared = [to_u64(urls.len()).to_le_bytes().as_slice(), urls.as_slice()].concat();
        for source in self.sources() {
            let header = Header::read_bytes(source, &|| watch.check())?;
            let (name, object, head) = match source.stored() {
                Source::File(_) | Source::Units(_) => (file_name(source.path()), Vec::new(), Vec::new()),
                Source::Object(object) => {
                    let name = object.location().file_name().as_bytes();
                    let known = SharedObject { url: object.location().secret_url(), version: object.version().clone() };
                    (name, serde_json::to_vec(&known).map_err(encode)?, object.first_bytes(&|| watch.check())?)
                }
            };
            let fields = [name, &object, &head, &header];
            shared.extend(source.length().to_le_bytes());
            fields.iter().for_each(|field| shared.extend(to_u64(field.len()).to_le_bytes()));
            fields.iter().for_each(|field| shared.extend(*field));
        }
        Ok(shared)
    }

    /// Opens every file that `paths` resolve to, with headers that another process read.
    pub(super) fn open_with_headers<P: AsRef<Path>>(
        paths: &[P],
        shared: &[u8],
        options: &OpenOptions,
    ) -> Result<Checkpoint> {
        let (urls, saves, headers) = parse(shared)?;
        check_urls(paths, &urls)?;
        let objects = headers.iter().map(SharedHeader::object).collect::<Result<Vec<_>>>()?;
        let watch = Watch::begin();
        let check: SharedCheck<'_> = &|| watch.check();
        let at_first = |error: Error| paths.iter().take(1).fold(error, Error::at);
        let are_remote = !objects.is_empty()
            && objects.iter().all(Option::is_some)
            && paths.iter().all(|path| matches!(files::url_of(path.as_ref()), Ok(Some(_))));
        let resolve = || {
            if !are_remote {
                return Files::resolve(paths, check);
            }
            let place = |object: &SharedObject| Location::parse(&object.url).map(Place::Url);
            let places = objects.iter().flatten().map(place).collect::<Result<Vec<_>>>()?;
            Ok(Files { places, urls: urls.clone(), ..Files::default() })
        };
        let open_file = |index: usize, place: &Place| {
            let undescribed = || mismatch("no shared header describes the file".into());
            let shared = headers.get(index).ok_or_else(undescribed)?;
            let source = match (place, objects.get(index)) {
                (Place::Url(location), Some(Some(object))) => {
                    let (version, head) = (object.version.clone(), shared.head.to_vec());
                    Source::Object(Arc::new(object::open_known(location, shared.file_bytes, version, head)?))
                }
                _ => Source::open(place, check)?,
            };
            shared.check(&source, place).map_err(|error| error.at(source.path()))?;
            let file = OpenFile::new(source, shared.header, options, check)?;
            // Every request for an object asks for the version whose header was read.
            let digest = || HeaderDigest { digest: digest(shared.header), is_checked: AtomicBool::new(false) };
            let expected = (!file.source.is_remote()).then(digest);
            Ok(OpenFile { expected, ..file })
        };
        let open = |files: Files| {
            let found: Vec<_> = files.listings.iter().filter_map(|listing| listing.metadata.get(SAVE_KEY)).collect();
            if !are_remote && !found.iter().copied().eq(&saves) {
                let message = "the checkpoint was replaced while the ranks opened it; load it again";
                return Err(at_first(Error::new(Kind::SourceChanged, message)));
            }
            if headers.len() != files.places.len() {
                let found = files.places.len();
                let message = format!("found {found} files, but the shared headers describe {}", headers.len());
                return Err(at_first(mismatch(message)));
            }
            Ok(Checkpoint { saves: saves.clone(), ..Checkpoint::from_files(files, options.verify.partial, open_file)? })
        };
        one_save::open_files(resolve, open, check)
    }

    /// Checks that these files begin with the headers that another process read. Fails with `malformed` for a different
    /// header, and with the errors of [`Header::read_bytes`].
    pub fn check_headers(&self, sources: impl Iterator<Item = usize>) -> Result<()> {
        let mut watch = None;
        for file in sources.filter_map(|index| self.files.get(index)) {
            let is_due = |expected: &&HeaderDigest| !expected.is_checked.load(Ordering::Relaxed);
            let Some(expected) = file.expected.as_ref().filter(is_due) else { continue };
            let watch = watch.get_or_insert_with(Watch::begin);
            if digest(&Header::read_bytes(&file.source, &|| watch.check())?) != expected.digest {
                let message = "the header of the file differs from the shared header".to_owned();
                return Err(mismatch(message).at(file.source.path()));
            }
            expected.is_checked.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl SharedHeader<'_> {
    fn object(&self) -> Result<Option<SharedObject>> {
        let invalid = |error| mismatch(format!("a shared header describes no object: {error}"));
        (!self.object.is_empty()).then(|| serde_json::from_slice(self.object).map_err(invalid)).transpose()
    }

    fn check(&self, source: &Source, place: &Place) -> Result<()> {
        if place.file_name() != self.name {
            return Err(mismatch(format!(
                "the shared header at this position describes {:?}",
                String::from_utf8_lossy(self.name)
            )));
        }
        if source.length() != self.file_bytes {
            let SharedHeader { file_bytes, .. } = self;
            return Err(mismatch(format!(
                "the file has {} bytes, but the shared header describes one of {file_bytes} bytes",
                source.length()
            )));
        }
        Ok(())
    }
}

/// Compares the URLs among the paths with those that the other process was given. Paths of local files may differ.
fn check_urls<P: AsRef<Path>>(paths: &[P], others: &[Location]) -> Result<()> {
    let own = paths.iter().map(|path| files::url_of(path.as_ref())).collect::<Result<Vec<_>>>()?;
    let own: Vec<Location> = own.into_iter().flatten().collect();
    let (mut own_urls, mut other_urls) = (own.iter(), others.iter());
    loop {
        let message = match (own_urls.next(), other_urls.next()) {
            (None, None) => return Ok(()),
            (Some(own), Some(other)) if find::is_same(own, other) => continue,
            (Some(own), Some(other)) if own.to_string() == other.to_string() => format!("the queries of {own} differ"),
            (Some(own), Some(other)) => format!("this rank was given {own}, and rank 0 {other}"),
            (Some(own), None) => format!("this rank was given {own}, and rank 0 a local path"),
            (None, Some(other)) => format!("this rank was given a local path, and rank 0 {other}"),
        };
        return Err(Error::new(Kind::InvalidArgument, message + "; give every rank the same URL"));
    }
}

/// Returns the URLs that the other process was given, the ids of the saves that it found, and the headers.
fn parse(mut shared: &[u8]) -> Result<(Vec<Location>, Vec<String>, Vec<SharedHeader<'_>>)> {
    let length = take_number(&mut shared)?;
    let (urls, saves): (Vec<String>, _) = serde_json::from_slice(take(&mut shared, to_usize(length))?)
        .map_err(|error| mismatch(format!("the shared headers have no URLs: {error}")))?;
    let urls = urls.iter().map(|url| Location::parse(url)).collect::<Result<Vec<_>>>()?;
    let mut headers = Vec::new();
    while !shared.is_empty() {
        let file_bytes = take_number(&mut shared)?;
        let mut lengths = [0; FIELDS];
        for length in &mut lengths {
            *length = take_number(&mut shared)?;
        }
        let [name, object, head, header] = lengths.map(|length| take(&mut shared, to_usize(length)));
        headers.push(SharedHeader { file_bytes, name: name?, object: object?, head: head?, header: header? });
    }
    Ok((urls, saves, headers))
}

fn take_number(shared: &mut &[u8]) -> Result<u64> {
    let bytes = take(shared, NUMBER_BYTES)?;
    Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

fn take<'a>(shared: &mut &'a [u8], count: usize) -> Result<&'a [u8]> {
    let cut_off = || {
        Error::new(Kind::InvalidArgument, "the shared headers are cut off; pass the bytes that export_headers returned")
    };
    let (taken, left) = shared.split_at_checked(count).ok_or_else(cut_off)?;
    *shared = left;
    Ok(taken)
}

fn mismatch(message: String) -> Error {
    Error::new(Kind::Malformed, message + "; give every rank the same checkpoint")
}

fn file_name(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_encoded_bytes()
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}
