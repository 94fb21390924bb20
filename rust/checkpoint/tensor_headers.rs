//! Headers of single tensors, which only `.tensors` files have.

use super::Checkpoint;
use crate::digest::{Algorithm, Digest};
use crate::error::{Error, Kind, Result};
use crate::format::header::{Entry, Header};
use crate::format::tensors::tensor_header::{self, TensorHeader};
use crate::source::Source;
use std::sync::Arc;

/// Hash of a tensor.
#[derive(Clone, Debug)]
pub(super) struct TensorHash {
    /// SHA-256, or CRC-32 if the file has no other.
    pub(super) digest: Digest,
    /// First bytes of what is hashed, before the data.
    pub(super) hashed: Arc<[u8]>,
}

/// Reads the hashes of all tensors of a `.tensors` file, in the order of [`Header::entries`]. Fails with `integrity`
/// for a tensor without a hash. The error has no path.
pub(super) fn hashes(source: &Source, header: &Header) -> Result<Vec<TensorHash>> {
    let entries: Vec<_> = header.entries().collect();
    let headers = tensor_header::read_all(source, &entries)?;
    let hash = |(entry, TensorHeader { hashes, hashed, .. }): (&Entry<'_>, TensorHeader)| {
        let is_sha256 = |hash: &&Digest| hash.algorithm == Algorithm::Sha256;
        let digest = *hashes.iter().find(is_sha256).or(hashes.first()).ok_or_else(|| {
            let message = "the file carries no hash of the tensor, so that it cannot be verified";
            Error::new(Kind::Integrity, message).tensor(entry.name)
        })?;
        Ok(TensorHash { digest, hashed: hashed.into() })
    };
    entries.iter().zip(headers).map(hash).collect()
}

impl Checkpoint {
    /// Reads and checks the headers of tensors of `.tensors` files, in the order of `names`. Headers of objects are
    /// requested many at once. Fails with `invalid-argument` for a tensor of a safetensors file; `malformed` if a
    /// header does not agree with the metadata of its file.
    pub fn tensor_headers(&self, names: &[String]) -> Result<Vec<TensorHeader>> {
        let found =
            |(index, name): (usize, &String)| self.find(name).map(|(file, entry)| (file, entry.begin, index, entry));
        let mut found = names.iter().enumerate().map(found).collect::<Result<Vec<_>>>()?;
        found.sort_by_key(|&(file, begin, index, _)| (file, begin, index));
        let mut headers = Vec::with_capacity(names.len());
        for of_file in found.chunk_by(|(one, ..), (two, ..)| one == two) {
            let Some(&(file, ..)) = of_file.first() else { continue };
            let source = self.source(file)?;
            let entries: Vec<_> = of_file.iter().map(|(.., entry)| *entry).collect();
            let read = tensor_header::read_all(source, &entries).map_err(|error| error.at(source.path()))?;
            headers.extend(of_file.iter().map(|&(_, _, index, _)| index).zip(read));
        }
        headers.sort_by_key(|(index, _)| *index);
        Ok(headers.into_iter().map(|(_, header)| header).collect())
    }
}
