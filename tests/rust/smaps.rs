//! Mappings of this process, as the kernel describes them.

use std::fs;
use std::ops::Range;

/// Entry of `/proc/self/smaps`.
pub struct Mapping {
    pub addresses: Range<u64>,
    /// Path of the mapped file, or empty.
    pub path: String,
    fields: Vec<(String, String)>,
}

impl Mapping {
    /// Returns the words of a field, such as `12 kB` for `Rss`.
    pub fn words(&self, name: &str) -> Vec<&str> {
        let field = self.fields.iter().find(|(known, _)| known == name);
        field.map(|(_, value)| value.split_whitespace().collect()).unwrap_or_default()
    }
}

pub fn mappings() -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
        let parse = |text| u64::from_str_radix(text, 16);
        if let Some((Ok(begin), Ok(end))) = range.map(|(begin, end)| (parse(begin), parse(end))) {
            let path = line.split_whitespace().nth(5).unwrap_or_default().to_owned();
            mappings.push(Mapping { addresses: begin..end, path, fields: Vec::new() });
        } else if let (Some((name, value)), Some(last)) = (line.split_once(':'), mappings.last_mut()) {
            last.fields.push((name.to_owned(), value.to_owned()));
        }
    }
    mappings
}
