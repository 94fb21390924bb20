//! Digests of bytes: BLAKE3, SHA-256 and BLAKE2b, computed while the bytes move. Other formats have checksums, too.
//!
//! Threads add pieces of an input to a [`Hash`]. The pieces of a BLAKE3 input may come in any order, since its digest is
//! the root of a tree ([`tree`]). The pieces of a SHA-256 or BLAKE2b input are hashed in the order of their bytes: a
//! thread with a later piece waits until the pieces before it are hashed.

pub mod groups;
pub mod manifest;
pub mod tree;
pub mod turns;

use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::mutex::{Condvar, Mutex};
use crate::os::retry::Check;
use crate::os::sigint::POLL_INTERVAL;
use blake2::{Blake2b512, Digest as _};
use groups::{GROUP_BYTES, TreeDigest};
use ring::digest::SHA256;
use simd_adler32::Adler32;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use tree::Tree;
use twox_hash::XxHash3_128;

/// Size in bytes of the digests of BLAKE3 and SHA-256, which files carry.
pub const DIGEST_BYTES: usize = 32;
/// Maximum size of a digest in bytes, which BLAKE2b has.
const DIGEST_BYTES_MAX: usize = 64;

/// Algorithm of a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Algorithm {
    /// BLAKE3.
    Blake3,
    /// SHA-256.
    Sha256,
    /// BLAKE2b with a digest of 64 bytes.
    Blake2b,
    /// CRC-32 with zlib's polynomial, as a little-endian number. It finds damage, not forgery, and only `.tensors` files
    /// have it: no name of an argument means it.
    Crc32,
    /// XXH3 with 128 bits, as a big-endian number. It finds damage, not forgery, and only deltas have it.
    Xxh3,
    /// Adler-32, as a big-endian number. It finds less damage than the others, and only deltas have it.
    Adler32,
}

impl Algorithm {
    /// Algorithms of arguments and manifests.
    const NAMED: [Algorithm; 3] = [Algorithm::Blake3, Algorithm::Sha256, Algorithm::Blake2b];

    /// Returns the name in files and in arguments.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Blake3 => "blake3",
            Algorithm::Sha256 => "sha256",
            Algorithm::Blake2b => "blake2b",
            Algorithm::Crc32 => "crc32",
            Algorithm::Xxh3 => "xxh3-128",
            Algorithm::Adler32 => "adler32",
        }
    }

    /// Returns the size of a digest in bytes.
    pub fn digest_bytes(self) -> usize {
        match self {
            Algorithm::Blake3 | Algorithm::Sha256 => DIGEST_BYTES,
            Algorithm::Blake2b => DIGEST_BYTES_MAX,
            Algorithm::Crc32 | Algorithm::Adler32 => size_of::<u32>(),
            Algorithm::Xxh3 => size_of::<u128>(),
        }
    }

    /// Returns the algorithm with this name.
    pub fn from_name(name: &str) -> Option<Algorithm> {
        Algorithm::NAMED.into_iter().find(|algorithm| algorithm.name() == name)
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
        let mut context = Context::new(self);
        parts.into_iter().for_each(|part| context.update(part));
        context.finish()
    }

    /// Returns whether the pieces of an input must be hashed in the order of their bytes.
    pub fn is_sequential(self) -> bool {
        self != Algorithm::Blake3
    }
}

/// Digest and its algorithm. Its text is the algorithm's name, a colon and hexadecimal digits: 64, 128 of BLAKE2b,
/// 32 of XXH3, or 8 of CRC-32 and Adler-32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Value, followed by zeros.
    value: [u8; DIGEST_BYTES_MAX],
}

impl Digest {
    /// Returns the digest with this value, or `None` if the algorithm has another number of bytes.
    pub fn from_bytes(algorithm: Algorithm, bytes: &[u8]) -> Option<Digest> {
        let mut value = [0; DIGEST_BYTES_MAX];
        value.get_mut(..algorithm.digest_bytes()).filter(|value| value.len() == bytes.len())?.copy_from_slice(bytes);
        Some(Digest { algorithm, value })
    }

    /// Returns a digest of zeros, which reserves the place of another one.
    pub fn zeros(algorithm: Algorithm) -> Digest {
        Digest { algorithm, value: [0; DIGEST_BYTES_MAX] }
    }

