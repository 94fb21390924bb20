//! Groups of bytes of tensors, whose chaining values allow to compare a part of a tensor with the tensor's digest.
//!
//! A group is a subtree of BLAKE3's [`tree`](super::tree). The digest of a tensor that is no longer than a group takes the
//! place of the chaining value.

use super::{Algorithm, DIGEST_BYTES, Digest, tree};
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::profile::{self, Stage};
use crate::units::{self, Unit, Units};
use blake3::hazmat::ChainingValue;
use std::ops::Range;

/// Smallest size of the groups of new files in bytes. A part of a tensor reads at most this many bytes too many at each
/// end.
pub const GROUP_BYTES: u64 = 1 << 20;
/// Smallest size of a group that is accepted, in bytes.
pub const GROUP_BYTES_MIN: u64 = 4 << 10;
/// Largest size of a group that is accepted, in bytes. Readers need memory for a whole group.
pub const GROUP_BYTES_MAX: u64 = 4 << 20;
/// Number of groups beyond which a new file has larger ones. Their chaining values take 171 KiB of the header.
const GROUPS_MAX: u64 = 4096;

/// Returns the size of the groups of a new file with tensors of these sizes, in bytes.
pub fn group_bytes_of(sizes: impl Iterator<Item = u64> + Clone) -> u64 {
    let mut group_bytes = GROUP_BYTES;
    while group_bytes < GROUP_BYTES_MAX && value_count(sizes.clone(), group_bytes) > GROUPS_MAX {
        group_bytes *= 2;
    }
    group_bytes
}

/// Returns the number of chaining values of tensors with these sizes. A tensor that is no longer than a group has none.
pub fn value_count(sizes: impl Iterator<Item = u64>, group_bytes: u64) -> u64 {
    units::count(sizes.filter(|&bytes| bytes > group_bytes), group_bytes)
}

/// Digest of an input, and the chaining values of its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeDigest {
    /// Length of the input in bytes.
    pub length: u64,
    /// The digest.
    pub digest: Digest,
    /// Chaining values of groups of [`GROUP_BYTES`], of an input that is longer. Empty for algorithms without a tree.
    pub values: Vec<ChainingValue>,
}

impl TreeDigest {
    /// Returns the chaining values of groups of `group_bytes`, which is at least [`GROUP_BYTES`].
    pub fn values_of(&self, group_bytes: u64) -> Vec<ChainingValue> {
        if self.length <= group_bytes {
            return Vec::new();
        }
        let (mut values, mut bytes) = (self.values.clone(), GROUP_BYTES);
        while bytes < group_bytes {
            values = tree::parents(&values);
            bytes *= 2;
        }
        values
    }
}

/// Groups of the tensors of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Groups {
    units: Units,
    /// Chaining value of each group, or the digest of a tensor that has only one group.
    values: Vec<u8>,
}

impl Groups {
    /// Returns the groups of tensors at these ranges of the file, with these digests. `values` are the chaining values
    /// of the groups of all tensors that have more than one group. The error is the position of the first tensor whose
    /// digest does not follow from its chaining values.
    pub fn new<'a>(
        group_bytes: u64,
        tensors: impl Iterator<Item = (Range<u64>, &'a [u8])> + Clone,
        values: &[u8],
    ) -> std::result::Result<Groups, usize> {
        let mut own_values = Vec::with_capacity(values.len());
        let mut rest = values;
        for (position, (range, digest)) in tensors.clone().enumerate() {
            let bytes = range.end - range.start;
            if bytes > group_bytes {
                let count = to_usize(bytes.div_ceil(group_bytes)).saturating_mul(DIGEST_BYTES);
                let (own, left) = rest.split_at_checked(count).ok_or(position)?;
                let chaining_values =
                    own.chunks_exact(DIGEST_BYTES).filter_map(|value| value.try_into().ok()).collect();
                tree::root_of(chaining_values).filter(|root| root == digest).ok_or(position)?;
                own_values.extend(own);
                rest = left;
            } else if bytes > 0 {
                own_values.extend(digest);
            }
        }
        let units = Units::new(tensors.map(|(range, _)| (range, group_bytes)), GROUP_BYTES_MAX);
        Ok(Groups { units, values: own_values })
    }

    /// Returns the place of each group.
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// Compares the bytes of a group. Fails with `integrity`, with the first byte of the group.
    pub fn compare(&self, group: &Unit, data: &[u8]) -> Result<()> {
        let _span = profile::span(Stage::Hash).bytes(data.len());
        let begin = to_usize(group.number).saturating_mul(DIGEST_BYTES);
        let value = self.values.get(begin..begin.saturating_add(DIGEST_BYTES));
        let stated = value.and_then(|value| Digest::from_bytes(Algorithm::Blake3, value));
        let stated_of = stated.zip(self.units.tensor(group.tensor)).filter(|_| group.fits(data));
        let no_value = || Error::new(Kind::Internal, format!("no value for {} bytes of {group:?}", data.len()));
        let (stated, tensor) = stated_of.ok_or_else(no_value)?;
        let range = &group.range;
        let found = if *range == tensor {
            Some(Algorithm::Blake3.digest(data))
        } else {
            Digest::from_bytes(Algorithm::Blake3, &tree::subtree(range.start - tensor.start, data))
        };
        if found == Some(stated) {
            return Ok(());
        }
        let found = found.map_or_else(String::new, |found| found.to_string());
        let message = format!(
            "the value of a group of {} bytes is {found}, but the file states {stated}; the data changed after the digest \
             was made",
            data.len()
        );
        Err(Error::new(Kind::Integrity, message).offset(range.start))
    }
}
