//! Which files of a directory, or of a remote prefix, are its checkpoint.
//!
//! The checkpoint is what transformers and diffusers load: the index, or else the file of that name, or else all its
//! shards. A name with a variant, such as `model.fp16.safetensors`, gives way to the name without one. Further files
//! belong together only if their names differ in nothing but numbers that are no versions.

use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

/// Suffix of the index file of a sharded checkpoint, a convention of the Hugging Face libraries.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";
/// Suffix of the files of a checkpoint.
pub(crate) const FILE_SUFFIX: &str = ".safetensors";
/// Suffixes of PyTorch files.
const PYTORCH_SUFFIXES: [&str; 4] = [".bin", ".ckpt", ".pt", ".pth"];
/// Ends of the names of files whose download has not ended.
pub(crate) const UNFINISHED: [&str; 6] =
    [".aria2", ".crdownload", ".download", ".incomplete", ".part", ".safetensors.tmp"];
/// Names without suffix of the checkpoint of a directory that holds several, as in transformers and in diffusers.
const USUAL_STEMS: [&str; 2] = ["model", "diffusion_pytorch_model"];
/// Maximum number of names in an error.
const SHOWN_MAX: usize = 4;

/// Checkpoint of a directory.
pub(super) enum Chosen<N> {
    /// Name of its index file.
    Index(N),
    /// Sorted names of its files.
    Files(Vec<N>),
}

/// Use of a file. An index comes before a file, and a file before shards of the same name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    Index,
    File,
    Shards,
}

/// Name of a file, which says to which checkpoint the file belongs.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Stem {
    /// Name without suffix and numbers, with the variant at its end: `model.fp16`.
    text: String,
    is_of: Use,
}

/// Files of one checkpoint, with the number and the count of shards.
type Numbered<N> = Vec<(N, Option<(u64, u64)>)>;

impl Stem {
    /// Parses the name of an index or safetensors file. Also returns the number and the count of a shard.
    fn parse(name: &str) -> Option<(Stem, Option<(u64, u64)>)> {
        if let Some(text) = index_stem(name) {
            return Some((Stem { text, is_of: Use::Index }, None));
        }
        let text = name.strip_suffix(FILE_SUFFIX)?;
        Some(match shard_numbers(text) {
            // Each rank of torch.distributed.checkpoint has its own numbers, and need not write all files.
            Some((stem, ..)) if stem.starts_with("shard-") && stem.ends_with("-model") => {
                (Stem { text: without_numbers(text), is_of: Use::File }, None)
            }
            Some((stem, number, count, variant)) => {
                (Stem { text: format!("{stem}{variant}"), is_of: Use::Shards }, Some((number, count)))
            }
            None => (Stem { text: without_numbers(text), is_of: Use::File }, None),
        })
    }

    /// Returns whether this checkpoint gives way to another one in the same directory.
    fn gives_way_to(&self, other: &Stem) -> bool {
        match self.text.strip_prefix(&other.text) {
            Some("") => other.is_of < self.is_of,
            rest => rest.is_some_and(|variant| variant.starts_with('.')),
        }
    }
}

/// Returns whether a name belongs to an index: `model.safetensors.index.json`, or `model.safetensors.index.fp16.json`, as
/// transformers and diffusers write a variant.
pub(crate) fn is_index(name: &str) -> bool {
    index_stem(name).is_some()
}

fn index_stem(name: &str) -> Option<String> {
    let (stem, rest) = name.strip_suffix(".json")?.rsplit_once(".safetensors.index")?;
    (rest.is_empty() || rest.starts_with('.')).then(|| format!("{stem}{rest}"))
}

/// Splits the name of a shard, `model-00001-of-00002.fp16`, into `model`, the numbers and `.fp16`.
fn shard_numbers(text: &str) -> Option<(&str, u64, u64, &str)> {
    let (before, rest) = text.rsplit_once("-of-")?;
    let (stem, number) = before.rsplit_once('-')?;
    let (count, variant) = rest.split_at(rest.find('.').unwrap_or(rest.len()));
    Some((stem, number.parse().ok()?, count.parse().ok()?, variant))
}

/// Replaces all numbers of a name, except for versions: `model-v1` and `model-v2` are not parts of one checkpoint.
fn without_numbers(text: &str) -> String {
    let (mut shown, mut is_version) = (String::new(), false);
    for character in text.chars() {
        is_version = match character {
            'v' | 'V' => !shown.ends_with(char::is_alphanumeric),
            '0'..='9' | '.' => is_version,
            _ => false,
        };
        match character {
            '0'..='9' if !is_version && shown.ends_with('0') => {}
            '0'..='9' if !is_version => shown.push('0'),
            _ => shown.push(character),
        }
    }
    shown
}

/// Returns whether programs leave out a file: it is hidden, as are the `._` files of macOS.
pub(crate) fn is_hidden(name: &[u8]) -> bool {
    name.starts_with(b".")
}

