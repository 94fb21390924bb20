//! Which files of a directory, or of a remote prefix, are its checkpoint.

use crate::error::{Error, Kind, Result};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

/// Suffix of the index file of a sharded checkpoint, a convention of the Hugging Face libraries.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";
/// Suffix of the files of a checkpoint.
pub(crate) const FILE_SUFFIX: &str = ".safetensors";
/// Suffixes of PyTorch files.
const PYTORCH_SUFFIXES: [&str; 4] = [".bin", ".ckpt", ".pt", ".pth"];

/// Checkpoint of a directory.
pub(super) enum Chosen<N> {
    /// Name of its index file.
    Index(N),
    /// Sorted names of its files.
    Files(Vec<N>),
}

/// Chooses the checkpoint among the names in a directory.
///
/// # Errors
/// `is-a-directory` if no name is that of a safetensors file, `invalid-argument` if there are several index files.
pub(super) fn choose<N: AsRef<Path> + Ord>(names: Vec<N>) -> Result<Chosen<N>> {
    let has_suffix = |name: &N, suffix: &str| name.as_ref().as_os_str().as_encoded_bytes().ends_with(suffix.as_bytes());
    let (mut indexes, others): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| has_suffix(name, INDEX_SUFFIX));
    let (mut files, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|name| has_suffix(name, FILE_SUFFIX));
    // A directory may contain several variants. The one without a suffix is the default.
    let plain = format!("model{INDEX_SUFFIX}");
    if let Some(position) = indexes.iter().position(|name| name.as_ref().as_os_str() == plain.as_str()) {
        return Ok(Chosen::Index(indexes.swap_remove(position)));
    }
    match (indexes.len(), files.is_empty()) {
        (0, true) => {
            let remedy = match others.iter().any(|name| PYTORCH_SUFFIXES.iter().any(|suffix| has_suffix(name, suffix)))
            {
                true => ", but PyTorch files; convert them with `fst convert DIRECTORY model.safetensors`",
                false => "; give the path of a file or of a checkpoint",
            };
            Err(Error::new(Kind::IsADirectory, format!("this directory holds no *{FILE_SUFFIX} file{remedy}")))
        }
        (0, false) => {
            files.sort();
            Ok(Chosen::Files(files))
        }
        (1, _) => Ok(Chosen::Index(indexes.swap_remove(0))),
        (count, _) => Err(Error::new(
            Kind::InvalidArgument,
            format!("this directory holds {count} index files; give the path of one of them"),
        )),
    }
}

/// Lists the names in a directory.
pub(crate) fn names_in(directory: &Path) -> Result<Vec<OsString>> {
    let failed = |error: io::Error| Error::from_io(error, directory, "cannot list");
    let names = fs::read_dir(directory).map_err(failed)?.map(|entry| Ok(entry?.file_name()));
    names.collect::<io::Result<_>>().map_err(failed)
}
