//! Services that answer requests for ranges of objects.

use super::upload::Uploads;
use crate::error::{Error, Kind};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// Service, with the credentials for one host, bucket or repository.
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug {
    /// Requests a range of an object. The range may end after the object; it does not begin there.
    ///
    /// With a version, the answer is of that version, or a failure.
    async fn get(&self, key: &str, range: Range<u64>, version: Option<&Version>) -> Result<Answer, Failure>;

    /// Returns the keys below a prefix, not those in deeper levels. A service without listing returns `None`.
    async fn list(&self, prefix: &str) -> Result<Option<Vec<String>>, Failure>;

    /// Returns the requests that store objects, if the service has them.
    fn uploads(&self) -> Option<&dyn Uploads> {
        None
    }
}

/// Answer to a request for a range.
pub struct Answer {
    /// Length of the whole object, in bytes.
    pub length: u64,
    /// Version of the object.
    pub version: Version,
    /// Bytes of the object that the body has.
    pub range: Range<u64>,
    /// The bytes.
    pub body: BoxStream<'static, Result<Bytes, Failure>>,
}

/// Version of an object, which tells one content from another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Entity tag with its quotes, as the service states it.
    pub etag: Option<String>,
    /// Version id or generation.
    pub id: Option<String>,
    /// Time of the last change, as the service states it.
    pub modified: Option<String>,
}

impl Version {
    /// Returns whether every content has a version of its own. Two changes in one second have the same time.
    pub fn is_exact(&self) -> bool {
        self.id.is_some() || self.has_strong_etag()
    }

    /// Returns whether the entity tag tells every content from another.
    pub fn has_strong_etag(&self) -> bool {
        self.etag.as_ref().is_some_and(|etag| !etag.starts_with("W/"))
    }

    /// Returns whether an object of this version may have the content of `other`. What only one of them states is not
    /// compared.
    pub fn matches(&self, other: &Version) -> bool {
        let agree = |one: &Option<String>, two: &Option<String>| match (one, two) {
            (Some(one), Some(two)) => one == two,
            _ => true,
        };
        let is_same_kind = self.etag.is_some() == other.etag.is_some() && self.id.is_some() == other.id.is_some();
        is_same_kind
            && agree(&self.etag, &other.etag)
            // The same content may be stored again.
            && (self.has_strong_etag() || agree(&self.id, &other.id))
            // A tag says more than a time, which servers behind one name may state differently.
            && (self.etag.is_some() || self.id.is_some() || agree(&self.modified, &other.modified))
    }
}

/// Reason why a request failed, and whether to repeat it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Class of the failure.
    pub class: FailureClass,
    /// Description of the failure, and what to check. It contains no secret.
    pub message: String,
}

/// Classes of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureClass {
    /// The connection or the server failed: the request is repeated.
    Transient,
    /// The service asks for fewer requests, perhaps after a pause.
    RateLimited(Option<Duration>),
    /// No object has this name.
    NotFound,
    /// The credentials do not allow the request.
    Denied,
    /// The object has another version than the one that was asked for.
    Changed,
    /// The request cannot succeed.
    Permanent,
    /// The caller's argument is wrong.
    Invalid,
}

impl Failure {
    /// Creates a failure.
    pub fn new(class: FailureClass, message: impl Into<String>) -> Failure {
        Failure { class, message: message.into() }
    }

    /// Creates the failure of a request that was not sent, because no keys for it could be found.
    pub fn of_keys(error: &Error) -> Failure {
        let class = match error.kind() {
            Kind::Io => FailureClass::Transient,
            Kind::InvalidArgument => FailureClass::Invalid,
            _ => FailureClass::Denied,
        };
        // The code at the beginning is that of the load.
        let text = error.to_string();
        Failure::new(class, text.split_once("] ").map_or(text.as_str(), |(_, message)| message))
    }

    /// Returns whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self.class, FailureClass::Transient | FailureClass::RateLimited(_))
    }

    /// Returns the error for a caller.
    pub fn into_error(self, url: &str) -> Error {
        let kind = match self.class {
            FailureClass::NotFound => Kind::FileNotFound,
            FailureClass::Denied => Kind::PermissionDenied,
            FailureClass::Changed => Kind::SourceChanged,
            FailureClass::Invalid => Kind::InvalidArgument,
            FailureClass::Transient | FailureClass::RateLimited(_) | FailureClass::Permanent => Kind::Io,
        };
        Error::new(kind, self.message).at(url)
    }
}
