//! Codes of answers with which services refuse requests.
//!
//! Such an answer may repeat the request, also what is secret in it. Only its codes are shown. `object_store` puts the body
//! of an answer into the text of its error, so it gets the codes in place of the body, and they are read again there.

use super::{Failure, FailureClass};
use crate::remote::find::listing::element;
use futures_util::TryStreamExt;
use http::header::{self, HeaderMap};
use http::{Response, StatusCode};
use object_store::client::{HttpError, HttpResponse, HttpResponseBody};
use std::error::Error;
use std::fmt;
use std::time::Duration;
use tokio::time::timeout;

/// Number of bytes after which the rest of such an answer is not read. It has about a thousand.
const REFUSAL_BYTES_MAX: usize = 64 << 10;
/// Upper bound for the length of a code or a region, in bytes.
const WORD_BYTES_MAX: usize = 64;
/// Header in which S3 states the region of a bucket.
const REGION: &str = "x-amz-bucket-region";
/// Headers in which Azure and the Hugging Face Hub state the code, also in answers without a body.
const CODES: [&str; 2] = ["x-ms-error-code", "x-error-code"];
/// Code in place of S3's `InvalidRequest` for an object that is encrypted with a key of the client.
const ENCRYPTED: &str = "CustomerKeyRequired";

/// Reads a body, and at most one frame beyond `bytes_max` bytes.
pub(super) async fn read_up_to(bytes_max: usize, body: HttpResponseBody) -> Result<Vec<u8>, HttpError> {
    let (mut bytes, mut frames) = (Vec::new(), body.bytes_stream());
    while bytes.len() <= bytes_max
        && let Some(frame) = frames.try_next().await?
    {
        bytes.extend_from_slice(&frame);
    }
    Ok(bytes)
}

/// Reads the codes of an answer that refuses a request, which [`Refusal::of_response`] returns. Only the beginning of the
/// body remains, and nothing of one that does not arrive within `limit`.
pub(super) async fn with_codes(response: HttpResponse, limit: Duration) -> HttpResponse {
    let (mut parts, body) = response.into_parts();
    let text = timeout(limit, read_up_to(REFUSAL_BYTES_MAX, body)).await;
    let text = text.ok().and_then(Result::ok).unwrap_or_default();
    let refusal = Refusal::of_answer(parts.status, &parts.headers, &String::from_utf8_lossy(&text));
    parts.extensions.insert(refusal);
    Response::from_parts(parts, text.into())
}

/// Codes of an answer that refuses a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// `None` for an answer that begins with the status of a success.
    pub status: Option<u16>,
    code: Option<String>,
    /// Region of the bucket, if the request was sent or signed for another one.
    pub region: Option<String>,
    /// Length of the object, if the range is outside it.
    pub(super) length: Option<u64>,
}

/// Shows the codes as [`Refusal::of`] reads them.
impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal { code, region, length, .. } = self;
        let length = length.map(|length| length.to_string());
        for (name, value) in [("Code", code), ("Region", region), ("ActualObjectSize", &length)] {
            if let Some(value) = value {
                write!(f, "<{name}>{value}</{name}>")?;
            }
        }
        Ok(())
    }
}

impl Refusal {
    /// Returns the codes of an answer with this status and these headers, whose body is `text`.
    pub fn of_answer(status: StatusCode, headers: &HeaderMap, text: &str) -> Refusal {
        let header = |name: &str| headers.get(name)?.to_str().ok().map(str::to_owned);
        let mut refusal = Refusal { status: Some(status.as_u16()), ..Refusal::parse(text) };
        let stated = || CODES.iter().find_map(|name| header(name));
        // Services that issue tokens answer with JSON.
        let json = || {
            let answer: serde_json::Value = serde_json::from_str(text).ok()?;
            let error = answer.get("error")?;
            error.as_str().or_else(|| error.get("status")?.as_str()).map(str::to_owned)
        };
        let code = refusal.code.or_else(|| stated().filter(|text| is_code(text)));
        refusal.code = code.or_else(|| json().filter(|text| is_code(text)));
        let code = refusal.code.as_deref();
        // Other refusals state the region of the bucket, too.
        let is_wrong_region = status.is_redirection() || code == Some("AuthorizationHeaderMalformed");
        refusal.region = refusal.region.or_else(|| header(REGION).filter(|text| is_region(text)));
        refusal.region = refusal.region.filter(|_| is_wrong_region);
        refusal.length =
            refusal.length.or_else(|| header(header::CONTENT_RANGE.as_str())?.strip_prefix("bytes */")?.parse().ok());
        if code == Some("InvalidRequest") && text.contains("Server Side Encryption") {
            refusal.code = Some(ENCRYPTED.to_owned());
        }
        refusal
    }

