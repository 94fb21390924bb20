//! Headers that one process reads for many: what it hands to the others, and
//! how those open the same files without reading the headers again.
//!
//! ```text
//! for each file   length as u64 | n as u64 | m as u64 | n bytes of its name | m bytes of its header's JSON
//! ```

use super::{Checkpoint, OpenFile};
use crate::error::{Error, Kind, Result};
use crate::format::header::Header;
use crate::source::{Files, Source};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Bytes of a number.
const NUMBER_BYTES: usize = 8;

/// The digest of a header that another process has read, to compare before bytes of the file are used.
#[derive(Debug)]
pub(super) struct HeaderDigest {
    digest: u64,
    is_checked: OnceLock<()>,
}

/// What one file is said to be.
struct SharedHeader<'a> {
    file_bytes: u64,
    name: &'a [u8],
    json: &'a [u8],
}

impl Checkpoint {
    /// What another process needs to open the same files without reading the headers.
    ///
    /// # Errors
    /// Those of [`Header::read_json`]: the headers are read once more.
    pub fn export_headers(&self) -> Result<Vec<u8>> {
        let mut shared = Vec::new();
        for OpenFile { source, .. } in &self.files {
            let (name, json) = (file_name(&source.path), Header::read_json(source)?);
            let length = |bytes: &[u8]| u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            for number in [source.length, length(name), length(&json)] {
                shared.extend(number.to_le_bytes());
            }
            shared.extend(name);
            shared.extend(json);
        }
        Ok(shared)
    }

    /// Opens every file that `paths` stand for, with the headers that another process has read.
    ///
    /// Names and lengths of the files are compared at once, and a header when the first bytes of its file are wanted.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`]; `malformed` for other files than the headers are of.
    pub fn open_with_headers<P: AsRef<Path>>(paths: &[P], shared: &[u8]) -> Result<Checkpoint> {
        let files = Files::resolve(paths)?;
        let headers = parse(shared)?;
        if headers.len() != files.paths.len() {
            let found = files.paths.len();
            let message = format!("{found} files here, but the headers that were shared are of {}", headers.len());
            return Err(locate(other(message), files.paths.first()));
        }
        Checkpoint::of(files, |index, source| {
            let headers = headers.get(index).ok_or_else(|| other("a file too many".into()))?;
            headers.check(&source).map_err(|error| error.at(&source.path))?;
            let header = Header::parse(headers.json, source.length).map_err(|error| error.at(&source.path))?;
            let expected = Some(HeaderDigest { digest: digest(headers.json), is_checked: OnceLock::new() });
            Ok(OpenFile { source: Arc::new(source), header, expected })
        })
    }

    /// Makes sure that these files begin with the headers that somebody else has read for this process.
    ///
    /// # Errors
    /// `malformed` for another header, and those of [`Header::read_json`].
    pub fn check_headers(&self, sources: impl Iterator<Item = usize>) -> Result<()> {
        for file in sources.filter_map(|index| self.files.get(index)) {
            let Some(expected) = file.expected.as_ref().filter(|expected| expected.is_checked.get().is_none()) else {
                continue;
            };
            if digest(&Header::read_json(&file.source)?) != expected.digest {
                let message = "the file's header is another one here than where it was read for all".to_owned();
                return Err(other(message).at(&file.source.path));
            }
            expected.is_checked.get_or_init(|| ());
        }
        Ok(())
    }
}

impl SharedHeader<'_> {
    fn check(&self, source: &Source) -> Result<()> {
        let name = file_name(&source.path);
        if name != self.name {
            return Err(other(format!(
                "the shared header in this place is of {:?}",
                String::from_utf8_lossy(self.name)
            )));
        }
        if source.length != self.file_bytes {
            let SharedHeader { file_bytes, .. } = self;
            return Err(other(format!(
                "the file has {} bytes here, and {file_bytes} where its header was read",
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
        let [name, json] = lengths.map(|length| take(&mut shared, usize::try_from(length).unwrap_or(usize::MAX)));
        headers.push(SharedHeader { file_bytes, name: name?, json: json? });
    }
    Ok(headers)
}

fn take_number(shared: &mut &[u8]) -> Result<u64> {
    let bytes = take(shared, NUMBER_BYTES)?;
    Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

fn take<'a>(shared: &mut &'a [u8], count: usize) -> Result<&'a [u8]> {
    let cut_off =
        || Error::new(Kind::InvalidArgument, "the shared headers are cut off; pass them on as they were made");
    let (taken, left) = shared.split_at_checked(count).ok_or_else(cut_off)?;
    *shared = left;
    Ok(taken)
}

fn other(message: String) -> Error {
    Error::new(Kind::Malformed, message + "; give every rank the same checkpoint")
}

fn locate(error: Error, path: Option<&std::path::PathBuf>) -> Error {
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