    /// Parses the hexadecimal digits of a digest. Returns `None` if they are not a digest.
    pub fn from_hex(algorithm: Algorithm, hex: &str) -> Option<Digest> {
        let digit = |&digit: &u8| u8::try_from(char::from(digit).to_digit(16)?).ok();
        let (pairs, rest) = hex.as_bytes().as_chunks();
        let bytes: Option<Vec<u8>> = pairs.iter().map(|[high, low]| Some(digit(high)? << 4 | digit(low)?)).collect();
        Digest::from_bytes(algorithm, &bytes.filter(|_| rest.is_empty())?)
    }

    /// Returns the value.
    pub fn bytes(&self) -> &[u8] {
        self.value.get(..self.algorithm.digest_bytes()).unwrap_or_default()
    }

    /// Returns the hexadecimal digits.
    pub fn hex(&self) -> String {
        self.bytes().iter().map(|byte| format!("{byte:02x}")).collect()
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

/// Digest of an input, or digests of the shards into which it is divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputDigest {
    /// Begin of each shard, in ascending order from 0, and its digest. Never empty.
    shards: Vec<(u64, Digest)>,
    /// Length of the input, if the digests state one.
    length: Option<u64>,
}

impl From<Digest> for InputDigest {
    fn from(digest: Digest) -> InputDigest {
        InputDigest { shards: vec![(0, digest)], length: None }
    }
}

impl InputDigest {
    /// Returns the digests of shards, or `None` if the shards leave a gap, overlap or are empty.
    pub fn from_shards(shards: &mut [(Range<u64>, Digest)]) -> Option<InputDigest> {
        shards.sort_by_key(|(range, _)| range.start);
        let mut length = 0;
        for (range, _) in shards.iter() {
            if range.start != length || range.end <= range.start {
                return None;
            }
            length = range.end;
        }
        let digests = shards.iter().map(|(range, digest)| (range.start, *digest)).collect();
        (length > 0).then_some(InputDigest { shards: digests, length: Some(length) })
    }

    /// Returns the length of the input, if the digests state one.
    pub fn length(&self) -> Option<u64> {
        self.length
    }

    /// Returns whether the pieces of a shard must be hashed in the order of their bytes.
    pub fn is_sequential(&self) -> bool {
        self.shards.iter().any(|(_, digest)| digest.algorithm.is_sequential())
    }

    /// Iterates over the shards of an input of `length` bytes.
    pub fn shards(&self, length: u64) -> impl Iterator<Item = (Range<u64>, Digest)> {
        let ends = self.shards.iter().skip(1).map(|(begin, _)| *begin).chain([length]);
        self.shards.iter().zip(ends).map(|(&(begin, digest), end)| (begin..end, digest))
    }
}

/// Hash of bytes in their order, boxed because the sizes differ much.
pub(crate) enum Context {
    Blake3(Box<blake3::Hasher>),
    Sha256(Box<ring::digest::Context>),
    Blake2b(Box<Blake2b512>),
    Crc32(crc32fast::Hasher),
    Xxh3(Box<XxHash3_128>),
    Adler32(Adler32),
}

impl Context {
    pub(crate) fn new(algorithm: Algorithm) -> Context {
        match algorithm {
            Algorithm::Blake3 => Context::Blake3(Box::default()),
            Algorithm::Sha256 => Context::Sha256(Box::new(ring::digest::Context::new(&SHA256))),
            Algorithm::Blake2b => Context::Blake2b(Box::default()),
            Algorithm::Crc32 => Context::Crc32(crc32fast::Hasher::new()),
            Algorithm::Xxh3 => Context::Xxh3(Box::new(XxHash3_128::new())),
            Algorithm::Adler32 => Context::Adler32(Adler32::new()),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Context::Blake3(hasher) => {
                hasher.update(bytes);
            }
            Context::Sha256(context) => context.update(bytes),
            Context::Blake2b(hasher) => hasher.update(bytes),
            Context::Crc32(hasher) => hasher.update(bytes),
            Context::Xxh3(hasher) => hasher.write(bytes),
            Context::Adler32(hasher) => hasher.write(bytes),
        }
    }

