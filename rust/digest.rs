//! Digests of bytes: BLAKE3 and SHA-256, computed while the bytes move.
//!
//! Threads add pieces of an input to a [`Hash`]. The pieces of a BLAKE3 input may come in any order, since its digest is
//! the root of a tree ([`tree`]). The pieces of a SHA-256 input are hashed in the order of their bytes: a thread with a
//! later piece waits until the pieces before it are hashed.

pub mod manifest;
mod tree;
pub mod turns;

use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::os::retry::Check;
use crate::os::sigint::POLL_INTERVAL;
use ring::digest::{Context, SHA256};
use std::fmt;
use std::str::FromStr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use tree::Tree;

/// Size of a digest in bytes, for every algorithm.
pub const DIGEST_BYTES: usize = 32;

/// Algorithm of a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Algorithm {
    /// BLAKE3.
    Blake3,
    /// SHA-256.
    Sha256,
}

impl Algorithm {
    const ALL: [Algorithm; 2] = [Algorithm::Blake3, Algorithm::Sha256];

    /// Returns the name in files and in arguments.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Blake3 => "blake3",
            Algorithm::Sha256 => "sha256",
        }
    }

    /// Returns the algorithm with this name.
    pub fn from_name(name: &str) -> Option<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }

    /// Returns the digest of bytes.
    ///
    /// ```
    /// use fst::digest::Algorithm;
    /// let digest = Algorithm::Sha256.digest(b"abc").to_string();
    /// assert_eq!(digest, "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    /// ```
    pub fn digest(self, bytes: &[u8]) -> Digest {
        self.digest_parts([bytes])
    }

    /// Returns the digest of parts, one after the other.
    pub fn digest_parts<'a>(self, parts: impl IntoIterator<Item = &'a [u8]>) -> Digest {
        let bytes = match self {
            Algorithm::Blake3 => {
                let mut hasher = blake3::Hasher::new();
                parts.into_iter().for_each(|part| {
                    hasher.update(part);
                });
                *hasher.finalize().as_bytes()
            }
            Algorithm::Sha256 => {
                let mut context = Context::new(&SHA256);
                parts.into_iter().for_each(|part| context.update(part));
                finish(context)
            }
        };
        Digest { algorithm: self, bytes }
    }

    /// Returns whether the pieces of an input must be hashed in the order of their bytes.
    pub fn is_sequential(self) -> bool {
        self == Algorithm::Sha256
    }
}

/// Digest and its algorithm. Its text is `blake3:` or `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Value.
    pub bytes: [u8; DIGEST_BYTES],
}

impl Digest {
    /// Parses the hexadecimal digits of a digest. Returns `None` if they are not a digest.
    pub fn from_hex(algorithm: Algorithm, hex: &str) -> Option<Digest> {
        let mut bytes = [0; DIGEST_BYTES];
        let digits = hex.as_bytes();
        if digits.len() != 2 * DIGEST_BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Digest { algorithm, bytes })
    }

    /// Returns the hexadecimal digits.
    pub fn hex(&self) -> String {
        self.bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex())
    }
}

impl FromStr for Digest {
    type Err = ();
    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        let (name, hex) = text.split_once(':').ok_or(())?;
        let algorithm = Algorithm::from_name(name).ok_or(())?;
        Digest::from_hex(algorithm, hex).ok_or(())
    }
}

/// Hash of an input of known length, to which threads add pieces.
pub struct Hash {
    algorithm: Algorithm,
    length: u64,
    state: Mutex<State>,
    /// Signals that the next piece of a sequential input may be hashed.
    advanced: Condvar,
}

enum State {
    /// No piece was added.
    Empty,
    Tree(Tree),
    /// The context, unless a thread is using it, and the number of bytes that it has.
    Sequence(Option<Context>, u64),
    Done,
}

impl Hash {
    /// Creates the hash of an input of `length` bytes.
    pub fn new(algorithm: Algorithm, length: u64) -> Hash {
        Hash { algorithm, length, state: Mutex::new(State::Empty), advanced: Condvar::new() }
    }

    /// Returns the length of the input in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns whether pieces were added, but not all of them.
    pub fn is_incomplete(&self) -> bool {
        matches!(*self.lock(), State::Tree(_) | State::Sequence(..))
    }

    /// Adds the bytes of the input from `begin`, and returns the digest after the last piece.
    ///
    /// With a sequential algorithm, waits until the pieces before this one were added. So a thread must not hold what
    /// another thread needs to add an earlier piece.
    ///
    /// # Errors
    /// `internal` if bytes are added twice or exceed the input; that of `check`, which is called while this waits.
    pub fn add(&self, begin: u64, bytes: &[u8], check: Check<'_>) -> Result<Option<Digest>> {
        let misfit = || {
            let message = format!("{} bytes at byte {begin} do not fit an input of {}", bytes.len(), self.length);
            Error::new(Kind::Internal, message)
        };
        let end = begin.checked_add(to_u64(bytes.len())).filter(|&end| end <= self.length).ok_or_else(misfit)?;
        if to_u64(bytes.len()) == self.length {
            let mut state = self.lock();
            if !matches!(*state, State::Empty) {
                return Err(misfit());
            }
            *state = State::Done;
            drop(state);
            return Ok(Some(self.algorithm.digest(bytes)));
        }
        if bytes.is_empty() {
            return Ok(None);
        }
        match self.algorithm {
            Algorithm::Blake3 => {
                let piece = tree::Piece::new(begin, bytes, self.length);
                let mut state = self.lock();
                if matches!(*state, State::Empty) {
                    *state = State::Tree(Tree::new(self.length));
                }
                let State::Tree(tree) = &mut *state else { return Err(misfit()) };
                let Some(bytes) = tree.add(piece).ok_or_else(misfit)? else { return Ok(None) };
                *state = State::Done;
                Ok(Some(Digest { algorithm: self.algorithm, bytes }))
            }
            Algorithm::Sha256 => {
                let mut context = self.wait_for_turn(begin, check)?.ok_or_else(misfit)?;
                context.update(bytes);
                let mut state = self.lock();
                if end == self.length {
                    *state = State::Done;
                    return Ok(Some(Digest { algorithm: self.algorithm, bytes: finish(context) }));
                }
                *state = State::Sequence(Some(context), end);
                self.advanced.notify_all();
                Ok(None)
            }
        }
    }

    /// Takes the context once it has all bytes before `begin`. Returns `None` if it has more.
    fn wait_for_turn(&self, begin: u64, check: Check<'_>) -> Result<Option<Context>> {
        let mut state = self.lock();
        loop {
            match &mut *state {
                State::Empty => *state = State::Sequence(Some(Context::new(&SHA256)), 0),
                State::Sequence(context, next) if *next == begin && context.is_some() => return Ok(context.take()),
                State::Sequence(_, next) if *next <= begin => {
                    let waited = self.advanced.wait_timeout(state, POLL_INTERVAL);
                    state = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
                    check()?;
                }
                State::Sequence(..) | State::Tree(_) | State::Done => return Ok(None),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn finish(context: Context) -> [u8; DIGEST_BYTES] {
    let mut bytes = [0; DIGEST_BYTES];
    for (byte, &computed) in bytes.iter_mut().zip(context.finish().as_ref()) {
        *byte = computed;
    }
    bytes
}
