//! Objects of remote stores: HTTP servers, S3, Google Cloud Storage, Azure, the Hugging Face Hub and Redis.
//!
//! ```text
//! URL --location--> service and key --store--> GET range --get--> slot or tensor
//!                                     |                   |
//!                                 transport            version, retries, concurrency
//! ```
//!
//! `docs/architecture.md` has a map of the parts. A request is repeated from the byte reached, up to a stated number of
//! times.

mod adaptive_limit;
mod addresses;
pub mod aws_profile;
mod below;
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
mod listing;
pub mod location;
pub mod name;
pub mod object;
pub mod parts;
mod pieces;
mod progress;
mod redis;
mod refusal;
mod registry;
mod repository;
mod retry;
pub mod runtime;
mod service;
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
