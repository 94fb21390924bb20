//! Shares of work that leave everybody with as much as everybody else.

/// `total` in `count` parts that differ by one at most.
pub(super) fn split_evenly(total: u64, count: usize) -> Vec<u64> {
    fill_up(&vec![0; count], total)
}

/// What each gets of `total` beside the load it has, so that in the end as many as can be have the same: who has
/// more already gets nothing.
pub(super) fn fill_up(loads: &[u64], total: u64) -> Vec<u64> {
    let filled = |level: u64| loads.iter().map(|&load| u128::from(level.saturating_sub(load))).sum::<u128>();
    // The highest level for which there is enough.
    let highest = loads.iter().copied().max().unwrap_or(0).saturating_add(total);
    let (mut level, mut above) = (0, highest.saturating_add(1));
    while above - level > 1 {
        let middle = level + (above - level) / 2;
        if filled(middle) <= u128::from(total) {
            level = middle;
        } else {
            above = middle;
        }
    }
    let mut left = total.saturating_sub(u64::try_from(filled(level)).unwrap_or(u64::MAX));
    let shard = |&load: &u64| {
        let one_more = u64::from(left > 0 && load <= level);
        left -= one_more;
        level.saturating_sub(load) + one_more
    };
    loads.iter().map(shard).collect()
}