    /// Returns the codes of an answer that [`with_codes`] has read.
    pub(super) fn of_response<T>(response: &Response<T>) -> Refusal {
        let status = Some(response.status().as_u16());
        response.extensions().get().cloned().unwrap_or_else(|| Refusal { status, ..Refusal::default() })
    }

    /// Returns the codes that an error stands for, or `None` if it is not about an answer.
    pub fn of(error: &object_store::Error) -> Option<Refusal> {
        let text = error.source()?.to_string();
        let status = text.split_once("status code: ").and_then(|(_, rest)| rest.get(..3)?.parse().ok());
        let is_answer = status.is_some() || text.contains("Server returned error response");
        is_answer.then(|| Refusal { status, ..Refusal::parse(&text) })
    }

    fn parse(text: &str) -> Refusal {
        let value = |name| element(text, name).map(|(_, value, _)| value);
        let word = |name| value(name).map(str::to_owned);
        Refusal {
            status: None,
            code: word("Code").filter(|text| is_code(text)),
            region: word("Region").filter(|text| is_region(text)),
            length: value("ActualObjectSize").and_then(|length| length.parse().ok()),
        }
    }

    /// Describes the answer, such as "status 403, code AccessDenied".
    pub(super) fn codes(&self) -> String {
        let status = self.status.map(|status| format!("status {status}"));
        let code = self.code.as_deref().map(|code| format!("code {code}"));
        status.into_iter().chain(code).collect::<Vec<_>>().join(", ")
    }

    /// Returns whether the service has no such bucket.
    pub(super) fn has_no_bucket(&self) -> bool {
        matches!(self.code.as_deref(), Some("NoSuchBucket" | "ContainerNotFound" | "ContainerBeingDeleted"))
    }

    /// Returns what to do about an answer that refuses access: what its code says, or else `advice`.
    pub(super) fn advice<'a>(&self, advice: &'a str) -> &'a str {
        match self.code.as_deref() {
            Some("RequestTimeTooSkewed") => "; set the clock of this machine",
            Some("InvalidObjectState" | "BlobArchived" | "BlobBeingRehydrated") => {
                "; the object is archived: restore it first"
            }
            _ => advice,
        }
    }

    /// Returns whether the keys of the request are valid no longer.
    pub(super) fn has_expired(&self) -> bool {
        matches!(self.code.as_deref(), Some("ExpiredToken" | "TokenRefreshRequired"))
    }

    /// Returns the failure of the request, for which the caller has no text of its own.
    pub fn failure(&self) -> Failure {
        let code = self.code.as_deref();
        let (class, message) = match code {
            Some("SlowDown" | "ServerBusy") => {
                (FailureClass::RateLimited(None), format!("the service asks for fewer requests ({})", self.codes()))
            }
            Some("RequestTimeout" | "InternalError" | "OperationAborted") => {
                (FailureClass::Transient, format!("the service failed ({})", self.codes()))
            }
            Some(ENCRYPTED) => {
                let message = "the object is encrypted with a key of the client (SSE-C); set \
                               AWS_SERVER_SIDE_ENCRYPTION=sse-c and AWS_SSE_CUSTOMER_KEY_BASE64";
                (FailureClass::Denied, message.to_owned())
            }
            _ if self.region.is_some() => {
                let region = self.region.as_deref().unwrap_or_default();
                let message = format!(
                    "the bucket is in the region {region}, which the endpoint does not serve; set AWS_REGION, and \
                     AWS_ENDPOINT_URL if the service is not that of AWS"
                );
                (FailureClass::Permanent, message)
            }
            _ if self.has_expired() => {
                let codes = self.codes();
                let message = format!("the keys have expired, and no others were found ({codes}); renew them");
                (FailureClass::Denied, message)
            }
            _ => {
                let (codes, advice) = (self.codes(), self.advice(""));
                (FailureClass::Permanent, format!("the service refuses the request ({codes}){advice}"))
            }
        };
        Failure::new(class, message)
    }
}

fn is_code(text: &str) -> bool {
    is_word(text, "_.-")
}

/// Returns whether a text may be a region, which becomes part of the name of a host.
fn is_region(text: &str) -> bool {
    is_word(text, "-")
}

fn is_word(text: &str, others: &str) -> bool {
    (1..=WORD_BYTES_MAX).contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(c))
}
