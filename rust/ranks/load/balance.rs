//! Balanced distribution of work over ranks.

use crate::ranks::most;

/// Splits `total` into `count` parts that differ by at most one.
pub(super) fn split_evenly(total: u64, count: usize) -> Vec<u64> {
    fill_up(&vec![0; count], total)
}

/// Distributes `total` on top of existing loads so that the sums are as equal as possible. Loads above the common level
/// get nothing.
pub(super) fn fill_up(loads: &[u64], total: u64) -> Vec<u64> {
    let filled = |level: u64| loads.iter().map(|&load| u128::from(level.saturating_sub(load))).sum::<u128>();
    let highest = loads.iter().copied().max().unwrap_or(0).saturating_add(total);
    let level = most(highest, |level| filled(level) <= u128::from(total));
    let mut left = total.saturating_sub(u64::try_from(filled(level)).unwrap_or(u64::MAX));
    let portion = |&load: &u64| {
        let one_more = u64::from(left > 0 && load <= level);
        left -= one_more;
        level.saturating_sub(load) + one_more
    };
    loads.iter().map(portion).collect()
}
