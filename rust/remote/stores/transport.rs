//! HTTP: redirects, and which answers count as failures of the connection.

use super::connections::without_client;
use super::exchange;
use super::host_policy::HostPolicy;
use super::http_error::{HttpResult, PROXY_REFUSAL, Progress, Refused, StatusFailure, refused};
use super::refusal;
use super::trust::Trust;
use super::{Attempt, Failure, FailureClass};
use crate::remote::transfer::body;
use crate::remote::transfer::runtime;
use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use bytes::Bytes;
use futures_util::stream;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response, StatusCode, Uri};
use http_body_util::{BodyExt, StreamBody};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
use percent_encoding::percent_decode_str;
use rustls::ClientConfig;
use std::io;
use std::time::Duration;

/// Largest number of redirects of one request.
const REDIRECTS_MAX: usize = 5;
/// Number of bytes of a redirect after which the connection is closed, and the rest not received.
const REDIRECT_BYTES_MAX: usize = 64 << 10;
/// Time for a service of instance metadata to answer. It does not exist on most machines.
const METADATA_TIMEOUT: Duration = Duration::from_secs(1);
/// Headers that another host may see after a redirect. All others may be secret.
const PUBLIC_HEADERS: [HeaderName; 5] =
    [header::RANGE, header::IF_MATCH, header::IF_UNMODIFIED_SINCE, header::ACCEPT_ENCODING, header::ACCEPT];

/// Sends requests over the connections of the runtime that the calling thread runs on, and follows redirects.
///
/// An answer that the same request may not get again, such as 503, is an error with a [`StatusFailure`].
#[derive(Debug, Clone, Default)]
pub struct Transport {
    trust: Trust,
    /// Hosts that the first request may reach. A redirect may lead to fewer.
    policy: HostPolicy,
}

impl HttpConnector for Transport {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Transport {
    async fn call(&self, request: HttpRequest) -> HttpResult<HttpResponse> {
        let (mut parts, body) = request.into_parts();
        if parts.headers.get(header::AUTHORIZATION).is_some_and(|value| value.as_bytes().trim_ascii_end() == b"Bearer")
        {
            parts.headers.remove(header::AUTHORIZATION);
        }
        let mut policy = self.policy;
        for _ in 0..=REDIRECTS_MAX {
            let mut attempt = http::Request::new(body.clone());
            *attempt.method_mut() = parts.method.clone();
            *attempt.uri_mut() = parts.uri.clone();
            *attempt.headers_mut() = parts.headers.clone();
            let response = self.send_within(policy, attempt).await?;
            let Some(target) = redirect_target(&parts.method, &parts.uri, &response)? else {
                return Ok(response);
            };
            if target.authority() != parts.uri.authority() {
                let public = |(name, value): (&HeaderName, &HeaderValue)| {
                    PUBLIC_HEADERS.contains(name).then(|| (name.clone(), value.clone()))
                };
                parts.headers = parts.headers.iter().filter_map(public).collect();
            }
            parts.uri = target;
            policy = HostPolicy::Redirected;
        }
        Err(refused(format!("the server redirected more than {REDIRECTS_MAX} times")))
    }
}

impl Transport {
    /// Creates the transport to a place that the program or its environment names.
    pub fn new(trust: Trust) -> Transport {
        Transport { trust, policy: HostPolicy::Configured }
    }

    pub(super) fn within(self, policy: HostPolicy) -> Transport {
        Transport { policy, ..self }
    }

    /// Sends one request, without following redirects.
    pub(super) async fn send(&self, request: HttpRequest) -> HttpResult<HttpResponse> {
        self.send_within(self.policy, request).await
    }

    async fn send_within(&self, policy: HostPolicy, request: HttpRequest) -> HttpResult<HttpResponse> {
        let client = runtime::client().ok_or_else(|| refused("no runtime runs this request".into()))?;
        let connections = client.connections(&self.trust);
        let host = request.uri().host().unwrap_or_default();
        policy.check(host)?;
        let response = if policy == HostPolicy::Configured && is_metadata_name(host) {
            self.ask_metadata(request).await?
        } else if request.body().content_length() == 0 {
            let answer =
                exchange::send(connections.reader(policy, &self.trust, client.stall())?, request, client.stall())
                    .await?;
            answer.map(|body| watched(body, client.stall()))
        } else {
            body::send(connections.uploads(&self.trust, client.stall())?, request).await?
        };
        let status = response.status();
        let is_redirect = status.is_redirection() && response.headers().contains_key(header::LOCATION);
        if status.is_success() {
            return Ok(response);
        }
        if is_redirect {
            // The connection is free for other requests once the end of the answer was seen.
            let (parts, body) = response.into_parts();
            let _ = refusal::read_up_to(REDIRECT_BYTES_MAX, body).await;
            return Ok(Response::from_parts(parts, Vec::new().into()));
        }
        let response = refusal::with_codes(response, client.stall()).await;
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Err(StatusFailure::error(&response)),
            status if status.is_server_error() => Err(StatusFailure::error(&response)),
            StatusCode::PROXY_AUTHENTICATION_REQUIRED => Err(refused(PROXY_REFUSAL.into())),
            _ => Ok(response),
        }
    }

