//! Headers that one process reads and shares with others, which open the same files without reading the headers again.
//!
//! ```text
//! for each file   file length as u64 | n as u64 | m as u64 | n bytes of name | m bytes of JSON
//! ```

use super::{Checkpoint, OpenFile};
use crate::error::{Error, Kind, Result};
use crate::format::header::Header;
use crate::num::{to_u64, to_usize};
use crate::source::{Files, Source};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Size of an encoded number in bytes.
const NUMBER_BYTES: usize = 8;

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
    json: &'a [u8],
}

impl Checkpoint {
    /// Encodes the headers of all files for [`open_with_headers`](Checkpoint::open_with_headers) in another process.
    ///
    /// # Errors
    /// Those of [`Header::read_json`]. The headers are read again.
    pub fn export_headers(&self) -> Result<Vec<u8>> {
        let mut shared = Vec::new();
        for OpenFile { source, .. } in &self.files {
            let (name, json) = (file_name(&source.path), Header::read_json(source)?);
            let length = |bytes: &[u8]| to_u64(bytes.len());
            for number in [source.length, length(name), length(&json)] {
                shared.extend(number.to_le_bytes());
            }
            shared.extend(name);
            shared.extend(json);
        }
        Ok(shared)
    }

    /// Opens every file that `paths` resolve to, with headers that another process read.
    ///
    /// File names and lengths are compared at once, and a header before the first data of its file is read.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`]; `malformed` if the files do not match the headers.
    pub fn open_with_headers<P: AsRef<Path>>(paths: &[P], shared: &[u8]) -> Result<Checkpoint> {
        let files = Files::resolve(paths)?;
        let headers = parse(shared)?;
        if headers.len() != files.paths.len() {
            let found = files.paths.len();
            let message = format!("found {found} files, but the shared headers describe {}", headers.len());
            return Err(locate(mismatch(message), files.paths.first()));
        }
        Checkpoint::from_files(files, |index, source| {
            let headers = headers.get(index).ok_or_else(|| mismatch("no shared header describes the file".into()))?;
            headers.check(&source).map_err(|error| error.at(&source.path))?;
            let header = Header::parse(headers.json, source.length).map_err(|error| error.at(&source.path))?;
            let expected = Some(HeaderDigest { digest: digest(headers.json), is_checked: AtomicBool::new(false) });
            Ok(OpenFile { source: Arc::new(source), header, expected })
        })
    }

    /// Checks that these files begin with the headers that another process read.
    ///
    /// # Errors
    /// `malformed` for a different header, and those of [`Header::read_json`].
    pub fn check_headers(&self, sources: impl Iterator<Item = usize>) -> Result<()> {
        for file in sources.filter_map(|index| self.files.get(index)) {
            let is_due = |expected: &&HeaderDigest| !expected.is_checked.load(Ordering::Relaxed);
            let Some(expected) = file.expected.as_ref().filter(is_due) else { continue };
            if digest(&Header::read_json(&file.source)?) != expected.digest {
                let message = "the header of the file differs from the shared header".to_owned();
                return Err(mismatch(message).at(&file.source.path));
            }
            expected.is_checked.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl SharedHeader<'_> {
    fn check(&self, source: &Source) -> Result<()> {
        let name = file_name(&source.path);
        if name != self.name {
            return Err(mismatch(format!(
                "the shared header at this position describes {:?}",
                String::from_utf8_lossy(self.name)
            )));
        }
        if source.length != self.file_bytes {
            let SharedHeader { file_bytes, .. } = self;
            return Err(mismatch(format!(
                "the file has {} bytes, but the shared header describes one of {file_bytes} bytes",
                source.length
            )));
        }
        Ok(())
    }
}

fn parse(mut shared: &[u8]) -> Result<Vec<SharedHeader<'_>>> {
    let mut headers = Vec::new();
    while !shared.is_empty() {
        let file_bytes = take_number(&mut shared)?;
        let lengths = [take_number(&mut shared)?, take_number(&mut shared)?];
        let [name, json] = lengths.map(|length| take(&mut shared, to_usize(length)));
        headers.push(SharedHeader { file_bytes, name: name?, json: json? });
    }
    Ok(headers)
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

fn locate(error: Error, path: Option<&PathBuf>) -> Error {
    match path {
        Some(path) => error.at(path),
        None => error,
    }
}

fn file_name(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_encoded_bytes()
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}
