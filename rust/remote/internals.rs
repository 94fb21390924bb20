//! Private items of this module for `tests/rust` and `fuzz/`, and parsers of answers as functions of bytes.

pub use super::adaptive_limit::AdaptiveLimit;
pub use super::body::answer;
pub use super::bucket::with_rules_of_aws;
pub use super::cache::{ranges::Ranges, unsigned};
pub use super::get::Target;
pub use super::host_policy::HostPolicy;
pub use super::http_error::failure_of;
pub use super::listing::{Bounds, Keys, take_keys};
pub use super::pieces::Pieces;
pub use super::progress::Progress;
pub use super::redis::split_port;
pub use super::refusal::Refusal;
pub use super::retry::repeat;
pub use super::transport::Transport;

use super::{http, hub, redis};
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
