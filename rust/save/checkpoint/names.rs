//! Names of the files of a checkpoint.

use crate::encryption::fill_random;
use crate::error::Result;
use crate::source::replaced::is_token;

/// End of the name of a checkpoint and of its shards.
pub(super) const SUFFIX: &str = ".safetensors";
/// End of the names of empty files that are locked, and of files that are renamed when they are complete.
pub(super) const TEMPORARY_SUFFIX: &str = ".fst-tmp";

/// Returns random hexadecimal digits, with a letter, so that they are not taken for a date.
pub(super) fn new_token() -> Result<String> {
    loop {
        let mut random = [0; 4];
        fill_random(&mut random)?;
        let token = format!("{:08x}", u32::from_le_bytes(random));
        if !is_number(&token) {
            return Ok(token);
        }
    }
}

/// Name with the token of a save.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NameOfSave<'a> {
    /// Name of the checkpoint without its suffix.
    pub(super) stem: &'a str,
    pub(super) token: &'a str,
}

impl<'a> NameOfSave<'a> {
    /// Parses the name of the lock of a save: `.model.safetensors.TOKEN.fst-tmp`.
    pub(super) fn of_lock(name: &'a str) -> Option<Self> {
        let (name, token) = name.strip_prefix('.')?.strip_suffix(TEMPORARY_SUFFIX)?.rsplit_once('.')?;
        Some(NameOfSave { stem: name.strip_suffix(SUFFIX)?, token }).filter(|_| is_token(token))
    }

    /// Parses the name of values that are not tensors: `model.state-TOKEN`.
    pub(super) fn of_state(name: &'a str) -> Option<Self> {
        let (stem, token) = name.rsplit_once(".state-")?;
        Some(NameOfSave { stem, token }).filter(|_| is_token(token))
    }

    /// Parses the temporary name of a shard, `model-00001-of-00002.safetensors.TOKEN`.
    pub(super) fn of_staged(name: &'a str) -> Option<Self> {
        let (shard, token) = name.rsplit_once('.').filter(|(_, token)| is_token(token))?;
        Some(NameOfSave { stem: shard_stem(shard)?, token })
    }

    /// Parses the name of a shard that has a token, `model-TOKEN-00001-of-00002.safetensors`.
    pub(super) fn of_shard(name: &'a str) -> Option<Self> {
        let (stem, token) = shard_stem(name)?.rsplit_once('-').filter(|(_, token)| is_token(token))?;
        Some(NameOfSave { stem, token })
    }

    /// Parses the name of any file of a save, except for its lock.
    pub(super) fn of_file(name: &'a str) -> Option<Self> {
        NameOfSave::of_state(name).or_else(|| NameOfSave::of_staged(name)).or_else(|| NameOfSave::of_shard(name))
    }

    /// Returns the name of the lock of the save.
    pub(super) fn lock(self) -> String {
        format!(".{}{SUFFIX}.{}{TEMPORARY_SUFFIX}", self.stem, self.token)
    }
}

/// Returns what is before the numbers in the name of a shard: `model` of `model-00001-of-00002.safetensors`.
pub(super) fn shard_stem(name: &str) -> Option<&str> {
    let (rest, count) = name.strip_suffix(SUFFIX)?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    Some(stem).filter(|_| [number, count].iter().all(|text| text.len() >= 5 && is_number(text)))
}

pub(super) fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}