    pub(crate) fn finish(self) -> Digest {
        let digest = |algorithm, bytes: &[u8]| {
            let mut digest = Digest::zeros(algorithm);
            digest.value.iter_mut().zip(bytes).for_each(|(byte, &computed)| *byte = computed);
            digest
        };
        match self {
            Context::Blake3(hasher) => digest(Algorithm::Blake3, hasher.finalize().as_bytes()),
            Context::Sha256(context) => digest(Algorithm::Sha256, context.finish().as_ref()),
            Context::Blake2b(hasher) => digest(Algorithm::Blake2b, &hasher.finalize()),
            Context::Crc32(hasher) => digest(Algorithm::Crc32, &hasher.finalize().to_le_bytes()),
            Context::Xxh3(hasher) => digest(Algorithm::Xxh3, &hasher.finish_128().to_be_bytes()),
            Context::Adler32(hasher) => digest(Algorithm::Adler32, &hasher.finish().to_be_bytes()),
        }
    }
}

/// First byte of an encoded hash to which some bytes were added.
const ENCODED_TREE: u8 = 0;
/// First byte of an encoded hash to which all bytes were added.
const ENCODED_DONE: u8 = 1;

/// Hash of an input of known length, to which threads add pieces.
pub struct Hash {
    algorithm: Algorithm,
    length: u64,
    /// Whether the chaining values of groups are kept.
    has_groups: bool,
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
    Done(TreeDigest),
}

impl Hash {
    /// Creates the hash of an input of `length` bytes.
    pub fn new(algorithm: Algorithm, length: u64) -> Hash {
        Hash { algorithm, length, has_groups: false, state: Mutex::new(State::Empty), advanced: Condvar::new() }
    }

    /// Creates the hash of an input of `length` bytes that keeps the chaining values of groups, if the algorithm has them.
    pub fn with_groups(algorithm: Algorithm, length: u64) -> Hash {
        let has_groups = algorithm == Algorithm::Blake3 && length > GROUP_BYTES;
        Hash { has_groups, ..Hash::new(algorithm, length) }
    }

    /// Returns the length of the input in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns whether pieces were added, but not all of them.
    pub fn is_incomplete(&self) -> bool {
        matches!(*self.state.lock(), State::Tree(_) | State::Sequence(..))
    }

    /// Returns whether all pieces were added.
    pub fn is_complete(&self) -> bool {
        matches!(*self.state.lock(), State::Done(_))
    }

    /// Returns the digest of a tensor and the kept chaining values.
    pub fn finish(self) -> Result<TreeDigest> {
        match self.state.into_inner() {
            State::Done(digest) => Ok(digest),
            State::Empty if self.length == 0 => {
                Ok(TreeDigest { length: 0, digest: self.algorithm.digest(&[]), values: Vec::new() })
            }
            State::Empty | State::Tree(_) | State::Sequence(..) => {
                Err(Error::new(Kind::Internal, "bytes of a tensor were not hashed"))
            }
        }
    }

    /// Adds the bytes of the input from `begin`, and returns the digest after the last piece.
    ///
    /// With a sequential algorithm, waits until the pieces before this one were added. So a thread must not hold what
    /// another thread needs to add an earlier piece. Fails with `internal` if bytes are added twice or exceed the
    /// input.
    pub fn add(&self, begin: u64, bytes: &[u8], check: Check<'_>) -> Result<Option<Digest>> {
        let misfit = || {
            let message = format!("{} bytes at byte {begin} do not fit an input of {}", bytes.len(), self.length);
            Error::new(Kind::Internal, message)
        };
        let end = begin.checked_add(to_u64(bytes.len())).filter(|&end| end <= self.length).ok_or_else(misfit)?;
        let done = |digest, values| State::Done(TreeDigest { length: self.length, digest, values });
        if to_u64(bytes.len()) == self.length && !self.has_groups {
            let mut state = self.state.lock();
            if !matches!(*state, State::Empty) {
                return Err(misfit());
            }
            let digest = self.algorithm.digest(bytes);
            *state = done(digest, Vec::new());
            return Ok(Some(digest));
        }
        if bytes.is_empty() {
            return Ok(None);
        }
        match self.algorithm {
            Algorithm::Blake3 => {
                let piece =
                    tree::Piece::new(begin, bytes, self.length, if self.has_groups { GROUP_BYTES } else { u64::MAX });
                let mut state = self.state.lock();
                if matches!(*state, State::Empty) {
                    *state = State::Tree(Tree::new(self.length));
                }
                let State::Tree(tree) = &mut *state else { return Err(misfit()) };
                let Some(bytes) = tree.add(piece).ok_or_else(misfit)? else { return Ok(None) };
                let values = if self.has_groups { tree.groups(GROUP_BYTES).ok_or_else(misfit)? } else { Vec::new() };
                let digest = Digest::from_bytes(self.algorithm, &bytes).ok_or_else(misfit)?;
                *state = done(digest, values);
                Ok(Some(digest))
            }
            Algorithm::Sha256 | Algorithm::Blake2b | Algorithm::Crc32 | Algorithm::Xxh3 | Algorithm::Adler32 => {
                let mut context = self.wait_for_turn(begin, check)?.ok_or_else(misfit)?;
                context.update(bytes);
                let mut state = self.state.lock();
                if end == self.length {
                    let digest = context.finish();
                    *state = done(digest, Vec::new());
                    return Ok(Some(digest));
                }
                *state = State::Sequence(Some(context), end);
                self.advanced.notify_all();
                Ok(None)
            }
        }
    }

