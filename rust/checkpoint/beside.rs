//! Small files beside the files of a checkpoint.

use super::Checkpoint;
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::os::retry::Check;
use crate::remote::find::name::Name;
use crate::source::{Place, Source};
use std::collections::HashSet;
use std::path::Path;

/// Largest size of such a file.
const BYTES_MAX: u64 = 64 << 20;

/// File beside a checkpoint.
#[derive(Clone, Debug)]
pub struct FileBeside {
    /// Path, or URL without secrets.
    pub path: String,
    /// Content.
    pub bytes: Vec<u8>,
}

impl Checkpoint {
    /// Reads the file with this name in the first directory of the checkpoint's files that has one, or at the first prefix
    /// of its objects. Returns `None` if there is no such file. The query of a URL authorizes a single object, so no
    /// request is sent for files beside it.
    ///
    /// # Errors
    /// The errors of [`Source::open`] and of reading it, besides `file-not-found`; `malformed` for a file of more than
    /// 64 MiB.
    pub fn read_beside(&self, name: &str, check: Check<'_>) -> Result<Option<FileBeside>> {
        let name = Name::parse(name).map_err(|reason| Error::new(Kind::InvalidArgument, reason))?;
        let mut tried = HashSet::new();
        for source in self.sources() {
            let place = match source.stored() {
                Source::Object(object) if object.location().has_query() => continue,
                Source::Object(object) => Place::Url(object.location().sibling(&name)?),
                file => Place::Path(file.path().parent().unwrap_or(Path::new("")).join(name.as_str())),
            };
            if !tried.insert(place.to_text()) {
                continue;
            }
            let file = match Source::open(&place, check) {
                Err(error) if error.kind() == Kind::FileNotFound => continue,
                opened => opened?,
            };
            let path = file.path().to_string_lossy().into_owned();
            if file.length() > BYTES_MAX {
                let message = format!("the file has {} bytes, but at most {BYTES_MAX} are read", file.length());
                return Err(Error::new(Kind::Malformed, message).at(path));
            }
            let mut bytes = vec![0; to_usize(file.length())];
            file.read(0, &mut bytes, check)?;
            return Ok(Some(FileBeside { path, bytes }));
        }
        Ok(None)
    }
}
