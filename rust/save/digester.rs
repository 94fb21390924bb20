//! Digests of the tensors of a file while it is written.
//!
//! The header has the digests, so the chunks with bytes of the header are kept and written last.

use crate::digest::groups::TreeDigest;
use crate::digest::turns::Turns;
use crate::digest::{Algorithm, Hash};
use crate::error::Result;
use crate::format::layout::Layout;
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use crate::profile::{self, Stage};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

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
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).insert(first, chunk.to_vec());
    }

    /// Returns the digests of all tensors in the order of the file, and the chunks with the header.
    ///
    /// # Errors
    /// `internal` if bytes of a tensor were not added.
    pub(super) fn finish(self) -> Result<(Vec<TreeDigest>, Chunks)> {
        let digests = self.tensors.into_iter().map(|tensor| tensor.hash.finish()).collect::<Result<_>>()?;
        Ok((digests, self.kept.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }
}
