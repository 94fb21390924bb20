//! Values of Redis.
//!
//! A file is the value of one key, or several values as tensorizer keeps them: `key:NAME:OFFSET` has the bytes of the file
//! from `OFFSET` on, for example one tensor. A value has at most 512 MB, so that larger files need several.
//!
//! The client is fst's own. The crate `redis` returns an answer after its last byte, in a buffer of its own, whereas
//! [`Store::get`] passes the bytes on as they arrive, so that a lost connection costs only the bytes that are missing.
//! Little of the protocol is needed, and TCP and TLS are in the library anyway.
//!
//! A save stores one value: see [`save`].
//!
//! Redis has no versions. Each answer states the length of every value that it reads, at the same moment.

mod connection;
mod save;

use super::trust::Trust;
use super::{Answer, Attempt, Failure, FailureClass, Store, Uploads};
use crate::error::Result;
use crate::num::{to_u64, to_usize};
use crate::os::mutex::Mutex;
use crate::remote::credentials::redis::Credentials;
pub use crate::remote::credentials::redis::split_port;
use crate::remote::find::listing::{self, Bounds};
use crate::remote::find::location::Location;
use crate::remote::find::name::Name;
use crate::remote::find::version::Version;
use crate::remote::transfer::runtime;
use async_trait::async_trait;
use bytes::Bytes;
pub use connection::read_answers;
use connection::{Connection, Reply, unexpected};
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::vec;

/// Number of keys that the server looks at for each step of a search.
const SCAN_COUNT: &str = "1000";

pub(super) struct Redis {
    credentials: Arc<Credentials>,
    /// Values of the files that have several.
    files: Mutex<HashMap<String, Arc<[Value]>>>,
}

/// Value with some bytes of a file.
#[derive(Hash)]
struct Value {
    key: String,
    /// Offset of the first byte in the file.
    begin: u64,
    length: u64,
}

impl Value {
    fn end(&self) -> u64 {
        self.begin.saturating_add(self.length)
    }

    /// Returns the bytes of the value that are in a range of the file.
    fn part(&self, range: &Range<u64>) -> Range<u64> {
        range.start.max(self.begin) - self.begin..range.end.min(self.end()).saturating_sub(self.begin)
    }
}

impl Redis {
    /// Opens a server. Sends nothing. Fails with `invalid-argument` for a port, a user or an option that does not fit.
    pub(super) fn open(location: &Location, settings: &BTreeMap<String, String>, trust: Trust) -> Result<Redis> {
        let credentials = Arc::new(Credentials::of(location, settings, trust)?);
        Ok(Redis { credentials, files: Mutex::default() })
    }

    /// Returns a connection that no other request uses.
    async fn connect(&self) -> Attempt<Connection> {
        let runtime = runtime::client();
        let runtime = runtime.ok_or_else(|| Failure::new(FailureClass::Permanent, "no runtime runs this request"))?;
        let credentials: Arc<dyn Any + Send + Sync> = self.credentials.clone();
        let idle = runtime.idle().take(|known| Arc::ptr_eq(known, &credentials));
        match idle.and_then(|connection| connection.downcast().ok()) {
            Some(connection) => Ok(*connection),
            None => Connection::open(&self.credentials, runtime.stall()).await,
        }
    }

    /// Requests a range of the value of one key. Returns `None` if there is no such key.
    async fn get_value(&self, connection: &mut Connection, key: &str, range: &Range<u64>) -> Attempt<Option<u64>> {
        let [first, last] = bounds(range);
        connection.transact(&[&["EXISTS", key], &["STRLEN", key], &["GETRANGE", key, &first, &last]]).await?;
        let exists = connection.integer().await? > 0;
        let length = connection.integer().await?;
        if !exists {
            connection.bulk().await?;
        }
        Ok(exists.then_some(length))
    }

