//! Failures of requests to the service of a bucket, and answers with which it refuses them.
//!
//! Such an answer may repeat the request, also what is secret in it. Only its codes are passed on: `object_store` puts the
//! body of an answer into the text of its error, from which they are read again.
//!
//! An answer without the bytes of an object has a bound, whatever it says.

use super::http_error::{self, HttpResult, refused};
use super::listing::{self, ANSWER_BYTES_MAX, element};
use super::location::Service;
use super::store::{Failure, FailureClass};
use super::transport::Transport;
use async_trait::async_trait;
use futures_util::TryStreamExt;
use http::header::{self, HeaderMap};
use http::{Response, StatusCode};
use object_store::ClientOptions;
use object_store::client::{HttpClient, HttpConnector, HttpRequest, HttpResponse, HttpService};
use std::fmt;

/// Hosts that are asked for keys if nothing else has any.
const METADATA_HOSTS: [&str; 3] = ["169.254.169.254", "169.254.170.2", "metadata.google.internal"];
/// Number of bytes after which the rest of such an answer is not read. It has about a thousand.
const REFUSAL_BYTES_MAX: usize = 64 << 10;
/// Upper bound for the length of a code or a region, in bytes.
const WORD_BYTES_MAX: usize = 64;
/// Header in which S3 states the region of a bucket.
const REGION: &str = "x-amz-bucket-region";
/// Code in place of S3's `InvalidRequest` for an object that is encrypted with a key of the client.
const ENCRYPTED: &str = "CustomerKeyRequired";

/// Transport to a bucket, which passes on the codes of answers that refuse a request.
#[derive(Clone, Debug)]
pub(super) struct Codes(pub(super) Transport);

impl HttpConnector for Codes {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Codes {
    async fn call(&self, request: HttpRequest) -> HttpResult<HttpResponse> {
        let is_object = request.headers().contains_key(header::RANGE);
        let response = self.0.call(request).await?;
        let is_success = response.status().is_success();
        if is_success && is_object {
            return Ok(response);
        }
        let bytes_max = if is_success { ANSWER_BYTES_MAX } else { REFUSAL_BYTES_MAX };
        let (mut parts, body) = response.into_parts();
        let mut text = Vec::new();
        let mut frames = body.bytes_stream();
        while text.len() <= bytes_max
            && let Some(frame) = frames.try_next().await?
        {
            text.extend_from_slice(&frame);
        }
        if is_success && text.len() > bytes_max {
            return Err(refused(format!("the service sent more than {bytes_max} bytes that are not of an object")));
        }
        let text = String::from_utf8_lossy(&text);
        if is_success {
            let (rest, keys) = listing::take_keys(&text);
            parts.extensions.insert(keys);
            return Ok(Response::from_parts(parts, rest.into()));
        }
        let refusal = Refusal::of_answer(parts.status, &parts.headers, &text);
        if refusal.region.is_some() && parts.status.is_redirection() {
            // A redirect without a location, whose body would not be passed on.
            parts.status = StatusCode::BAD_REQUEST;
        }
        Ok(Response::from_parts(parts, refusal.to_string().into()))
    }
}

/// Codes of an answer that refuses a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// `None` for an answer that begins with the status of a success.
    pub(super) status: Option<u16>,
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
        let header = |name| headers.get(name)?.to_str().ok().map(str::to_owned);
        let mut refusal = Refusal::parse(text);
        // Services that issue tokens answer with JSON.
        let json = || serde_json::from_str::<serde_json::Value>(text).ok()?.get("error")?.as_str().map(str::to_owned);
        refusal.code = refusal.code.or_else(|| json().filter(|text| is_code(text)));
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

