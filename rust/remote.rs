//! Objects of remote stores: HTTP servers, S3, Google Cloud Storage, Azure, the Hugging Face Hub and Redis.
//!
//! ```text
//! URL --location--> service and key --store--> GET range --get--> slot or tensor
//!                                     |                   |
//!                                 transport            version, retries, concurrency
//! ```
//!
//! - [`location`] splits a URL into the service that answers for it and a key, and hides what may be secret.
//! - [`store`] is the trait of a service. `http`, `bucket`, `hub` and `redis` implement it.
//! - [`object`] is an open object: its size, the version that every request asks for, and its first bytes (`first_bytes`).
//! - [`cache`] keeps copies of objects on a local disk.
//! - [`upload`] stores a new object.
//! - [`pieces`] is the memory for the bytes of one request.
//! - [`runtime`] runs requests: a thread that needs bytes runs them itself, on a runtime that it takes from a pool.
//!
//! A request is repeated from the byte reached, up to a stated number of times.

mod adaptive_limit;
pub mod aws_profile;
mod body;
mod bucket;
mod cache;
pub mod concurrency;
mod connections;
pub mod find;
mod first_bytes;
mod get;
mod host_policy;
mod http;
mod http_error;
mod hub;
#[doc(hidden)]
pub mod internals;
pub mod limits;
pub mod location;
pub mod object;
pub mod parts;
mod pieces;
mod progress;
mod redis;
mod refusal;
mod registry;
mod retry;
pub mod runtime;
pub mod store;
pub mod store_options;
mod transport;
mod trust;
pub mod upload;
pub mod version;

/// Waits until the cache holds what loads have pulled, closes the connections that no request uses, and forgets tokens.
/// The next load opens new ones.
pub fn release() {
    cache::flush();
    runtime::release();
    registry::release();
}