/// Chooses the checkpoint among the names in a directory.
///
/// # Errors
/// `is-a-directory` if no name belongs to a safetensors file, `invalid-argument` if there are several checkpoints,
/// `file-not-found` if shards are missing.
pub(super) fn choose<N: AsRef<Path> + Ord>(names: Vec<N>) -> Result<Chosen<N>> {
    let mut found: BTreeMap<Stem, Numbered<N>> = BTreeMap::new();
    let mut remedy = "; give the path of a file or of a checkpoint";
    for name in names.into_iter().filter(|name| !is_hidden(name.as_ref().as_os_str().as_encoded_bytes())) {
        let text = text_of(&name);
        if PYTORCH_SUFFIXES.iter().any(|suffix| text.ends_with(suffix)) {
            remedy = ", but PyTorch files; convert them with `fst convert DIRECTORY model.safetensors`";
        } else if UNFINISHED.iter().any(|suffix| text.ends_with(suffix)) {
            remedy = ", but unfinished downloads; download the checkpoint again";
        } else if text.ends_with(".distcp") {
            remedy =
                ", but files of torch.distributed.checkpoint; load them with it, or save with fst.dcp.StorageWriter";
        }
        if let Some((stem, numbers)) = Stem::parse(&text) {
            found.entry(stem).or_default().push((name, numbers));
        }
    }
    let stems: Vec<Stem> = found.keys().cloned().collect();
    found.retain(|stem, _| !stems.iter().any(|other| stem.gives_way_to(other)));
    if found.keys().any(|stem| stem.is_of == Use::Index) {
        found.retain(|stem, _| stem.is_of == Use::Index);
    }
    for usual in USUAL_STEMS {
        if found.keys().any(|stem| stem.text == usual) {
            found.retain(|stem, _| stem.text == usual);
        }
    }
    let refused = |kind, message| Err(Error::new(kind, message));
    match (found.len(), found.pop_first()) {
        (_, None) => refused(Kind::IsADirectory, format!("this directory holds no *{FILE_SUFFIX} file{remedy}")),
        (1, Some((stem, mut files))) => {
            files.sort();
            if stem.is_of == Use::Shards {
                check_complete(&files)?;
            }
            let mut names: Vec<N> = files.into_iter().map(|(name, _)| name).collect();
            Ok(match (stem.is_of, names.pop()) {
                (Use::Index, Some(index)) => Chosen::Index(index),
                (_, last) => Chosen::Files(names.into_iter().chain(last).collect()),
            })
        }
        (count, Some((first, files))) => {
            let of_each = [&files].into_iter().chain(found.values()).filter_map(|files| files.first());
            let shown = listed(of_each.map(|(name, _)| text_of(name)), count);
            let message = match first.is_of {
                Use::Index => {
                    format!("this directory holds {count} index files, {shown}; give the path of one of them")
                }
                _ => format!(
                    "this directory holds {count} checkpoints, such as {shown}, and no index that says which files belong \
                     together; give the path of the file to load, or the paths of all files of one checkpoint"
                ),
            };
            refused(Kind::InvalidArgument, message)
        }
    }
}

/// Checks that all shards of one checkpoint are there.
fn check_complete<N: AsRef<Path>>(files: &Numbered<N>) -> Result<()> {
    let (numbers, counts): (BTreeSet<u64>, BTreeSet<u64>) = files.iter().filter_map(|(_, numbers)| *numbers).unzip();
    let (Some((name, Some((_, count)))), 1) = (files.first(), counts.len()) else {
        let shown = listed(counts.iter().map(|count| format!("shards of {count}")), counts.len());
        let message = format!(
            "this directory mixes {shown}, and no index says which of them belong together; remove those of an older \
             save, or give the paths of the files to load"
        );
        return Err(Error::new(Kind::InvalidArgument, message));
    };
    // Some programs count from 0.
    let begin = u64::from(!numbers.contains(&0));
    let missing = || (begin..count.saturating_add(begin)).filter(|number| !numbers.contains(number));
    if missing().next().is_none() {
        return Ok(());
    }
    let name = text_of(name);
    let replaced = |missing: u64| {
        let (before, after) = name.rsplit_once("-of-").unwrap_or((&name, ""));
        let (stem, digits) = before.rsplit_once('-').unwrap_or((before, ""));
        format!("{stem}-{missing:0width$}-of-{after}", width = digits.len())
    };
    let present = numbers.range(begin..count.saturating_add(begin)).count();
    let absent = to_usize(*count).saturating_sub(present);
    let shown = listed(missing().map(replaced), absent);
    let message = format!(
        "{absent} of the {count} shards are missing: {shown}; download or copy the checkpoint again, or give the paths of \
         the files to load"
    );
    Err(Error::new(Kind::FileNotFound, message))
}

/// Lists the first of `count` texts.
fn listed(texts: impl Iterator<Item = String>, count: usize) -> String {
    let shown = texts.take(SHOWN_MAX).collect::<Vec<_>>().join(", ");
    if count > SHOWN_MAX { format!("{shown} and {} more", count - SHOWN_MAX) } else { shown }
}

fn text_of(name: &impl AsRef<Path>) -> String {
    name.as_ref().to_string_lossy().into_owned()
}

/// Lists the names in a directory.
pub(crate) fn names_in(directory: &Path) -> Result<Vec<OsString>> {
    let failed = |error: io::Error| Error::from_io(error, directory, "cannot list");
    let names = fs::read_dir(directory).map_err(failed)?.map(|entry| Ok(entry?.file_name()));
    names.collect::<io::Result<_>>().map_err(failed)
}
