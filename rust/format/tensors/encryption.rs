//! Part of a tensor's header in an encrypted `.tensors` file: how its data is encrypted, and where the key came from.

use super::Fields;
use crate::encryption::secret::{Derivation, SALT_BYTES};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};

/// Size of a nonce in bytes.
pub const NONCE_BYTES: usize = 24;
/// Size of an authentication code in bytes.
pub const MAC_BYTES: usize = 16;
/// Smallest size of a piece in bytes.
pub const PIECE_BYTES_MIN: u64 = 1024;

/// Nonce.
pub type Nonce = [u8; NONCE_BYTES];
/// Authentication code.
pub type Mac = [u8; MAC_BYTES];

/// Number of the method that derives a key from a string.
const PASSWORD_HASH: u64 = 1;
/// Number of Argon2id in version 1.3 among the algorithms of that method.
const ARGON2ID: u64 = 2;

const CHUNK_DERIVATION: u16 = 1;
const CHUNK_PIECES: u16 = 2;
const CHUNK_WHOLE: u16 = 3;

/// Upper bound for the size of a block without the codes of its pieces, in bytes.
const FIXED_BYTES_MAX: u64 = 256;

/// Encryption of the data of one tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encryption {
    /// Derivation of the key from a string, or `None` if the key was given.
    pub derivation: Option<Derivation>,
    /// The encrypted pieces, or `None` if the data is not encrypted.
    pub pieces: Option<Pieces>,
}

/// Data in encrypted pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Size of each piece but the last in bytes. A single piece has all data, whatever this is.
    pub piece_bytes: u64,
    /// Nonce of the first piece.
    pub nonce: Nonce,
    /// Authentication codes of the pieces.
    pub macs: Vec<Mac>,
}

/// Returns an upper bound for the encoded size of the encryption of `data_bytes`, in bytes.
pub(super) fn bytes_max(data_bytes: u64) -> u64 {
    let macs = data_bytes.div_ceil(PIECE_BYTES_MIN).saturating_mul(to_u64(MAC_BYTES));
    macs.saturating_add(FIXED_BYTES_MAX)
}

impl Pieces {
    /// Returns the size of each piece but the last of data of this size, both in bytes. Fails with `malformed` if there
    /// is not a code for each piece.
    pub fn size(&self, data_bytes: u64) -> Result<u64> {
        let Pieces { piece_bytes, macs, .. } = self;
        // One code covers all data, whatever the size of pieces is.
        let size = if macs.len() == 1 { data_bytes } else { *piece_bytes };
        if data_bytes == 0 || data_bytes.div_ceil(size) != to_u64(macs.len()) {
            let codes = macs.len();
            let message = format!("{codes} authentication codes for {data_bytes} bytes in pieces of {piece_bytes}");
            return Err(Error::new(Kind::Malformed, message));
        }
        Ok(size)
    }
}

impl Encryption {
    /// Parses bytes that begin at `offset` of their file. Whether there is a code for each piece of the data is left to
    /// [`Pieces::size`]. Fails with `malformed` with the offset of the fault.
    pub fn parse(bytes: &[u8], offset: u64) -> Result<Encryption> {
        let mut fields = Fields::new(bytes, offset);
        let mut encryption = Encryption::default();
        for _ in 0..fields.number::<2>("the number of chunks")? {
            let begin = fields.offset();
            let contents = fields.counted::<8>("a chunk of the encryption")?;
            let mut chunk = Fields::new(contents, begin.saturating_add(8));
            let kind = chunk.number::<2>("the type of a chunk")?;
            let is_again = match u16::try_from(kind) {
                Ok(CHUNK_DERIVATION) => encryption.derivation.replace(parse_derivation(&mut chunk)?).is_some(),
                Ok(CHUNK_PIECES) => encryption.pieces.replace(parse_pieces(&mut chunk)?).is_some(),
                Ok(CHUNK_WHOLE) => encryption.pieces.replace(parse_whole(&mut chunk)?).is_some(),
                _ => return Err(malformed(begin, format!("the encryption has a chunk of unknown type {kind}"))),
            };
            if is_again {
                return Err(malformed(begin, "the encryption is described twice".into()));
            }
            if chunk.left() > 0 {
                return Err(malformed(chunk.offset(), "a chunk of the encryption is too long".into()));
            }
        }
        match fields.left() {
            0 => Ok(encryption),
            left => Err(malformed(fields.offset(), format!("{left} bytes follow the encryption"))),
        }
    }

