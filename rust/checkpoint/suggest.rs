//! Names of tensors that are similar to a name that no file holds, or to a pattern that matches none, found in a bounded
//! time.

use std::cmp::Reverse;
use std::collections::HashMap;

/// Number of names that are suggested.
const SUGGESTIONS: usize = 3;
/// Minimum Jaro-Winkler similarity of a suggested name.
const SIMILARITY_MIN: f64 = 0.7;
/// Longest name that is compared, in bytes. The similarity takes a time that grows with the product of both lengths.
const NAME_BYTES_MAX: usize = 256;
/// Number of names whose similarity is computed: those that share the most bytes at their ends with the missing name.
const CANDIDATES_MAX: usize = 200;

/// Returns the names most similar to `name`, the most similar first.
pub(crate) fn similar<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
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

/// Returns names of which a part is most similar to the longest text without wildcards in a pattern. Parts are as many
/// words, between dots, as that text has.
pub(crate) fn similar_to_pattern<'a>(pattern: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let texts = pattern.split(['*', '?', '[', ']']).map(|text| text.trim_matches('.'));
    let text = texts.max_by_key(|text| text.len()).unwrap_or_default();
    let words = text.split('.').count();
    // The first name with each part.
    let mut first: HashMap<&str, &str> = HashMap::new();
    let mut parts = Vec::new();
    for name in names {
        for part in parts_of(name, words) {
            first.entry(part).or_insert_with(|| {
                parts.push(part);
                name
            });
        }
    }
    let mut near: Vec<&str> =
        similar(text, parts.into_iter()).iter().filter_map(|part| first.get(part).copied()).collect();
    near.dedup();
    near
}

/// Returns the end of an error with similar names, if there are any.
pub(crate) fn hint(what: &str, near: &[&str]) -> String {
    let near: Vec<String> = near.iter().map(|name| format!("{name:?}")).collect();
    if near.is_empty() { String::new() } else { format!("; the {what} are {}", near.join(", ")) }
}

/// Iterates over all runs of so many words of a name.
fn parts_of(name: &str, words: usize) -> impl Iterator<Item = &str> {
    let after_dots = name.match_indices('.').map(|(dot, _)| dot + 1);
    let begins: Vec<usize> = std::iter::once(0).chain(after_dots).chain([name.len() + 1]).collect();
    let runs: Vec<_> = begins.iter().zip(begins.iter().skip(words)).map(|(&begin, &next)| begin..next - 1).collect();
    runs.into_iter().filter_map(|run| name.get(run))
}

/// Returns how many bytes two names share at their beginning and at their end.
fn shared_bytes(one: &str, two: &str) -> usize {
    let first = one.bytes().zip(two.bytes()).take_while(|(one, two)| one == two).count();
    let room = one.len().min(two.len()) - first;
    let last = one.bytes().rev().zip(two.bytes().rev()).take(room).take_while(|(one, two)| one == two).count();
    first + last
}
