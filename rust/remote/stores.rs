//! Services that answer requests for ranges of objects: what all have in common. The files have one service each, and the
//! transport below HTTP: connections, addresses, trust and refusals.

pub(super) mod addresses;
pub(super) mod bucket;
pub(super) mod connections;
mod exchange;
mod handover;
pub(super) mod host_policy;
pub(super) mod http;
pub(super) mod http_error;
pub(super) mod hub;

pub(super) mod redis;
pub(super) mod refusal;
pub(super) mod registry;
mod service;
pub mod store_options;
pub(super) mod transport;
pub(super) mod trust;

use crate::error::{Error, Kind};
use crate::remote::find::name::Name;
use crate::remote::find::version::Version;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

pub use exchange::Unreceived;

/// Service, with the credentials for one host, bucket or repository.
#[async_trait]
pub trait Store: Send + Sync {
    /// Requests a range of an object. The range may end after the object; it does not begin there.
    ///
    /// With a version, the answer is of that version, or a failure.
    async fn get(&self, key: &str, range: Range<u64>, version: Option<&Version>) -> Attempt<Answer>;

    /// Returns the names of the objects in a directory, not those in deeper levels, and not names of keys that a path
    /// cannot have. A service without listing returns `None`.
    async fn list(&self, _directory: &str) -> Attempt<Option<Vec<Name>>> {
        Ok(None)
    }

    /// Returns the requests that store objects, if the service has them.
    fn uploads(&self) -> Option<&dyn Uploads> {
        None
    }
}

impl fmt::Debug for dyn Store {
    /// Shows nothing: stores have secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Store")
    }
}

/// Service that stores objects.
#[async_trait]
pub trait Uploads: Send + Sync {
    /// Stores an object in one request.
    async fn put(&self, key: &str, bytes: Bytes) -> Attempt<()>;
    /// Begins an upload in parts, of this length if it is known, and returns its id.
    async fn begin(&self, key: &str, length: Option<u64>) -> Attempt<String>;
    /// Sends a part, which begins at `offset`, and returns its id. A part that was sent before is replaced.
    async fn put_part(&self, key: &str, id: &str, index: usize, offset: u64, bytes: Bytes) -> Attempt<String>;
    /// Moves bytes that were sent towards the end, by at least their number. A service that puts the parts one after the
    /// other, whatever their offsets, does nothing.
    async fn shift(&self, _id: &str, _range: Range<u64>, _distance: u64) -> Attempt<()> {
        Ok(())
    }
    /// Stores the object that these parts make.
    async fn complete(&self, key: &str, id: &str, parts: &[String]) -> Attempt<()>;
    /// Drops the parts of an upload.
    async fn abort(&self, key: &str, id: &str) -> Attempt<()>;
    /// Removes an object. It need not exist.
    async fn remove(&self, key: &str) -> Attempt<()>;
    /// Says what becomes of parts that could not be removed.
    fn remains(&self) -> &'static str {
        "the service may charge for them: abort the multipart uploads of this object, or let a rule of the bucket do so"
    }
}

/// Answer to a request for a range.
pub struct Answer {
    /// Length of the whole object, in bytes, if the service states it.
    pub length: Option<u64>,
    /// Version of the object.
    pub version: Version,
    /// Bytes of the object that the body has.
    pub range: Range<u64>,
    /// The bytes.
    pub body: BoxStream<'static, Attempt<Bytes>>,
    /// The same bytes on their connection, if there are no others on it.
    pub unreceived: Option<Unreceived>,
}

/// Result of one request.
pub type Attempt<T> = std::result::Result<T, Failure>;

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
    /// The port refuses connections, or does not answer with HTTP: the request is repeated, a few times if it is the first
    /// one.
    NoServer,
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
        // The code at the beginning is the load's.
        let text = error.to_string();
        Failure::new(class, text.split_once("] ").map_or(text.as_str(), |(_, message)| message))
    }

    /// Creates the failure of a load whose object was replaced.
    pub fn changed(what: &str) -> Failure {
        Failure::new(FailureClass::Changed, format!("{what}; load it again to get the new version"))
    }

    /// Creates the failure of a service that does not return the first bytes of an object of this length.
    pub fn no_range(length: u64) -> Failure {
        let message =
            format!("the server refuses the range from byte 0 on (status 416), but the object has {length} bytes");
        Failure::new(FailureClass::Permanent, message)
    }

    /// Creates the failure of an upload whose bucket, or whose parts, the service does not have.
    pub fn no_upload(codes: &str) -> Failure {
        let message =
            format!("the service has no such bucket, or no longer has the upload ({codes}); check the bucket");
        Failure::new(FailureClass::NotFound, message)
    }

    /// Returns whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self.class, FailureClass::Transient | FailureClass::NoServer | FailureClass::RateLimited(_))
    }

    /// Returns the error for a caller.
    pub fn into_error(self, url: &str) -> Error {
        let kind = match self.class {
            FailureClass::NotFound => Kind::FileNotFound,
            FailureClass::Denied => Kind::PermissionDenied,
            FailureClass::Changed => Kind::SourceChanged,
            FailureClass::Invalid => Kind::InvalidArgument,
            FailureClass::Transient
            | FailureClass::NoServer
            | FailureClass::RateLimited(_)
            | FailureClass::Permanent => Kind::Io,
        };
        Error::new(kind, self.message).at(url)
    }
}