    /// Encodes it for a file.
    pub fn encode(&self) -> Vec<u8> {
        let mut chunks = Vec::new();
        if let Encryption { derivation: Some(derivation), pieces: Some(_) } = self {
            let mut chunk = CHUNK_DERIVATION.to_le_bytes().to_vec();
            chunk.extend(PASSWORD_HASH.to_le_bytes().iter().take(2));
            chunk.extend(derivation.opslimit.to_le_bytes());
            chunk.extend(derivation.memlimit.to_le_bytes());
            chunk.extend(ARGON2ID.to_le_bytes().iter().take(4));
            chunk.extend(to_u64(SALT_BYTES).to_le_bytes().iter().take(2));
            chunk.extend(derivation.salt);
            chunks.push(chunk);
        }
        if let Some(pieces) = &self.pieces {
            let mut chunk = CHUNK_PIECES.to_le_bytes().to_vec();
            chunk.extend(pieces.piece_bytes.to_le_bytes());
            chunk.extend(pieces.nonce);
            chunk.extend(to_u64(pieces.macs.len()).to_le_bytes());
            chunk.extend(pieces.macs.as_flattened());
            chunks.push(chunk);
        }
        let mut bytes = to_u64(chunks.len()).to_le_bytes().into_iter().take(2).collect::<Vec<_>>();
        for chunk in chunks {
            bytes.extend(to_u64(chunk.len()).to_le_bytes());
            bytes.extend(chunk);
        }
        bytes
    }
}

fn parse_derivation(chunk: &mut Fields<'_>) -> Result<Derivation> {
    let begin = chunk.offset();
    let method = chunk.number::<2>("the method of the key")?;
    if method != PASSWORD_HASH {
        return Err(malformed(begin, format!("the key has the unknown method {method}")));
    }
    let opslimit = chunk.number::<8>("the opslimit of the key")?;
    let memlimit = chunk.number::<8>("the memlimit of the key")?;
    let algorithm = chunk.number::<4>("the algorithm of the key")?;
    if algorithm != ARGON2ID {
        return Err(malformed(begin, format!("the key has the unknown algorithm {algorithm}")));
    }
    let salt = chunk.counted::<2>("the salt of the key")?;
    let salt = salt.try_into().map_err(|_| malformed(begin, format!("the salt has {} bytes, not 16", salt.len())))?;
    let derivation = Derivation { opslimit, memlimit, salt };
    derivation.check().map_err(|error| malformed(begin, error.to_string()))?;
    Ok(derivation)
}

fn parse_pieces(chunk: &mut Fields<'_>) -> Result<Pieces> {
    let begin = chunk.offset();
    let piece_bytes = chunk.number::<8>("the size of a piece")?;
    if piece_bytes < PIECE_BYTES_MIN || piece_bytes % 64 != 0 {
        let message =
            format!("pieces have {piece_bytes} bytes, but must have a multiple of 64, at least {PIECE_BYTES_MIN}");
        return Err(malformed(begin, message));
    }
    let nonce = parse_array::<NONCE_BYTES>(chunk, "the nonce")?;
    let count = chunk.number::<8>("the number of authentication codes")?;
    let codes = chunk.take(to_usize(count.saturating_mul(to_u64(MAC_BYTES))), "the authentication codes")?;
    Ok(Pieces { piece_bytes, nonce, macs: codes.as_chunks().0.to_vec() })
}

fn parse_whole(chunk: &mut Fields<'_>) -> Result<Pieces> {
    let nonce = parse_array::<NONCE_BYTES>(chunk, "the nonce")?;
    Ok(Pieces { piece_bytes: PIECE_BYTES_MIN, nonce, macs: vec![parse_array::<MAC_BYTES>(chunk, "the code")?] })
}

fn parse_array<const BYTES: usize>(chunk: &mut Fields<'_>, what: &str) -> Result<[u8; BYTES]> {
    let begin = chunk.offset();
    chunk.take(BYTES, what)?.try_into().map_err(|_| malformed(begin, format!("{what} is cut off")))
}

fn malformed(offset: u64, message: String) -> Error {
    Error::new(Kind::Malformed, message).offset(offset)
}