    /// Requests a range of a file that has several values.
    async fn get_values(&self, mut connection: Connection, values: &[Value], range: &Range<u64>) -> Attempt<Answer> {
        let length = values.last().map_or(0, Value::end);
        let range = clip(range, length);
        let touched: Vec<&Value> =
            values.iter().filter(|value| value.begin < range.end && value.end() > range.start).collect();
        let bounds: Vec<[String; 2]> = touched.iter().map(|value| bounds(&value.part(&range))).collect();
        let mut commands = Vec::new();
        commands.extend(touched.iter().map(|value| vec!["STRLEN", &value.key]));
        for (value, [first, last]) in touched.iter().zip(&bounds) {
            commands.push(vec!["GETRANGE", &value.key, first, last]);
        }
        let commands: Vec<&[&str]> = commands.iter().map(Vec::as_slice).collect();
        connection.transact(&commands).await?;
        for value in &touched {
            let found = connection.integer().await?;
            if found != value.length {
                let Value { key, length, .. } = value;
                let what = format!("the value of {key:?} had {length} bytes and now has {found}");
                return Err(Failure::changed(&what));
            }
        }
        let parts: Vec<u64> =
            touched.iter().map(|value| value.part(&range)).map(|part| part.end - part.start).collect();
        let body = self.body(connection, parts);
        Ok(Answer { length: Some(length), version: version_of(values), range, body, unreceived: None })
    }

    /// Returns the payloads of the next replies, which have these lengths.
    fn body(&self, connection: Connection, lengths: Vec<u64>) -> BoxStream<'static, Attempt<Bytes>> {
        let credentials = Arc::clone(&self.credentials);
        let body = Body { connection, lengths: lengths.into_iter(), missing: 0, credentials };
        stream::try_unfold(body, Body::next).boxed()
    }

    /// Finds the values of a file that has several. Returns `None` if there are none.
    async fn find_values(&self, connection: &mut Connection, key: &str) -> Attempt<Option<Arc<[Value]>>> {
        let found = find_keys(connection, key).await?;
        let commands: Vec<[&str; 2]> = found.iter().map(|(_, key)| ["STRLEN", key]).collect();
        connection.transact(&commands.iter().map(|command| command.as_slice()).collect::<Vec<_>>()).await?;
        let mut values = Vec::with_capacity(found.len());
        for (begin, key) in found {
            values.push(Value { key, begin, length: connection.integer().await? });
        }
        values.retain(|value| value.length > 0);
        values.sort_by_key(|value| value.begin);
        let mut end = 0;
        for value in &values {
            if value.begin != end {
                let message = format!(
                    "the values of this file do not follow each other: the next one after byte {end} is {:?}; store \
                     all of them again",
                    value.key
                );
                return Err(Failure::new(FailureClass::Permanent, message));
            }
            end = value.end();
        }
        Ok((!values.is_empty()).then(|| values.into()))
    }
}

#[async_trait]
impl Store for Redis {
    async fn get(&self, key: &str, range: Range<u64>, version: Option<&Version>) -> Attempt<Answer> {
        let mut connection = self.connect().await?;
        let known = version.and_then(|_| self.files.lock().get(key).cloned());
        if let Some(values) = known {
            return self.get_values(connection, &values, &range).await;
        }
        if let Some(length) = self.get_value(&mut connection, key, &range).await? {
            self.files.lock().remove(key);
            let range = clip(&range, length);
            let body = self.body(connection, vec![range.end - range.start]);
            return Ok(Answer { length: Some(length), version: Version::default(), range, body, unreceived: None });
        }
        let Some(values) = self.find_values(&mut connection, key).await? else {
            let message = "the server has no key of this name; check the key and the number of the database";
            return Err(Failure::new(FailureClass::NotFound, message));
        };
        self.files.lock().insert(key.to_owned(), Arc::clone(&values));
        self.get_values(connection, &values, &range).await
    }

