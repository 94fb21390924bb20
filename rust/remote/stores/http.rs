//! HTTP servers that answer requests for ranges.

use super::http_error;
use super::refusal::Refusal;
use super::transport::{self, Transport};
use super::{Answer, Attempt, Failure, FailureClass, Store};
use crate::num::to_u64;
use crate::remote::find::version::Version;
use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response, StatusCode};
use http_body_util::BodyExt;
use object_store::client::{HttpError, HttpResponse, HttpResponseBody, HttpService};
use std::ops::Range;

/// Server of one host. The keys are whole URLs, whose queries may be secret.
pub(super) struct HttpStore {
    /// Headers of every request, for example with a token.
    headers: HeaderMap,
    transport: Transport,
}

impl HttpStore {
    pub(super) fn new(headers: HeaderMap, transport: Transport) -> Self {
        HttpStore { headers, transport }
    }
}

#[async_trait]
impl Store for HttpStore {
    async fn get(&self, url: &str, range: Range<u64>, version: Option<&Version>) -> Attempt<Answer> {
        let mut headers = self.headers.clone();
        headers.extend(range_headers(&range, version));
        let request = transport::get_request(url, headers)?;
        let response = self.transport.call(request).await.map_err(|error| http_error::failure_of(&error))?;
        let answer = answer(response, &range)?;
        match (answer.length, version) {
            (None, None) => Ok(Answer { length: self.length(url).await?, ..answer }),
            _ => Ok(answer),
        }
    }
}

impl HttpStore {
    /// Asks for the length of a file, which answers to ranges do not state.
    async fn length(&self, url: &str) -> Attempt<Option<u64>> {
        let mut request = transport::get_request(url, self.headers.clone())?;
        *request.method_mut() = Method::HEAD;
        let response = self.transport.call(request).await.map_err(|error| http_error::failure_of(&error))?;
        let stated = text(&response, &header::CONTENT_LENGTH).filter(|_| response.status().is_success());
        Ok(stated.and_then(|length| length.parse().ok()))
    }
}

pub(super) fn range_headers(range: &Range<u64>, version: Option<&Version>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut insert = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(name, value);
        }
    };
    insert(header::RANGE, &format!("bytes={}-{}", range.start, range.end.saturating_sub(1)));
    insert(header::ACCEPT_ENCODING, "identity");
    match version {
        // A weak tag never matches, so the tag of the answer is compared instead.
        Some(Version { etag: Some(etag), .. }) if !etag.starts_with("W/") => insert(header::IF_MATCH, etag),
        Some(Version { etag: None, modified: Some(modified), .. }) => insert(header::IF_UNMODIFIED_SINCE, modified),
        _ => {}
    }
    headers
}

pub fn answer(response: HttpResponse, range: &Range<u64>) -> Attempt<Answer> {
    let failed = |class, message: &str| Err(Failure::new(class, message));
    let encoding = text(&response, &header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity");
    if let Some(encoding) = encoding.filter(|_| response.status().is_success()) {
        let message = format!(
            "the server sends the file with the content encoding {encoding:?}; its bytes are then not those of the \
             ranges that were requested. Permit compression off for this file"
        );
        return Err(Failure::new(FailureClass::Permanent, message));
    }
    let version = Version {
        etag: text(&response, &header::ETAG).map(str::to_owned),
        id: None,
        modified: text(&response, &header::LAST_MODIFIED).map(str::to_owned),
    };
    let stated = text(&response, &header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    match response.status() {
        StatusCode::PARTIAL_CONTENT => {
            let content_range = text(&response, &header::CONTENT_RANGE).and_then(parse_content_range);
            let Some((found, length)) = content_range else {
                return failed(FailureClass::Permanent, "the server answered 206 without a valid Content-Range");
            };
            if stated.is_some_and(|stated| stated != found.end - found.start) {
                return failed(FailureClass::Permanent, "Content-Length and Content-Range of the answer disagree");
            }
            let unreceived = response.extensions().get().cloned();
            Ok(Answer { length, version, range: found, body: frames(response.into_body()), unreceived })
        }
        // A server may answer with the whole file if the range covers it.
        StatusCode::OK if range.start == 0 && stated.is_some_and(|stated| stated <= range.end) => {
            let length = stated.unwrap_or_default();
            let body = frames(response.into_body());
            Ok(Answer { length: Some(length), version, range: 0..length, body, unreceived: None })
        }
        StatusCode::OK => failed(
            FailureClass::Permanent,
            "the server ignores ranges: it answered with the whole file (status 200). Use a server that supports \
             range requests, or download the file and load it from disk",
        ),
        // An empty file has no range.
        StatusCode::RANGE_NOT_SATISFIABLE if range.start == 0 => {
            let length = text(&response, &header::CONTENT_RANGE).and_then(|range| range.strip_prefix("bytes */"));
            if let Some(length) = length.and_then(|length| length.parse().ok()).filter(|length| *length > 0) {
                return Err(Failure::no_range(length));
            }
            Ok(Answer { length: Some(0), version, range: 0..0, body: stream::empty().boxed(), unreceived: None })
        }
        StatusCode::RANGE_NOT_SATISFIABLE => {
            Err(Failure::changed("the file became shorter while it was loaded (status 416)"))
        }
        status => {
            let refusal = Refusal::of_response(&response);
            let codes = refusal.codes();
            let (class, message) = match status {
                StatusCode::PRECONDITION_FAILED => {
                    return Err(Failure::changed(&format!("the object changed while it was loaded ({codes})")));
                }
                StatusCode::NOT_FOUND | StatusCode::GONE => {
                    (FailureClass::NotFound, format!("the server has no file of this name ({codes}); check the URL"))
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    let advice = "; check the credentials, or that a signed URL has not expired";
                    let advice = refusal.advice(advice);
                    (FailureClass::Denied, format!("the server refuses access ({codes}){advice}"))
                }
                _ => (FailureClass::Permanent, format!("the server refuses the request ({codes})")),
            };
            Err(Failure::new(class, message))
        }
    }
}

fn text<'a, T>(response: &'a Response<T>, name: &HeaderName) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Returns the range and the length of the whole file in a header such as `bytes 0-9/100`, or `bytes 0-9/*` without it.
fn parse_content_range(text: &str) -> Option<(Range<u64>, Option<u64>)> {
    let (range, length) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (begin, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let length: Option<u64> = if length == "*" { None } else { Some(length.parse().ok()?) };
    let end = last.checked_add(1)?;
    (begin < end && length.is_none_or(|length| end <= length)).then_some((begin..end, length))
}

/// Returns the data of a body as it arrives.
pub(super) fn frames(body: HttpResponseBody) -> BoxStream<'static, Attempt<bytes::Bytes>> {
    let failed = |error: HttpError| http_error::failure_of(&error);
    stream::try_unfold(body, move |mut body| async move {
        while let Some(frame) = body.frame().await {
            // Frames without data are trailers.
            if let Ok(data) = frame.map_err(failed)?.into_data() {
                return Ok(Some((data, body)));
            }
        }
        Ok(None)
    })
    .boxed()
}

/// Reads a whole answer of at most `bytes_max` bytes.
pub async fn collect(response: HttpResponse, bytes_max: u64) -> Attempt<Vec<u8>> {
    let mut body = frames(response.into_body());
    let mut bytes = Vec::new();
    while let Some(frame) = body.next().await {
        bytes.extend_from_slice(&frame?);
        if to_u64(bytes.len()) > bytes_max {
            let message = format!("the answer has more than {bytes_max} bytes");
            return Err(Failure::new(FailureClass::Permanent, message));
        }
    }
    Ok(bytes)
}
