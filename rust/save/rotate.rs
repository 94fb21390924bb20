//! Rotation of the keys of encrypted files: only the key slots in their headers change.

use crate::encryption::key::EncryptionKey;
use crate::error::{Error, Kind, Result};
use crate::format::encryption::Rotation;
use crate::format::header::Header;
use crate::num::to_u64;
use crate::os::local_file::LocalFile;
use crate::os::sigint::Watch;
use crate::remote::location::Location;
use crate::save::file_kernel::FileKernel;
use crate::source::files::Files;
use crate::source::{Place, Source};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

/// Makes all local files that `paths` resolve to open with another key. Their data is not encrypted again.
///
/// The slot for the new key is on the disk before that of the old key is removed. After an error, some files may open with
/// the old key, with both, or with the new one; a second call with the old key completes the others.
///
/// # Errors
/// Those of [`Files::resolve`], of [`EncryptionKey::for_save`], of opening the files and of [`Rotation::new`]; `io` if a file cannot be written;
/// `invalid-argument` for an object.
pub fn rotate<P: AsRef<Path>>(
    paths: &[P],
    old: &EncryptionKey,
    new: &EncryptionKey,
    kernel: &dyn FileKernel,
) -> Result<()> {
    let watch = Watch::begin();
    let new = new.for_save()?;
    for place in Files::resolve(paths, &|| watch.check())?.places {
        watch.check()?;
        match place {
            Place::Path(path) => rotate_file(&path, old, &new, kernel)?,
            Place::Url(location) => return Err(unchangeable(&location)),
            Place::Opened(object) => return Err(unchangeable(object.location())),
        }
    }
    Ok(())
}

fn unchangeable(location: &Location) -> Error {
    let message = "the header of an object cannot be changed; save the object again with the new key";
    Error::new(Kind::InvalidArgument, message).at(location.to_string())
}

fn rotate_file(path: &Path, old: &EncryptionKey, new: &EncryptionKey, kernel: &dyn FileKernel) -> Result<()> {
    let local = Arc::new(LocalFile::open(path)?);
    let source = Source::File(Arc::clone(&local));
    let json = Header::read_bytes(&source)?;
    let header = Header::parse(&json, local.length).map_err(|error| error.at(path))?;
    let rotation = Rotation::new(&header, &json, local.length, old, new).map_err(|error| error.at(path))?;
    let failed = |error| Error::from_io(error, path, "cannot write a key slot");
    // The path may name another file by now.
    let own = format!("/proc/self/fd/{}", local.file.as_raw_fd());
    let file = OpenOptions::new().write(true).open(own).map_err(failed)?;
    for (offset, text) in rotation.writes {
        write_all(kernel, &file, text.as_bytes(), offset).map_err(|error| failed(error).offset(offset))?;
        kernel.flush(&file).map_err(failed)?;
    }
    Ok(())
}

fn write_all(kernel: &dyn FileKernel, file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match kernel.write_at(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = bytes.get(count..).unwrap_or_default();
                offset = offset.saturating_add(to_u64(count));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
