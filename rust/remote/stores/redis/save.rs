//! Saves: the parts of a file go into a temporary value, which gets its name in one step.
//!
//! ```text
//! begin     SET temporary key, with an expiry; reserve the length
//! part      MULTI, SETRANGE, renew the expiry or remove a value without one, EXEC; in any order
//! complete  MULTI, PERSIST, RENAME to the key, EXEC
//! ```
//!
//! A process that ends in between leaves a temporary value, which expires. If the server has removed the value, SETRANGE
//! creates another, with zeros in place of the other parts and without an expiry. The same transaction removes it: a part
//! that is sent twice, since the first answer was lost, must not find it, and one that arrives after an abort must not
//! leave it behind.

use super::connection::Connection;
use super::{Redis, find_keys};
use crate::num::to_usize;
use crate::remote::stores::{Attempt, Failure, FailureClass, Uploads};
use async_trait::async_trait;
use bytes::Bytes;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::process;

/// Time after the last part of a file at which its temporary value expires, in seconds.
const EXPIRY_SECONDS: &str = "3600";

/// Script that renews the expiry of a value, or removes the value if it has none. Returns whether it remains.
const RENEW: &str = "\
if redis.call('TTL', KEYS[1]) == -1 then redis.call('DEL', KEYS[1]) return 0 end \
return redis.call('EXPIRE', KEYS[1], ARGV[1])";

#[async_trait]
impl Uploads for Redis {
    async fn put(&self, key: &str, bytes: Bytes) -> Attempt<()> {
        let mut connection = self.connect().await?;
        connection.transact_with(&["SET", key], &bytes, &[]).await?;
        connection.confirmation().await?;
        connection.keep(&self.credentials);
        Ok(())
    }

    async fn begin(&self, key: &str, length: Option<u64>) -> Attempt<String> {
        let id = temporary_key(key);
        let mut connection = self.connect().await?;
        connection.transact(&[&["SET", &id, "", "EX", EXPIRY_SECONDS]]).await?;
        connection.confirmation().await?;
        if let Some(last) = length.and_then(|length| length.checked_sub(1)) {
            // A server that has no memory for the file, or allows no value of this length, refuses before the first part.
            if let Err(failure) = set_range(&mut connection, &id, last, b"\0").await {
                // If this fails as well, the value expires.
                let _ = self.abort(key, &id).await;
                return Err(failure);
            }
        }
        connection.keep(&self.credentials);
        Ok(id)
    }

    async fn put_part(&self, _: &str, id: &str, _: usize, offset: u64, bytes: Bytes) -> Attempt<String> {
        let mut connection = self.connect().await?;
        set_range(&mut connection, id, offset, &bytes).await?;
        connection.keep(&self.credentials);
        Ok(bytes.len().to_string())
    }

    async fn shift(&self, id: &str, range: Range<u64>, distance: u64) -> Attempt<()> {
        let mut connection = self.connect().await?;
        let [first, last] = super::bounds(&range);
        connection.send(&[&["GETRANGE", id, &first, &last]]).await?;
        let length = to_usize(range.end - range.start);
        let bytes = connection.bulk_of(length).await?;
        if bytes.len() < length {
            return Err(lost());
        }
        set_range(&mut connection, id, range.start.saturating_add(distance), &bytes).await?;
        connection.keep(&self.credentials);
        Ok(())
    }

    async fn complete(&self, key: &str, id: &str, parts: &[String]) -> Attempt<()> {
        let mut connection = self.connect().await?;
        let length: u64 = parts.iter().filter_map(|bytes| bytes.parse::<u64>().ok()).sum();
        connection.send(&[&["STRLEN", id]]).await?;
        if connection.integer().await? != length {
            return Err(lost());
        }
        // The name would keep the expiry.
        connection.transact(&[&["PERSIST", id], &["RENAME", id, key]]).await?;
        if connection.integer().await? == 0 {
            return Err(lost());
        }
        connection.confirmation().await?;
        connection.keep(&self.credentials);
        Ok(())
    }

    async fn abort(&self, _: &str, id: &str) -> Attempt<()> {
        let mut connection = self.connect().await?;
        remove(&mut connection, &[id]).await?;
        connection.keep(&self.credentials);
        Ok(())
    }

    async fn remove(&self, key: &str) -> Attempt<()> {
        let mut connection = self.connect().await?;
        if remove(&mut connection, &[key]).await? == 0 {
            let found = find_keys(&mut connection, key).await?;
            let keys: Vec<&str> = found.iter().map(|(_, key)| key.as_str()).collect();
            remove(&mut connection, &keys).await?;
        }
        connection.keep(&self.credentials);
        Ok(())
    }

    fn remains(&self) -> &'static str {
        "Redis removes them after an hour"
    }
}

/// Writes a part of a temporary value, if it still exists.
async fn set_range(connection: &mut Connection, id: &str, offset: u64, bytes: &[u8]) -> Attempt<()> {
    let renew: &[&str] = &["EVAL", RENEW, "1", id, EXPIRY_SECONDS];
    connection.transact_with(&["SETRANGE", id, &offset.to_string()], bytes, &[renew]).await?;
    // The length of the value.
    connection.integer().await?;
    if connection.integer().await? == 0 { Err(lost()) } else { Ok(()) }
}

/// Removes keys, and returns how many there were.
async fn remove(connection: &mut Connection, keys: &[&str]) -> Attempt<u64> {
    if keys.is_empty() {
        return Ok(0);
    }
    connection.send(&[&[&["UNLINK"], keys].concat()]).await?;
    connection.integer().await
}

fn lost() -> Failure {
    let message = "the server has removed the parts that were sent: it was restarted, or needed their memory";
    Failure::new(FailureClass::NotFound, message)
}

/// Returns a new name for the parts of a file. In a cluster it is on the server of `key`, unless the key has braces, which
/// have a meaning there.
fn temporary_key(key: &str) -> String {
    let token = RandomState::new().hash_one(process::id());
    let key = if key.contains(['{', '}']) { key.to_owned() } else { format!("{{{key}}}") };
    format!("{key}.{token:016x}.fst-tmp")
}
