//! Digests of the tensors of a file while it is written.
//!
//! The header has the digests, so the chunks with bytes of the header are kept and written last.

use crate::digest::turns::Turns;
use crate::digest::{Algorithm, Hash};
use crate::error::{Error, Kind, Result};
use crate::format::digests;
use crate::format::layout::Layout;
use crate::num::{to_u64, to_usize};
use crate::os::mutex::Mutex;
use crate::os::retry::Check;
use crate::profile::{self, Stage};
use std::collections::BTreeMap;
use std::ops::Range;

/// Chunks by their first byte in the file.
pub(super) type Chunks = BTreeMap<u64, Vec<u8>>;

/// Hashes of all tensors of a file, and the chunks with its header.
pub(super) struct Digester {
    algorithm: Algorithm,
    tensors: Vec<HashedTensor>,
    pub(super) turns: Turns,
    kept: Mutex<Chunks>,
}

struct HashedTensor {
    range: Range<u64>,
    hash: Hash,
}

impl Digester {
    pub(super) fn new(algorithm: Algorithm, layout: &Layout) -> Digester {
        let tensor = |range: &Range<u64>| HashedTensor {
            range: range.clone(),
            hash: Hash::with_groups(algorithm, range.end - range.start),
        };
        Digester {
            algorithm,
            tensors: layout.ranges().map(tensor).collect(),
            turns: Turns::default(),
            kept: Mutex::default(),
        }
    }

    /// Calls `acquire`, which takes memory for a job, in the order of the jobs if the algorithm needs it.
    pub(super) fn acquire<T>(&self, job: usize, check: Check<'_>, acquire: impl FnOnce() -> Result<T>) -> Result<T> {
        let check: Check<'_> = &|| self.turns.check().and_then(|()| check());
        if self.algorithm.is_sequential() { self.turns.pass(job, check, acquire) } else { acquire() }
    }

    /// Hashes bytes of the file from `begin`.
    pub(super) fn add(&self, begin: u64, bytes: &[u8], check: Check<'_>) -> Result<()> {
        let check: Check<'_> = &|| self.turns.check().and_then(|()| check());
        let _span = profile::span(Stage::Hash).bytes(bytes.len());
        let end = begin.saturating_add(to_u64(bytes.len()));
        let skipped = self.tensors.partition_point(|tensor| tensor.range.end <= begin);
        for tensor in self.tensors.iter().skip(skipped).take_while(|tensor| tensor.range.start < end) {
            if tensor.range.is_empty() {
                continue;
            }
            let (first, last) = (tensor.range.start.max(begin), tensor.range.end.min(end));
            let own = bytes.get(to_usize(first - begin)..to_usize(last.saturating_sub(begin))).unwrap_or_default();
            tensor.hash.add(first - tensor.range.start, own, check)?;
        }
        Ok(())
    }

    /// Keeps the chunk at `first`.
    pub(super) fn keep(&self, first: u64, chunk: &[u8]) {
        self.kept.lock().insert(first, chunk.to_vec());
    }

    /// Appends what is known of the tensors of which some bytes were added: the position of each in the file, and its hash.
    pub(super) fn encode(&self, into: &mut Vec<u8>) -> Result<()> {
        let started = |tensor: &HashedTensor| tensor.hash.is_complete() || tensor.hash.is_incomplete();
        let count = self.tensors.iter().filter(|tensor| started(tensor)).count();
        into.extend(to_u64(count).to_le_bytes());
        for (position, tensor) in self.tensors.iter().enumerate().filter(|(_, tensor)| started(tensor)) {
            into.extend(to_u64(position).to_le_bytes());
            tensor.hash.encode(into)?;
        }
        Ok(())
    }

    /// Adds the tensors that another digester of the same file has encoded, and removes them from `encoded`.
    pub(super) fn add_encoded(&self, encoded: &mut &[u8]) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, "the hashes of another rank are incomplete");
        let number = |encoded: &mut &[u8]| {
            let (number, rest) = encoded.split_first_chunk::<8>().ok_or_else(misfit)?;
            *encoded = rest;
            Ok(to_usize(u64::from_le_bytes(*number)))
        };
        for _ in 0..number(encoded)? {
            let tensor = self.tensors.get(number(encoded)?).ok_or_else(misfit)?;
            tensor.hash.add_encoded(encoded)?;
        }
        Ok(())
    }

    /// Returns the chunks with the header, in which the digests of all tensors are. `layout` is the file's.
    pub(super) fn seal(self, layout: &Layout) -> Result<Chunks> {
        let digests = self.tensors.into_iter().map(|tensor| tensor.hash.finish()).collect::<Result<Vec<_>>>()?;
        let mut header = layout.header().to_vec();
        digests::seal(&mut header, self.algorithm, &digests)?;
        let mut kept = self.kept.into_inner();
        for (&first, chunk) in &mut kept {
            let own = header.get(to_usize(first)..).unwrap_or_default();
            chunk.iter_mut().zip(own).for_each(|(byte, &sealed)| *byte = sealed);
        }
        Ok(kept)
    }
}
