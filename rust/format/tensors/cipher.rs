//! Cipher of encrypted `.tensors` files: XSalsa20-Poly1305 of pieces of the data, in place.

use super::encryption::{Encryption, Mac, NONCE_BYTES, Nonce, Pieces};
use crate::encryption::key::EncryptionKey;
use crate::encryption::secret::{Derivation, Key};
use crate::encryption::wipe::with_wiped_stack;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::compute_pool;
use crypto_secretbox::aead::AeadInPlace;
use crypto_secretbox::{KeyInit, XSalsa20Poly1305};
use ring::rand::{SecureRandom, SystemRandom};
use std::sync::{Mutex, OnceLock, PoisonError};

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
    ///
    /// # Errors
    /// Those of deriving a key.
    pub fn for_new_file(key: &EncryptionKey) -> Result<Cipher> {
        let (derivation, key) = key.for_new_file()?;
        Ok(Cipher::new(key, derivation))
    }

    /// Decrypts a piece of a tensor in place. Returns false, and overwrites data that is not authentic with zeros.
    pub fn decrypt(&self, pieces: &Pieces, index: u64, data: &mut [u8]) -> bool {
        let nonce = nonce_of(&pieces.nonce, index);
        // Compares the code before it changes the data.
        let decrypt = |mac: &Mac| {
            let cipher = XSalsa20Poly1305::new(self.key.secret().into());
            cipher.decrypt_in_place_detached(&nonce.into(), b"", &mut *data, mac.into()).is_ok()
        };
        let is_authentic = with_wiped_stack(|| pieces.macs.get(to_usize(index)).is_some_and(decrypt));
        if !is_authentic {
            data.fill(0);
        }
        is_authentic
    }

    /// Encrypts data in place, with a random nonce.
    ///
    /// # Errors
    /// `internal` if the system has no random numbers, or the cipher fails.
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
            let mut data = piece.data.lock().unwrap_or_else(PoisonError::into_inner);
            let encrypt = || {
                let cipher = XSalsa20Poly1305::new(self.key.secret().into());
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

#[cfg(test)]
mod tests {
    use super::super::encryption::PIECE_BYTES_MIN;
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digit = |index: usize| u8::from_str_radix(&hex[index..index + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(digit).collect()
    }

    /// Decrypts all pieces, and returns whether all are authentic.
    fn decrypt(cipher: &Cipher, pieces: &Pieces, data: &mut [u8]) -> bool {
        let decrypt = |(index, piece)| cipher.decrypt(pieces, to_u64(index), piece);
        let is_authentic: Vec<bool> = data.chunks_mut(PIECE_BYTES).enumerate().map(decrypt).collect();
        is_authentic.into_iter().all(|is_authentic| is_authentic)
    }

    #[test]
    fn secret_box_is_that_of_nacl() {
        // The vector of NaCl's and libsodium's tests of crypto_secretbox.
        let key = bytes("1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389");
        let nonce = bytes("69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37").try_into().unwrap();
        let mac = bytes("f3ffc7703f9400e52a7dfb4b3d3305d9").try_into().unwrap();
        let mut data = bytes(
            "8e993b9f48681273c29650ba32fc76ce48332ea7164d96a4476fb8c531a1186ac0dfc17c98dce87b4da7f011ec48c97271d2c20f9b928fe22\
             70d6fb863d51738b48eeee314a7cc8ab932164548e526ae90224368517acfeabd6bb3732bc0e9da99832b61ca01b6de56244a9e88d5f9b379\
             73f622a43d14a6599b1f654cb45a74e355a5",
        );
        let plain = bytes(
            "be075fc53c81f2d5cf141316ebeb0c7b5228c52a4c62cbd44b66849b64244ffce5ecbaaf33bd751a1ac728d45e6c61296cdc3c01233561f41\
             db66cce314adb310e3be8250c46f06dceea3a7fa1348057e2f6556ad6b1318a024a838f21af1fde048977eb48f59ffd4924ca1c60902e52f0\
             a089bc76897040e082f937763848645e0705",
        );
        let pieces = Pieces { piece_bytes: PIECE_BYTES_MIN, nonce, macs: vec![mac] };
        let cipher = Cipher::new(Key::new(&key).unwrap(), None);
        assert!(cipher.decrypt(&pieces, 0, &mut data));
        assert_eq!(data, plain);
    }

    #[test]
    fn nonces_are_little_endian_numbers() {
        let mut first = [0xff; NONCE_BYTES];
        assert_eq!(nonce_of(&first, 1), [0; NONCE_BYTES]);
        first[2..].fill(0);
        assert_eq!(nonce_of(&first, 2)[..4], [1, 0, 1, 0]);
    }

    #[test]
    fn pieces_keep_their_places() {
        let cipher = Cipher::new(Key::new(&[7; 32]).unwrap(), None);
        let mut data = vec![5; 2 * PIECE_BYTES];
        let mut pieces = cipher.encrypt(&mut data, 2).unwrap().pieces.unwrap();
        let (first, second) = data.split_at_mut(PIECE_BYTES);
        first.swap_with_slice(second);
        assert!(!decrypt(&cipher, &pieces, &mut data.clone()));
        pieces.macs.reverse();
        assert!(!decrypt(&cipher, &pieces, &mut data));
        assert!(data.iter().all(|&byte| byte == 0));
    }
}