    /// Sends a request to a service of instance metadata, whose whole answer arrives soon.
    async fn ask_metadata(&self, request: HttpRequest) -> HttpResult<HttpResponse> {
        // A proxy would answer for another machine.
        let tls = self.trust.config().map_err(|error| refused(error.to_string()))?;
        let direct = reqwest::Client::builder().no_proxy().tls_backend_preconfigured(ClientConfig::clone(&tls)).build();
        let direct = direct.map_err(|error| without_client(&error))?;
        let answer = async {
            let (parts, body) = body::send_empty(&direct, request).await?.into_parts();
            Ok(Response::from_parts(parts, body.bytes().await?.into()))
        };
        let late =
            |_| HttpError::new(HttpErrorKind::Timeout, Refused("no service of instance metadata answers".into()));
        tokio::time::timeout(METADATA_TIMEOUT, answer).await.map_err(late)?
    }
}

/// Returns a body that fails once it arrives too slowly.
fn watched(body: HttpResponseBody, stall: Duration) -> HttpResponseBody {
    let frames = stream::try_unfold((body, Progress::new(stall)), |(mut body, mut progress)| async move {
        let frame = progress.receive(body.frame(), |frame| {
            let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
            data.map_or(0, Bytes::len)
        });
        match frame.await {
            Some(frame) => Ok(frame.transpose()?.map(|frame| (frame, (body, progress)))),
            None => Err(HttpError::new(HttpErrorKind::Timeout, io::Error::from(io::ErrorKind::TimedOut))),
        }
    });
    HttpResponseBody::new(StreamBody::new(frames))
}

/// Returns a request for a URL. A user and password in it become a header.
pub(super) fn get_request(url: &str, mut headers: HeaderMap) -> Attempt<HttpRequest> {
    let invalid = || Failure::new(FailureClass::Invalid, "this is not a valid URL");
    // Also encodes what a URL cannot contain, such as spaces.
    let mut parsed = reqwest::Url::parse(url).map_err(|_| invalid())?;
    if !parsed.username().is_empty() || parsed.password().is_some() {
        let decoded = |text| percent_decode_str(text).collect::<Vec<u8>>();
        let credentials = [decoded(parsed.username()), decoded(parsed.password().unwrap_or_default())].join(&b':');
        let value = HeaderValue::from_str(&format!("Basic {}", BASE64.encode(credentials))).map_err(|_| invalid())?;
        headers.entry(header::AUTHORIZATION).or_insert(value);
        parsed.set_username("").and_then(|()| parsed.set_password(None)).map_err(|()| invalid())?;
    }
    let uri: Uri = parsed.as_str().parse().map_err(|_| invalid())?;
    let mut request = http::Request::new(HttpRequestBody::empty());
    *request.method_mut() = Method::GET;
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    Ok(request)
}

/// Returns where a redirect leads, or `None` for any other answer.
pub(super) fn redirect_target<T>(method: &Method, from: &Uri, response: &Response<T>) -> HttpResult<Option<Uri>> {
    let is_redirect = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
    if !is_redirect || (*method != Method::GET && *method != Method::HEAD) {
        return Ok(None);
    }
    // S3 names the right region by a redirect without a location, which the caller explains.
    let Some(location) = response.headers().get(header::LOCATION) else { return Ok(None) };
    let target = location.to_str().ok().and_then(|location| join(from, location));
    let target = target.ok_or_else(|| refused("the server redirected to an address that is not a URL".into()))?;
    let scheme = target.scheme_str();
    if from.scheme_str() == Some("https") && scheme != Some("https") {
        let host = target.host().unwrap_or_default();
        return Err(refused(format!("the server redirected from https to {} at {host}", scheme.unwrap_or_default())));
    }
    Ok(Some(target))
}

/// Returns the URL that `location` names, seen from `base`.
fn join(base: &Uri, location: &str) -> Option<Uri> {
    let base = reqwest::Url::parse(&base.to_string()).ok()?;
    let joined = base.join(location).ok()?;
    matches!(joined.scheme(), "http" | "https").then(|| joined.as_str().parse().ok()).flatten()
}

/// Returns whether a name belongs to a service of instance metadata, which hands out credentials.
fn is_metadata_name(host: &str) -> bool {
    matches!(host, "metadata.google.internal" | "metadata" | "169.254.169.254" | "169.254.170.2" | "[fd00:ec2::254]")
}