    /// Returns the codes that an error stands for, or `None` if it is not about an answer.
    pub fn of(error: &object_store::Error) -> Option<Refusal> {
        use object_store::Error::{Generic, PermissionDenied, Unauthenticated};
        let (Generic { source, .. } | PermissionDenied { source, .. } | Unauthenticated { source, .. }) = error else {
            return None;
        };
        let text = source.to_string();
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

    /// Returns whether the keys of the request are valid no longer.
    pub(super) fn has_expired(&self) -> bool {
        matches!(self.code.as_deref(), Some("ExpiredToken" | "TokenRefreshRequired"))
    }

    /// Returns the failure of the request, for which the caller has no text of its own.
    pub fn failure(&self) -> Failure {
        let code = self.code.as_deref();
        let (class, message) = match code {
            Some("SlowDown" | "ServerBusy") => {
                (FailureClass::RateLimited(None), "the service asks for fewer requests".to_owned())
            }
            Some(code @ ("RequestTimeout" | "InternalError" | "OperationAborted")) => {
                (FailureClass::Transient, format!("the service failed (code {code})"))
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
                (FailureClass::Denied, "the keys have expired, and no others were found; renew them".to_owned())
            }
            _ => {
                let status = self.status.map(|status| format!("status {status}"));
                let code = code.map(|code| format!("code {code}"));
                let codes: Vec<String> = status.into_iter().chain(code).collect();
                (FailureClass::Permanent, format!("the service refuses the request ({})", codes.join(", ")))
            }
        };
        Failure::new(class, message)
    }
}

/// Returns the variables that have the credentials of a service.
fn credentials_of(service: Service) -> &'static str {
    match service {
        Service::S3 => "AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL",
        Service::Gcs => "GOOGLE_APPLICATION_CREDENTIALS",
        _ => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    }
}

fn denied(service: Service, status: &str) -> Failure {
    let credentials = credentials_of(service);
    let message = format!("the service refuses access (status {status}); check the credentials: {credentials}");
    Failure::new(FailureClass::Denied, message)
}

/// Returns the failure that an error stands for. Answers of services may repeat the request, so no text of theirs is
/// shown for refusals.
pub(super) fn failure_of(error: &object_store::Error, service: Service) -> Failure {
    let credentials = credentials_of(service);
    match error {
        object_store::Error::NotFound { .. } => Failure::new(
            FailureClass::NotFound,
            "the service has no object of this name (status 404); check the bucket and the key",
        ),
        object_store::Error::Precondition { .. } | object_store::Error::NotModified { .. } => {
            Failure::changed("the object changed while it was loaded (status 412)")
        }
        object_store::Error::PermissionDenied { .. } => denied(service, "403"),
        object_store::Error::Unauthenticated { .. } => denied(service, "401"),
        object_store::Error::NotSupported { source } => Failure::new(FailureClass::Permanent, source.to_string()),
        object_store::Error::Generic { source, .. } if let Some(error) = source.downcast_ref() => {
            Failure::of_keys(error)
        }
        other => {
            let text = other.to_string();
            let failed = |class, message: &str| Failure::new(class, message);
            let refusal = Refusal::of(other);
            let is_metadata =
                text.contains("instance metadata") || METADATA_HOSTS.iter().any(|host| text.contains(host));
            if is_metadata && !text.contains("redirected to") {
                let why = refusal.map_or_else(|| http_error::failure_of(other), |refusal| refusal.failure()).message;
                let message = format!(
                    "no credentials were found; set {credentials}, or skip_signature for a public bucket (this machine's \
                     service of instance metadata: {why})"
                );
                return failed(FailureClass::Denied, &message);
            }
            if let Some(refusal) = refusal {
                return match refusal.status {
                    Some(400..500) if text.contains("performing token request") => {
                        let why = refusal.failure().message;
                        let message = format!("no token was issued ({why}); check the credentials: {credentials}");
                        failed(FailureClass::Denied, &message)
                    }
                    // Errors of listings have no class of their own.
                    Some(status @ (401 | 403)) => denied(service, &status.to_string()),
                    Some(404) => failed(FailureClass::NotFound, "the service has no such bucket (status 404)"),
                    _ => refusal.failure(),
                };
            }
            let message = match () {
                () if text.contains("non-partial response") => {
                    "the service ignores ranges: it answered with the whole object (status 200)"
                }
                () if text.contains("Requested ") || text.contains("Content-Range") => {
                    return failed(FailureClass::Permanent, &format!("the service sent a wrong range: {text}"));
                }
                () if text.contains("redirect without LOCATION") => {
                    "the service redirects the request; check the region and the endpoint of the bucket"
                }
                () if text.contains("Got invalid ") => "the service sent an answer that cannot be parsed",
                () => return http_error::failure_of(other),
            };
            failed(FailureClass::Permanent, message)
        }
    }
}

fn is_code(text: &str) -> bool {
    is_word(text, '_')
}

/// Returns whether a text may be a region, which becomes part of the name of a host.
fn is_region(text: &str) -> bool {
    is_word(text, '-')
}

fn is_word(text: &str, other: char) -> bool {
    (1..=WORD_BYTES_MAX).contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric() || c == other)
}
