//! Listings: their keys, and the bounds of what a server may answer.

use super::name::Name;
use crate::remote::stores::{Attempt, Failure, FailureClass};
use quick_xml::escape::unescape;
use std::collections::HashSet;
use std::future::Future;
use std::time::Duration;
use tokio::time::timeout;

/// Upper bound for an answer without the bytes of an object, in bytes. Azure answers with up to 5,000 names of up to 1,024
/// characters.
pub const ANSWER_BYTES_MAX: usize = 32 << 20;
/// Upper bound for all keys of a listing, in bytes.
const LISTING_BYTES_MAX: usize = 64 << 20;
/// Upper bound for the requests of a listing. S3 answers each with up to 1,000 keys.
const LISTING_REQUESTS_MAX: usize = 100_000;
/// Longest time of a listing.
const LISTING_TIME_MAX: Duration = Duration::from_secs(300);

/// Bounds of a listing in several answers.
#[derive(Debug, Default)]
pub struct Bounds {
    bytes: usize,
    /// Beginnings of the next answers, as the answers name them.
    tokens: HashSet<String>,
}

impl Bounds {
    /// Counts a key. Fails if the keys have too many bytes.
    pub fn add(&mut self, key: &str) -> Attempt<()> {
        self.bytes = self.bytes.saturating_add(key.len());
        match self.bytes <= LISTING_BYTES_MAX {
            true => Ok(()),
            false => Err(endless(&format!("more than {LISTING_BYTES_MAX} bytes of names"))),
        }
    }

    /// Counts an answer. Returns `next`, the beginning of the next answer. Fails if an earlier answer had the same
    /// `next`, or if there are too many answers.
    pub fn next<T: AsRef<str>>(&mut self, next: T) -> Attempt<T> {
        self.add(next.as_ref())?;
        if !self.tokens.insert(next.as_ref().to_owned()) {
            return Err(endless("an earlier part of the listing once more"));
        }
        if self.tokens.len() >= LISTING_REQUESTS_MAX {
            return Err(endless(&format!("more than {LISTING_REQUESTS_MAX} parts of the listing")));
        }
        Ok(next)
    }
}

fn endless(what: &str) -> Failure {
    let message =
        format!("the service answered with {what}; give the URL of a file or of an index instead of a prefix");
    Failure::new(FailureClass::Permanent, message)
}

/// Runs the requests of a listing, which end after some time. Fails if the requests take too long.
pub async fn in_time<T>(listing: impl Future<Output = Attempt<T>>) -> Attempt<T> {
    let seconds = LISTING_TIME_MAX.as_secs();
    let late = |_| Err(endless(&format!("an incomplete listing after {seconds} s")));
    timeout(LISTING_TIME_MAX, listing).await.unwrap_or_else(late)
}

/// Lists the names in a directory. `page` returns the keys of one answer, and the beginning of the next one. Fails if
/// the listing exceeds a bound.
pub async fn names<T: AsRef<str>, F>(directory: &str, mut page: impl FnMut(Option<T>) -> F) -> Attempt<Vec<Name>>
where
    F: Future<Output = Attempt<(Vec<String>, Option<T>)>>,
{
    let prefix = prefix_of(directory);
    in_time(async {
        let (mut names, mut bounds, mut begin) = (Vec::new(), Bounds::default(), None);
        loop {
            let (keys, next) = page(begin.take()).await?;
            for key in keys {
                bounds.add(&key)?;
                names.extend(name_of(&key, &prefix));
            }
            let Some(next) = next else { return Ok(names) };
            begin = Some(bounds.next(next)?);
        }
    })
    .await
}

/// Returns the prefix of all keys in a directory, which may end with a slash.
pub fn prefix_of(directory: &str) -> String {
    let slash = if directory.is_empty() || directory.ends_with('/') { "" } else { "/" };
    format!("{directory}{slash}")
}

/// Returns the name of a key in the directory with this prefix. Keys in deeper levels have none, and neither have those that
/// cannot be part of a path, such as `PREFIX/`, the mark of a directory.
pub fn name_of(key: &str, prefix: &str) -> Option<Name> {
    Name::parse(key.strip_prefix(prefix)?).ok().filter(|name| name.parts().count() == 1)
}

/// Keys in an answer of the service of a bucket.
#[derive(Clone, Debug)]
pub struct Keys(pub Vec<String>);

/// Takes the keys of objects out of a listing of S3, Google Cloud Storage or Azure.
///
/// `object_store` would refuse the whole listing because of one key that it does not allow, and change other keys. So it
/// gets a listing without entries, from which it takes the beginning of the next one.
pub fn take_keys(listing: &str) -> (String, Keys) {
    let (mut rest, mut keys) = (listing.to_owned(), Vec::new());
    for (entry, key) in [("CommonPrefixes", ""), ("BlobPrefix", ""), ("Contents", "Key"), ("Blob", "Name")] {
        rest = without_elements(&rest, entry, |content| {
            // Azure lists the directories of hierarchical accounts as blobs.
            if !content.contains("<ResourceType>directory</ResourceType>") {
                keys.extend(element(content, key).and_then(|(_, key, _)| Some(unescape(key).ok()?.into_owned())));
            }
        });
    }
    (rest, Keys(keys))
}

fn without_elements(mut text: &str, name: &str, mut take: impl FnMut(&str)) -> String {
    let mut others = String::new();
    while let Some((before, content, after)) = element(text, name) {
        others.push_str(before);
        take(content);
        text = after;
    }
    others + text
}

/// Splits a text at its first element of a name: before it, its content, and after it.
pub fn element<'a>(text: &'a str, name: &str) -> Option<(&'a str, &'a str, &'a str)> {
    let (before, rest) = text.split_once(&format!("<{name}>"))?;
    let (content, after) = rest.split_once(&format!("</{name}>"))?;
    Some((before, content, after))
}
