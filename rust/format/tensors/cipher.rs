//! Cipher of encrypted `.tensors` files: XSalsa20-Poly1305 of pieces of the data, in place.

use super::encryption::{Encryption, Mac, NONCE_BYTES, Nonce, Pieces};
use super::salsa20::Salsa20;
use crate::encryption::key::EncryptionKey;
use crate::encryption::secret::{Derivation, Key};
use crate::encryption::wipe::with_wiped_stack;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::compute_pool;
use crate::os::mutex::Mutex;
use crypto_secretbox::aead::AeadInPlace;
use crypto_secretbox::{KeyInit, SecretBox};
use ring::rand::{SecureRandom, SystemRandom};
use std::sync::OnceLock;

/// Size of the pieces of new files in bytes.
const PIECE_BYTES: usize = 2 << 20;

/// Cipher with its key, which is overwritten when the cipher is dropped.
#[derive(Clone, Debug)]
pub struct Cipher {
    key: Key,
    derivation: Option<Derivation>,
}

struct Piece<'a> {
    nonce: Nonce,
    data: Mutex<&'a mut [u8]>,
}

impl Cipher {
    /// Returns the cipher with a key, which was derived from a string if `derivation` is there.
    pub fn new(key: Key, derivation: Option<Derivation>) -> Cipher {
        Cipher { key, derivation }
    }

    /// Returns the cipher of a new file with the key of a user.
    pub fn for_new_file(key: &EncryptionKey) -> Result<Cipher> {
        let (derivation, key) = key.for_new_file()?;
        Ok(Cipher::new(key, derivation))
    }

    /// Decrypts a piece of a tensor in place. Returns false, and overwrites data that is not authentic with zeros.
    pub fn decrypt(&self, pieces: &Pieces, index: u64, data: &mut [u8]) -> bool {
        let nonce = nonce_of(&pieces.nonce, index);
        // Compares the code before it changes the data.
        let decrypt = |mac: &Mac| {
            let cipher = SecretBox::<Salsa20>::new(self.key.secret().into());
            cipher.decrypt_in_place_detached(&nonce.into(), b"", &mut *data, mac.into()).is_ok()
        };
        let is_authentic = with_wiped_stack(|| pieces.macs.get(to_usize(index)).is_some_and(decrypt));
        if !is_authentic {
            data.fill(0);
        }
        is_authentic
    }

    /// Encrypts data in place, with a random nonce.
    pub fn encrypt(&self, data: &mut [u8], threads: usize) -> Result<Encryption> {
        if data.is_empty() {
            return Ok(Encryption::default());
        }
        let mut nonce = [0; NONCE_BYTES];
        let random = SystemRandom::new().fill(&mut nonce);
        random.map_err(|_| Error::new(Kind::Internal, "the system has no random numbers for a nonce"))?;
        let work: Vec<(Piece<'_>, OnceLock<Mac>)> =
            pieces(data, PIECE_BYTES, &nonce).into_iter().map(|piece| (piece, OnceLock::new())).collect();
        compute_pool::for_each(threads, &work, |(piece, mac)| {
            let mut data = piece.data.lock();
            let encrypt = || {
                let cipher = SecretBox::<Salsa20>::new(self.key.secret().into());
                cipher.encrypt_in_place_detached(&piece.nonce.into(), b"", &mut data)
            };
            if let Ok(code) = with_wiped_stack(encrypt) {
                mac.get_or_init(|| code.into());
            }
        });
        let missing = || Error::new(Kind::Internal, "a piece was not encrypted");
        let macs = work.into_iter().map(|(_, mac)| mac.into_inner().ok_or_else(missing)).collect::<Result<_>>()?;
        let pieces = Pieces { piece_bytes: to_u64(PIECE_BYTES), nonce, macs };
        Ok(Encryption { derivation: self.derivation, pieces: Some(pieces) })
    }
}

fn pieces<'a>(data: &'a mut [u8], piece_bytes: usize, first: &Nonce) -> Vec<Piece<'a>> {
    let piece = |(index, data)| Piece { nonce: nonce_of(first, to_u64(index)), data: Mutex::new(data) };
    data.chunks_mut(piece_bytes.max(1)).enumerate().map(piece).collect()
}

/// Returns the nonce of a piece: the first one plus the index, as a little-endian number.
fn nonce_of(first: &Nonce, index: u64) -> Nonce {
    let mut nonce = *first;
    let mut carry = u128::from(index);
    for byte in &mut nonce {
        carry += u128::from(*byte);
        let [low, ..] = carry.to_le_bytes();
        *byte = low;
        carry >>= 8;
    }
    nonce
}
