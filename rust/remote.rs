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

pub mod credentials;
pub mod find;
#[doc(hidden)]
pub mod internals;
pub mod stores;
pub mod transfer;

use stores::registry;
use transfer::{cache, runtime};

/// Waits until the cache holds what loads have pulled, closes the connections that no request uses, and forgets tokens.
/// The next load opens new ones.
pub fn release() {
    cache::flush();
    runtime::release();
    registry::release();
}
