//! Hashes the bytes of a load before they are copied, and compares the digests.

use crate::checkpoint::verify::{Cover, Input};
use crate::device::engine::Inspector;
use crate::digest::turns::Turns;
use crate::digest::{Digest, Hash};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::mutex::Mutex;
use crate::os::retry::Check;
use crate::plan::Chunk;
use crate::profile::{self, Stage};
use std::collections::BTreeMap;
use std::ops::Range;

/// Digests of a transfer in progress.
pub struct Verifier {
    inputs: Vec<HashedInput>,
    covers: Vec<Cover>,
    turns: Turns,
}

/// Input whose bytes are hashed when they were read.
pub(super) struct HashedInput {
    pub(super) input: Input,
    /// Shards, relative to the first byte of the input, with the digests that they must have.
    shards: Vec<(Range<u64>, Digest, Hash)>,
    /// Whether the bytes before the data of the file still have to be hashed.
    needs_header: Mutex<bool>,
}

impl HashedInput {
    /// Begins an input. Compares the digest of an input without bytes at once.
    pub(super) fn begin(input: Input) -> Result<HashedInput> {
        let length = input.end.saturating_sub(input.begin);
        let hashed = |(range, digest): (Range<u64>, Digest)| {
            let hash = Hash::new(digest.algorithm, range.end.saturating_sub(range.start));
            (range, digest, hash)
        };
        let shards: Vec<_> = input.shards().map(hashed).collect();
        for (range, digest, _) in shards.iter().filter(|(range, ..)| range.is_empty()) {
            input.compare((range, *digest), digest.algorithm.digest(&[]))?;
        }
        let has_header = !input.header.is_empty();
        let hashed = HashedInput { input, shards, needs_header: Mutex::new(has_header) };
        // A file without data.
        if to_u64(hashed.input.header.len()) == length && has_header {
            hashed.add_header(&|| Ok(()))?;
        }
        Ok(hashed)
    }

    /// Returns where the shard with the byte at `offset` ends, in bytes from the start of the file.
    pub(super) fn shard_end(&self, offset: u64) -> u64 {
        let begin = self.input.begin;
        let shard = self.shards.partition_point(|(range, ..)| range.end <= offset.saturating_sub(begin));
        self.shards.get(shard).map_or(self.input.end, |(range, ..)| begin.saturating_add(range.end))
    }

    /// Hashes bytes of the file from `offset`, and compares the digest after the last ones.
    pub(super) fn add(&self, offset: u64, bytes: &[u8], check: Check<'_>) -> Result<()> {
        self.add_header(check)?;
        let misfit = || Error::new(Kind::Internal, format!("byte {offset} precedes the input"));
        let begin = offset.checked_sub(self.input.begin).ok_or_else(misfit)?;
        self.add_at(begin, bytes, check)
    }

    fn add_header(&self, check: Check<'_>) -> Result<()> {
        let needs_header = {
            let mut needs_header = self.needs_header.lock();
            std::mem::replace(&mut *needs_header, false)
        };
        if needs_header { self.add_at(0, &self.input.header, check) } else { Ok(()) }
    }

    fn add_at(&self, begin: u64, bytes: &[u8], check: Check<'_>) -> Result<()> {
        let _span = profile::span(Stage::Hash).bytes(bytes.len());
        let (mut at, mut rest) = (begin, bytes);
        let first = self.shards.partition_point(|(range, ..)| range.end <= begin);
        for (range, digest, hash) in self.shards.iter().skip(first) {
            if rest.is_empty() {
                break;
            }
            let count = rest.len().min(to_usize(range.end.saturating_sub(at)));
            let (bytes, later) = rest.split_at_checked(count).unwrap_or_default();
            if let Some(found) = hash.add(at.saturating_sub(range.start), bytes, check)? {
                self.input.compare((range, *digest), found)?;
            }
            (at, rest) = (range.end, later);
        }
        match rest {
            [] => Ok(()),
            _ => Err(Error::new(Kind::Internal, format!("{} bytes at byte {at} exceed the input", rest.len()))),
        }
    }

    /// Fails if only a part of the bytes was hashed.
    fn finish(&self) -> Result<()> {
        // No byte was read, or all of them.
        let incomplete = self.shards.iter().filter(|(.., hash)| hash.is_incomplete()).count();
        let complete = self.shards.iter().filter(|(.., hash)| hash.is_complete()).count();
        if incomplete == 0 && (complete == 0 || complete == self.shards.len()) {
            return Ok(());
        }
        let error = Error::new(Kind::Internal, "a load has read only a part of what has a digest").at(&self.input.path);
        Err(match &self.input.tensor {
            Some(name) => error.tensor(&**name),
            None => error,
        })
    }
}

impl Verifier {
    /// Prepares the digests of a load. Fails with `integrity` for a tensor without bytes.
    pub fn new(inputs: Vec<Input>, covers: Vec<Cover>) -> Result<Verifier> {
        let inputs = inputs.into_iter().map(HashedInput::begin).collect::<Result<_>>()?;
        Ok(Verifier { inputs, covers, turns: Turns::default() })
    }

    /// Begins a batch, and returns the order in which its chunks should run.
    ///
    /// The chunks of a sequential input run in the order of their bytes. Chunks of several files, or of several tensors if
    /// these have digests, take turns, so that several are hashed at the same time.
    pub fn begin(&self, chunks: &[Chunk]) -> Vec<usize> {
        self.turns.restart();
        if !self.is_sequential() {
            return (0..chunks.len()).collect();
        }
        let has_files = self.inputs.iter().any(|hashed| hashed.input.tensor.is_none());
        // The first free round of each file or tensor. A chunk takes one that is free for all that it has bytes of.
        let mut free: BTreeMap<usize, usize> = BTreeMap::new();
        let mut order: Vec<(usize, usize)> = Vec::with_capacity(chunks.len());
        for (index, chunk) in chunks.iter().enumerate() {
            let inputs: Vec<usize> = if has_files { vec![chunk.source()] } else { chunk.tensors().collect() };
            let round = inputs.iter().filter_map(|input| free.get(input)).max().copied().unwrap_or_default();
            free.extend(inputs.into_iter().map(|input| (input, round + 1)));
            order.push((round, index));
        }
        order.sort_unstable();
        order.into_iter().map(|(_, index)| index).collect()
    }

    /// Stores the error of a chunk, which ends the waits of all threads.
    pub fn fail(&self, error: Error) -> Error {
        self.turns.fail(error)
    }

    /// Fails after a chunk has failed.
    pub fn check(&self) -> Result<()> {
        self.turns.check()
    }

    /// Checks that all bytes of every input that was read were hashed.
    pub fn finish(&self) -> Result<()> {
        self.inputs.iter().try_for_each(HashedInput::finish)
    }

    fn input_of(&self, tensor: usize) -> Option<&HashedInput> {
        self.inputs.get(self.covers.get(tensor)?.input()?)
    }

    fn is_sequential(&self) -> bool {
        self.inputs.iter().any(|hashed| hashed.input.digest.is_sequential())
    }
}

impl Inspector for Verifier {
    fn acquire(&self, turn: usize, check: Check<'_>, acquire: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        if self.is_sequential() { self.turns.pass(turn, check, acquire) } else { acquire() }
    }

    fn covers(&self, tensor: usize) -> bool {
        self.input_of(tensor).is_some()
    }

    fn inspect(&self, tensor: usize, offset: u64, bytes: &[u8], check: Check<'_>) -> Result<()> {
        self.input_of(tensor).map_or(Ok(()), |input| input.add(offset, bytes, check))
    }
}
