//! Shards: encrypted files of one save. The metadata of their headers, which the code of the header covers, bind them to
//! each other, so that none can be left out or replaced by a shard of another save.
//!
//! ```text
//! "fst.encryption.shard": "<32 random hexadecimal digits, the same in all shards>:<number from 1>:<number of shards>"
//! ```

use crate::error::{Error, Kind, Result};
use crate::source::files::Listing;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Key of the metadata.
pub const SHARD_KEY: &str = "fst.encryption.shard";

/// Number of hexadecimal digits of a save.
const SAVE_DIGITS: usize = 32;

/// Place of a file among the files of one save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Digits that only the files of this save have.
    save: String,
    /// Number of the file, from 1.
    number: usize,
    count: usize,
}

impl Shard {
    /// Parses the text of the metadata. Fails with `malformed`, without the path.
    pub fn parse(text: &str) -> Result<Shard> {
        let fields = || {
            let (save, rest) = text.split_once(':')?;
            let (number, count) = rest.split_once(':')?;
            let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            let is_save = save.len() == SAVE_DIGITS && save.bytes().all(is_digit);
            let parse = |text: &str| text.parse().ok().filter(|value: &usize| value.to_string() == text);
            let (number, count) = (parse(number)?, parse(count)?);
            (is_save && (1..=count).contains(&number)).then(|| Shard { save: save.to_owned(), number, count })
        };
        let malformed = || {
            let message = format!("the metadata {SHARD_KEY:?} are not 32 hexadecimal digits, a number and a count");
            Error::new(Kind::Malformed, message)
        };
        fields().ok_or_else(malformed)
    }
}

/// Checks that files which are opened together belong together: the files of a directory or index are all shards of one
/// save, or none is a shard. Files that a caller names may be some shards of one save, but not some of several.
pub fn check(files: &[(&Path, Option<&Shard>)], listings: &[Listing]) -> Result<()> {
    for listing in listings {
        let own = files.get(listing.files.clone()).unwrap_or_default();
        let Some(shard) = own.iter().find_map(|(_, shard)| *shard) else { continue };
        let is_other = |other: &Option<&Shard>| other.is_none_or(|other| other.save != shard.save);
        if let Some((path, _)) = own.iter().find(|(_, other)| is_other(other)) {
            let message = "the file belongs to another save than the other files of the checkpoint: someone may have \
                           replaced it by an older one, or added it";
            return Err(Error::new(Kind::Integrity, message).at(path));
        }
        check_complete(own).map_err(|error| error.at(&listing.path))?;
    }
    let mut saves: BTreeMap<Option<&str>, Vec<_>> = BTreeMap::new();
    for (path, shard) in files {
        saves.entry(shard.map(|shard| shard.save.as_str())).or_default().push((*path, *shard));
    }
    if saves.len() < 2 {
        return Ok(());
    }
    for (path, own) in saves.values().filter_map(|own| own.first().map(|(path, _)| (path, own))) {
        let at =
            |error: Error| error.note("the other files belong to other saves; load those of each save alone").at(path);
        check_complete(own).map_err(at)?;
    }
    Ok(())
}

/// Checks that shards of one save are complete, each once. Files that are no shards are complete.
fn check_complete(files: &[(&Path, Option<&Shard>)]) -> Result<()> {
    let numbers: BTreeSet<usize> = files.iter().filter_map(|(_, shard)| shard.map(|shard| shard.number)).collect();
    let count = files.iter().find_map(|(_, shard)| shard.map(|shard| shard.count)).unwrap_or(0);
    let missing = (1..=count).find(|number| !numbers.contains(number));
    if let Some(number) = missing {
        let message = format!(
            "encrypted file {number} of {count} of the save is missing: someone may have removed it. Restore the file, \
             or load the other files by their own paths"
        );
        return Err(Error::new(Kind::Integrity, message));
    }
    Ok(())
}
