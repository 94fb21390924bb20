//! Names of tensors that are similar to a name that no file holds, found in a bounded time.

use std::cmp::Reverse;

/// Number of names that are suggested.
const SUGGESTIONS: usize = 3;
/// Minimum Jaro-Winkler similarity of a suggested name.
const SIMILARITY_MIN: f64 = 0.7;
/// Longest name that is compared, in bytes. The similarity takes a time that grows with the product of both lengths.
const NAME_BYTES_MAX: usize = 256;
/// Number of names whose similarity is computed: those that share the most bytes at their ends with the missing name.
const CANDIDATES_MAX: usize = 200;

/// Returns the names most similar to `name`, the most similar first.
pub(super) fn similar<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    if name.len() > NAME_BYTES_MAX {
        return Vec::new();
    }
    let short = names.enumerate().filter(|(_, other)| other.len() <= NAME_BYTES_MAX);
    let mut candidates: Vec<(Reverse<usize>, usize, &str)> =
        short.map(|(position, other)| (Reverse(shared_bytes(name, other)), position, other)).collect();
    if candidates.len() > CANDIDATES_MAX {
        candidates.select_nth_unstable(CANDIDATES_MAX);
        candidates.truncate(CANDIDATES_MAX);
    }
    candidates.sort_unstable_by_key(|&(_, position, _)| position);
    let compared = candidates.into_iter().map(|(_, _, other)| (strsim::jaro_winkler(name, other), other));
    let mut near: Vec<(f64, &str)> = compared.filter(|(similarity, _)| *similarity >= SIMILARITY_MIN).collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    near.into_iter().take(SUGGESTIONS).map(|(_, other)| other).collect()
}

/// Returns how many bytes two names share at their beginning and at their end.
fn shared_bytes(one: &str, two: &str) -> usize {
    let first = one.bytes().zip(two.bytes()).take_while(|(one, two)| one == two).count();
    let room = one.len().min(two.len()) - first;
    let last = one.bytes().rev().zip(two.bytes().rev()).take(room).take_while(|(one, two)| one == two).count();
    first + last
}
