//! Encrypted pieces of the tensors of a `.tensors` file, which readers see as [`Chunks`].

use super::cipher::Cipher;
use super::encryption::{Encryption, Pieces};
use super::tensor_header;
use crate::encryption::chunks::{CHUNK_BYTES_MAX, Chunks, no_tag};
use crate::encryption::key::EncryptionKey;
use crate::encryption::secret::{Derivation, Key};
use crate::encryption::slot::NO_KEY;
use crate::error::{Error, Kind, Result};
use crate::format::header::Header;
use crate::num::to_usize;
use crate::os::sigint::Watch;
use crate::profile::{self, Stage};
use crate::source::Source;
use crate::units::{Unit, Units};

/// Pieces of the tensors of a file, with the key to decrypt them.
#[derive(Debug)]
pub struct TensorsChunks {
    /// `None` if no tensor has data.
    cipher: Option<Cipher>,
    units: Units,
    /// Pieces of each tensor with data.
    pieces: Vec<Pieces>,
}

impl TensorsChunks {
    /// Reads the headers of all tensors of an encrypted file, many of an object at once. If there are several keys,
    /// takes the one that decrypts the smallest tensor, since the file does not name its key. Fails with `malformed` if
    /// a header is not valid; `integrity` if no key is the file's, or a tensor is not encrypted;
    /// `invalid-argument` without keys. The error has no path.
    pub fn open(header: &Header, source: &Source, keys: &[EncryptionKey]) -> Result<TensorsChunks> {
        if keys.is_empty() {
            return Err(Error::new(Kind::InvalidArgument, NO_KEY));
        }
        let entries: Vec<_> = header.entries().filter(|entry| entry.begin < entry.end).collect();
        let missing = || Error::new(Kind::Internal, "no such tensor");
        let headers = tensor_header::read_all(source, &entries)?;
        let derivation = headers.first().and_then(|header| header.encryption.derivation);
        let (mut places, mut pieces) = (Vec::with_capacity(entries.len()), Vec::with_capacity(entries.len()));
        for (entry, header) in entries.iter().zip(headers) {
            let bytes = entry.end - entry.begin;
            let of_tensor = pieces_of(header.encryption, derivation).map_err(|error| error.tensor(entry.name))?;
            places.push((entry.begin..entry.end, of_tensor.size(bytes).map_err(|error| error.tensor(entry.name))?));
            pieces.push(of_tensor);
        }
        let units = Units::new(places.into_iter(), CHUNK_BYTES_MAX);
        let smallest = (0..entries.len()).min_by_key(|&index| units.tensor(index).map(|range| range.end - range.start));
        let key = match smallest.and_then(|index| Some((pieces.get(index)?, units.tensor(index)?))) {
            Some((pieces, range)) => {
                let piece = units.at_or_after(range.start).ok_or_else(missing)?;
                Some(find_key(pieces, &piece, derivation, keys, source)?)
            }
            None => None,
        };
        Ok(TensorsChunks { cipher: key.map(|key| Cipher::new(key, derivation)), units, pieces })
    }
}

impl Chunks for TensorsChunks {
    fn units(&self) -> &Units {
        &self.units
    }

    fn decrypt(&self, chunk: &Unit, data: &mut [u8]) -> Result<()> {
        let _span = profile::span(Stage::Cipher).bytes(data.len());
        let pieces = self.pieces.get(chunk.tensor).filter(|_| chunk.fits(data));
        let pieces = pieces.ok_or_else(|| no_tag(chunk, data))?;
        if self.cipher.as_ref().is_some_and(|cipher| cipher.decrypt(pieces, chunk.index, data)) {
            return Ok(());
        }
        let message = "an authentication code does not match: another key, or a changed file";
        Err(Error::new(Kind::Integrity, message).offset(chunk.range.start))
    }
}

/// Returns the pieces of a tensor. All tensors of a file have a key with the same derivation.
fn pieces_of(encryption: Encryption, derivation: Option<Derivation>) -> Result<Pieces> {
    let pieces = encryption.pieces;
    let pieces = pieces.ok_or_else(|| Error::new(Kind::Integrity, "the tensor is not encrypted"))?;
    if encryption.derivation != derivation {
        let message = "the key was derived with another salt or other limits than for other tensors";
        return Err(Error::new(Kind::Malformed, message));
    }
    Ok(pieces)
}

/// Returns the key of a file: the only one that may be it, or the first one that decrypts the first piece of the smallest
/// tensor.
fn find_key(
    pieces: &Pieces,
    first: &Unit,
    derivation: Option<Derivation>,
    keys: &[EncryptionKey],
    source: &Source,
) -> Result<Key> {
    let mut candidates = Vec::new();
    for key in keys {
        candidates.extend(key.for_tensors(derivation)?);
    }
    let refused = |message| Error::new(Kind::Integrity, message);
    if candidates.len() <= 1 {
        let no_passphrase = "the key of the file was not derived from a string; use the key itself";
        return candidates.pop().ok_or_else(|| refused(no_passphrase));
    }
    let mut encrypted = vec![0; to_usize(first.range.end - first.range.start)];
    let watch = Watch::begin();
    source.read(first.range.start, &mut encrypted, &|| watch.check())?;
    let opens = |key: &Key| Cipher::new(key.clone(), derivation).decrypt(pieces, 0, &mut encrypted.clone());
    let message = "none of the keys decrypts the smallest tensor: the file has another key, or was changed";
    candidates.into_iter().find(opens).ok_or_else(|| refused(message).offset(first.range.start))
}