    /// Appends what is known of the input, of which some bytes were added, for [`add_encoded`](Hash::add_encoded) of a
    /// hash of the same input that has its other bytes. Fails with `internal` if no bytes were added, if the algorithm
    /// is sequential, or if bytes in the middle of a block are missing.
    pub fn encode(&self, into: &mut Vec<u8>) -> Result<()> {
        let unknown = || Error::new(Kind::Internal, "the bytes of a tensor were not hashed in whole ranges");
        match &*self.state.lock() {
            State::Tree(tree) => {
                into.push(ENCODED_TREE);
                tree.encode(GROUP_BYTES, into).ok_or_else(unknown)?;
            }
            State::Done(digest) => {
                into.push(ENCODED_DONE);
                into.extend(digest.digest.bytes());
                into.extend(digest.values.iter().flatten());
            }
            State::Empty | State::Sequence(..) => return Err(unknown()),
        }
        Ok(())
    }

    /// Adds the bytes of the input that another hash has encoded, and removes them from `encoded`. Fails with
    /// `internal` if bytes are added twice, or if the encoded bytes are not from this input.
    pub fn add_encoded(&self, encoded: &mut &[u8]) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, "the hashes of another rank do not fit the tensor");
        let (&kind, rest) = encoded.split_first().ok_or_else(misfit)?;
        *encoded = rest;
        let mut state = self.state.lock();
        match kind {
            ENCODED_TREE => {
                if matches!(*state, State::Empty) {
                    *state = State::Tree(Tree::new(self.length));
                }
                let State::Tree(tree) = &mut *state else { return Err(misfit()) };
                if let Some(bytes) = tree.add_encoded(encoded).ok_or_else(misfit)? {
                    let values =
                        if self.has_groups { tree.groups(GROUP_BYTES).ok_or_else(misfit)? } else { Vec::new() };
                    let digest = Digest::from_bytes(self.algorithm, &bytes).ok_or_else(misfit)?;
                    *state = State::Done(TreeDigest { length: self.length, digest, values });
                }
            }
            ENCODED_DONE if matches!(*state, State::Empty) => {
                let groups = if self.has_groups { self.length.div_ceil(GROUP_BYTES) } else { 0 };
                let count = to_usize(groups.saturating_add(1)).saturating_mul(DIGEST_BYTES);
                let (own, rest) = encoded.split_at_checked(count).ok_or_else(misfit)?;
                *encoded = rest;
                let (digest, values) = own.split_at_checked(DIGEST_BYTES).ok_or_else(misfit)?;
                let digest = Digest::from_bytes(self.algorithm, digest).ok_or_else(misfit)?;
                let values = values.chunks_exact(DIGEST_BYTES).filter_map(|value| value.try_into().ok()).collect();
                *state = State::Done(TreeDigest { length: self.length, digest, values });
            }
            _ => return Err(misfit()),
        }
        Ok(())
    }

    /// Takes the context once it has all bytes before `begin`. Returns `None` if it has more.
    fn wait_for_turn(&self, begin: u64, check: Check<'_>) -> Result<Option<Context>> {
        let mut state = self.state.lock();
        loop {
            match &mut *state {
                State::Empty => *state = State::Sequence(Some(Context::new(self.algorithm)), 0),
                State::Sequence(context, next) if *next == begin && context.is_some() => return Ok(context.take()),
                State::Sequence(_, next) if *next <= begin => {
                    state = self.advanced.wait_timeout(state, POLL_INTERVAL);
                    check()?;
                }
                State::Sequence(..) | State::Tree(_) | State::Done(_) => return Ok(None),
            }
        }
    }
}
