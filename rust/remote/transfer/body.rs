//! Requests with a body. The body may take any time while the server takes bytes of it. The answer has a time of its own.
//!
//! The kernel ends a connection on which no byte was acknowledged for the time of a stall (`TCP_USER_TIMEOUT`). A timer
//! beside the connection would not do: the kernel buffers megabytes, and takes more only when a third of them are sent.

use super::runtime;
use crate::num::to_u64;
use crate::remote::stores::addresses::with_target;
use crate::remote::stores::http_error::{HttpResult, Late};
use bytes::Bytes;
use futures_util::{TryStreamExt, stream};
use http::header;
use http_body_util::BodyExt;
use object_store::client::{HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody};
use std::future::Future;
use std::iter;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

/// Time for the answer to begin once the connection has taken the whole body, and for each further part of the answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest answer to a request with a body, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Number of bytes that are handed to a connection at once.
const FRAME_BYTES: usize = 256 << 10;

/// Sends a request with a body, and reads the whole answer. `client` has the time of a stall as its TCP user timeout.
/// Fails with [`Late`] if the server takes no bytes or does not answer.
pub async fn send(client: &reqwest::Client, request: HttpRequest) -> HttpResult<HttpResponse> {
    let (mut parts, body) = request.into_parts();
    parts.headers.entry(header::CONTENT_LENGTH).or_insert(body.content_length().into());
    let (begin, taken) = (Instant::now(), Arc::new(OnceLock::new()));
    let request = http::Request::from_parts(parts, counted(body, Arc::clone(&taken)));
    let (parts, mut body) = answer(begin, &taken, begin_answer(client, request, failed)).await?.into_parts();
    let mut bytes = Vec::new();
    while let Some(frame) = timeout(ANSWER_TIMEOUT, body.frame()).await.map_err(|_| unanswered(ANSWER_TIMEOUT))? {
        bytes.extend_from_slice(frame.map_err(failed)?.data_ref().map_or(&[], |data| data));
        if bytes.len() > ANSWER_BYTES_MAX {
            return Err(Late::error(format!("the answer has more than {ANSWER_BYTES_MAX} bytes")));
        }
    }
    Ok(http::Response::from_parts(parts, HttpResponseBody::from(bytes)))
}

/// Sends a request without a body, and returns the answer once it has begun.
pub async fn send_empty(client: &reqwest::Client, request: HttpRequest) -> HttpResult<HttpResponse> {
    let failed = |error: reqwest::Error| {
        let kind = if error.is_timeout() { HttpErrorKind::Timeout } else { HttpErrorKind::Unknown };
        HttpError::new(kind, error.without_url())
    };
    let (parts, body) = begin_answer(client, request.map(|_| ""), failed).await?.into_parts();
    Ok(http::Response::from_parts(parts, HttpResponseBody::new(body.map_err(failed))))
}

async fn begin_answer(
    client: &reqwest::Client,
    request: http::Request<impl Into<reqwest::Body>>,
    failed: impl Fn(reqwest::Error) -> HttpError,
) -> HttpResult<http::Response<reqwest::Body>> {
    let uri = request.uri().clone();
    let request = request.try_into().map_err(&failed)?;
    with_target(&uri, client.execute(request)).await.map(Into::into).map_err(&failed)
}

/// Returns a body whose bytes are counted as the connection takes them. Sets `taken` after the last one.
fn counted(body: HttpRequestBody, taken: Arc<OnceLock<Instant>>) -> reqwest::Body {
    let mut left = body.content_length();
    let frames = |mut bytes: Bytes| {
        let next =
            move || (!bytes.is_empty()).then(|| Ok::<_, HttpError>(bytes.split_to(bytes.len().min(FRAME_BYTES))));
        stream::iter(iter::from_fn(next))
    };
    let count = move |frame: &Bytes| {
        runtime::add_sent(to_u64(frame.len()));
        left = left.saturating_sub(frame.len());
        if left == 0 {
            taken.get_or_init(Instant::now);
        }
    };
    reqwest::Body::wrap_stream(body.into_data_stream().map_ok(frames).try_flatten().inspect_ok(count))
}

/// Returns the time for the answer to begin after a body that took `body` to be taken. Its last bytes are still in the
/// buffer of the connection, and may take as long.
pub fn answer_time(body: Duration) -> Duration {
    ANSWER_TIMEOUT.max(body)
}

/// Waits for the answer to a request whose body was begun at `begin`. Its time begins when the body is `taken`.
pub async fn answer<T>(
    begin: Instant,
    taken: &OnceLock<Instant>,
    answer: impl Future<Output = HttpResult<T>>,
) -> HttpResult<T> {
    let mut answer = pin!(answer);
    loop {
        let limit = taken.get().map(|taken| answer_time(*taken - begin));
        let from = taken.get().copied().unwrap_or_else(Instant::now);
        match (timeout_at(from + limit.unwrap_or(ANSWER_TIMEOUT), &mut answer).await, limit) {
            (Ok(result), _) => return result,
            (Err(_), Some(limit)) => return Err(unanswered(limit)),
            (Err(_), None) => {}
        }
    }
}

fn unanswered(limit: Duration) -> HttpError {
    Late::error(format!("the server did not answer for {} s after it had got all bytes", limit.as_secs()))
}

fn failed(error: reqwest::Error) -> HttpError {
    match (error.is_timeout(), error.is_connect()) {
        (true, false) => Late::error("the server took no byte for too long (FST_STALL_SECONDS)".to_owned()),
        (true, true) => HttpError::new(HttpErrorKind::Timeout, error.without_url()),
        (false, _) => HttpError::new(HttpErrorKind::Unknown, error.without_url()),
    }
}
