//! Methods that the plans of loads and of saves by ranks have in common.

use super::calls::{encode, parse, unknown};
use crate::error::{Error, Kind, Result};

/// Plan that is identical on all ranks of a group, which run its windows together.
pub(super) trait ExchangePlan {
    fn ranks(&self) -> usize;

    fn windows(&self) -> usize;

    /// Returns the collective that follows the reads of a window, the bytes that it sends to each rank and those that it
    /// receives from each. For "gather", the only number is that of the bytes sent to all ranks.
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

fn index(kind: &str, number: i64, count: usize, owner: &str) -> Result<usize> {
    let index = usize::try_from(number).ok().filter(|&index| index < count);
    index.ok_or_else(|| outside(kind, number, count, owner))
}

/// Returns the error for the number of a rank or window that does not exist.
pub(super) fn outside(kind: &str, number: i64, count: usize, owner: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("{kind} is {number}, but {owner} has {count} {kind}s"))
}
