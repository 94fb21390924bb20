//! Private items of this module for `tests/rust` and `fuzz/`, and parsers of answers as functions of bytes.

pub use super::find::listing::{Bounds, Keys, take_keys};
pub use super::stores::bucket::with_rules_of_aws;
pub use super::stores::host_policy::HostPolicy;
pub use super::stores::http_error::Progress;
pub use super::stores::http_error::failure_of;
pub use super::stores::redis::split_port;
pub use super::stores::refusal::Refusal;
pub use super::stores::transport::Transport;
pub use super::transfer::adaptive_limit::AdaptiveLimit;
pub use super::transfer::body::answer;
pub use super::transfer::cache::{ranges::Ranges, unsigned};
pub use super::transfer::get::Target;
pub use super::transfer::pieces::Pieces;
pub use super::transfer::retry::repeat;

use super::stores::{http, hub, redis};
use ::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use object_store::client::HttpResponseBody;
use std::ops::Range;

/// Returns the bytes of a body and the length of the object, from an answer without a body to a request for `range`.
/// Headers are lines such as `ETag: "1"`.
pub fn http_answer(status: u16, headers: &[u8], range: &Range<u64>) -> Option<(Range<u64>, Option<u64>)> {
    let line = |line: &[u8]| {
        let colon = line.iter().position(|&byte| byte == b':')?;
        let (name, value) = line.split_at_checked(colon)?;
        let value = value.get(1..).unwrap_or_default().trim_ascii();
        Some((HeaderName::from_bytes(name).ok()?, HeaderValue::from_bytes(value).ok()?))
    };
    let headers: HeaderMap = headers.split(|&byte| byte == b'\n').filter_map(line).collect();
    let mut response = Response::new(HttpResponseBody::from(Vec::new()));
    *response.status_mut() = StatusCode::from_u16(status).ok()?;
    *response.headers_mut() = headers;
    let answer = http::answer(response, range).ok()?;
    Some((answer.range, answer.length))
}

/// Reads all answers of a Redis server.
pub fn redis_answers(bytes: &[u8]) {
    redis::read_answers(bytes);
}

/// Returns the commit of a repository, from the Hub's description of it.
pub fn hub_commit(bytes: &[u8]) -> Option<String> {
    hub::parse_description(bytes).ok().map(|described| described.sha)
}
