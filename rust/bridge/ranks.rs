//! Trait of the plans of loads and of saves by ranks.

use super::calls::{encode, parse, unknown};
use super::ffi;
use crate::error::{Error, Kind, Result};
use std::ops::Range;

/// Plan that is identical on all ranks of a group, which run its windows together.
pub(super) trait ExchangePlan {
    fn ranks(&self) -> usize;

    fn windows(&self) -> usize;

    /// Returns the collective that follows the reads of a window, the bytes that it sends to each rank and those that it
    /// receives from each. For "gather", the only number counts the bytes sent to all ranks.
    fn traffic(&self, rank: usize, window: usize) -> (&'static str, Vec<u64>, Vec<u64>);

    /// Returns a hash that is equal on two ranks if their plans are equal.
    fn digest(&self) -> u64;

    /// Checks the number of a rank.
    fn rank(&self, rank: i64) -> Result<usize> {
        index("rank", rank, self.ranks(), "the group")
    }

    /// Checks the number of a window.
    fn window(&self, window: i64) -> Result<usize> {
        index("window", window, self.windows(), "the plan")
    }

    /// Calls a method that all plans have.
    fn call_plan(&self, method: &str, request: &str) -> Result<String> {
        match method {
            "digest" => encode(&self.digest().to_string()),
            "traffic" => {
                let (rank, window) = parse(request)?;
                encode(&self.traffic(self.rank(rank)?, self.window(window)?))
            }
            "windows" => encode(&self.windows()),
            _ => Err(unknown(method)),
        }
    }
}

/// Describes bytes of a shard or local tensor, which are at `offset` of a buffer if they are exchanged.
pub(super) fn rank_range(tensor: usize, item: usize, bytes: Range<u64>, offset: Option<u64>) -> ffi::RankRange {
    ffi::RankRange {
        tensor,
        item,
        begin: bytes.start,
        end: bytes.end,
        is_exchanged: offset.is_some(),
        offset: offset.unwrap_or(0),
        is_contiguous: true,
    }
}

fn index(kind: &str, number: i64, count: usize, owner: &str) -> Result<usize> {
    let index = usize::try_from(number).ok().filter(|&index| index < count);
    index.ok_or_else(|| outside(kind, number, count, owner))
}

/// Returns the error for the number of a rank or window that does not exist.
pub(super) fn outside(kind: &str, number: i64, count: usize, owner: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("{kind} is {number}, but {owner} has {count} {kind}s"))
}