    async fn list(&self, directory: &str) -> Attempt<Option<Vec<Name>>> {
        let prefix = listing::prefix_of(directory);
        let mut connection = self.connect().await?;
        let keys = scan(&mut connection, &prefix).await?;
        connection.keep(&self.credentials);
        let name = |key: String| {
            let name = listing::name_of(&key, &prefix)?;
            // Several values may be one file.
            let file = name.as_str().split_once(".safetensors:").map(|(before, _)| format!("{before}.safetensors"));
            file.map_or(Some(name), |file| Name::parse(&file).ok())
        };
        let names: BTreeSet<Name> = keys.into_iter().filter_map(name).collect();
        Ok(Some(names.into_iter().collect()))
    }

    fn uploads(&self) -> Option<&dyn Uploads> {
        Some(self)
    }
}

struct Body {
    connection: Connection,
    /// Lengths of the replies that have not begun.
    lengths: vec::IntoIter<u64>,
    /// Bytes of the current reply that have not arrived.
    missing: u64,
    credentials: Arc<Credentials>,
}

impl Body {
    /// Returns the next bytes. Keeps the connection for other requests after the last ones.
    async fn next(mut self) -> Attempt<Option<(Bytes, Body)>> {
        while self.missing == 0 {
            let Some(length) = self.lengths.next() else {
                self.connection.keep(&self.credentials);
                return Ok(None);
            };
            match self.connection.reply().await? {
                Reply::Bulk(found) if found == length => self.missing = length,
                _ => return Err(unexpected("a value of another length")),
            }
            if length == 0 {
                self.connection.end_of_bulk().await?;
            }
        }
        let frame = self.connection.frame(to_usize(self.missing)).await?;
        self.missing -= to_u64(frame.len());
        if self.missing == 0 {
            self.connection.end_of_bulk().await?;
        }
        Ok(Some((frame, self)))
    }
}

/// Returns the keys of the values that a file may have, with their offsets.
async fn find_keys(connection: &mut Connection, key: &str) -> Attempt<Vec<(u64, String)>> {
    let prefix = format!("{key}:");
    let offset = |key: &String| key.strip_prefix(&prefix)?.rsplit(':').next()?.parse::<u64>().ok();
    let keys = scan(connection, &prefix).await?;
    Ok(keys.into_iter().filter_map(|key| Some((offset(&key)?, key))).collect())
}

/// Returns all keys that begin with `prefix`. Others may add and delete keys meanwhile.
async fn scan(connection: &mut Connection, prefix: &str) -> Attempt<BTreeSet<String>> {
    let mut pattern: String =
        prefix.chars().flat_map(|c| "\\*?[]".contains(c).then_some('\\').into_iter().chain([c])).collect();
    pattern.push('*');
    listing::in_time(async {
        let (mut keys, mut bounds, mut cursor) = (BTreeSet::new(), Bounds::default(), String::from("0"));
        loop {
            connection.send(&[&["SCAN", &cursor, "MATCH", &pattern, "COUNT", SCAN_COUNT]]).await?;
            connection.array().await?;
            cursor = bounds.next(String::from_utf8_lossy(&connection.bulk().await?).into_owned())?;
            for _ in 0..connection.array().await? {
                if let Ok(key) = String::from_utf8(connection.bulk().await?) {
                    bounds.add(&key)?;
                    keys.insert(key);
                }
            }
            if cursor == "0" {
                return Ok(keys);
            }
        }
    })
    .await
}

/// Returns the first and the last byte of a range that is not empty, as the command `GETRANGE` takes them.
fn bounds(range: &Range<u64>) -> [String; 2] {
    [range.start.to_string(), range.end.saturating_sub(1).to_string()]
}

/// Returns the bytes of a range that exist.
fn clip(range: &Range<u64>, length: u64) -> Range<u64> {
    range.start.min(length)..range.end.min(length)
}

/// Returns a version that differs if the keys or the lengths differ. It is weak, because the bytes have no part in it.
fn version_of(values: &[Value]) -> Version {
    let mut hasher = DefaultHasher::new();
    values.hash(&mut hasher);
    Version { etag: Some(format!("W/\"{:x}\"", hasher.finish())), ..Version::default() }
}
