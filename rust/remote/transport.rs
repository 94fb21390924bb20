//! HTTP: one connection pool for each lane, redirects, and which answers count as failures of the connection.

use super::body::{self, Late};
use super::lane;
use super::progress::{Progress, stalled};
use super::reach::Reach;
use super::redis::Idle;
use super::settings::{self, Settings};
use super::store::{Failure, FailureClass};
use super::trust::Trust;
use crate::error::Result;
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
use reqwest::redirect::Policy;
use rustls::{AlertDescription, ClientConfig};
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// Largest number of redirects of one request.
const REDIRECTS_MAX: usize = 5;
/// Time for a connection to open.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a service of instance metadata to answer. It does not exist on most machines.
const METADATA_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which an unused connection is not used again. Some servers close it soon afterwards.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
/// Largest pause that a server may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
const PROXY_REFUSAL: &str = "the proxy refuses access (status 407); check the user and the password in HTTPS_PROXY, \
                             HTTP_PROXY or ALL_PROXY";
/// Headers that another host may see after a redirect. All others may be secret.
const PUBLIC_HEADERS: [HeaderName; 5] =
    [header::RANGE, header::IF_MATCH, header::IF_UNMODIFIED_SINCE, header::ACCEPT_ENCODING, header::ACCEPT];

/// Connections of a lane.
#[derive(Clone)]
pub(super) struct Client {
    http: Connections,
    /// Connections to places with certificates of their own. Those of a place that no object is open at are closed.
    others: Arc<Mutex<Vec<Other>>>,
    /// Connections to Redis that no request uses.
    idle: Idle,
    settings: Settings,
}

/// Connections for a configuration of TLS.
type Other = (Weak<ClientConfig>, Connections);

/// Connections for HTTP, all with one configuration of TLS. Clients are created when they are needed.
#[derive(Clone, Default)]
struct Connections(Arc<Clients>);

#[derive(Default)]
struct Clients {
    /// Those for requests without a body.
    configured: OnceLock<reqwest::Client>,
    named: OnceLock<reqwest::Client>,
    redirected: OnceLock<reqwest::Client>,
    /// The one for requests with a body, during which nothing is received for long.
    uploads: OnceLock<reqwest::Client>,
}

impl Client {
    /// Creates a client without open connections.
    ///
    /// # Errors
    /// `invalid-argument` for settings in the environment.
    pub(super) fn new() -> Result<Client> {
        let settings = Settings::from_env()?;
        Ok(Client { http: Connections::default(), others: Arc::default(), idle: Idle::default(), settings })
    }

    /// Returns the connections to places that trust these certificates.
    fn connections(&self, trust: &Trust) -> Connections {
        let Trust::Place(tls) = trust else { return self.http.clone() };
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = others.iter().find(|(known, _)| known.as_ptr() == Arc::as_ptr(tls)) {
            return known.clone();
        }
        let new = Connections::default();
        others.retain(|(known, _)| known.strong_count() > 0);
        others.push((Arc::downgrade(tls), new.clone()));
        new
    }

    /// Returns the connections to Redis that no request uses.
    pub(super) fn idle(&self) -> &Idle {
        &self.idle
    }

    /// Returns the time in which some bytes arrive, after which a request is repeated.
    pub(super) fn stall(&self) -> Duration {
        self.settings.stall
    }

    /// Returns whether the settings are still the same.
    pub(super) fn is_current(&self) -> bool {
        Settings::from_env().is_ok_and(|settings| settings == self.settings)
    }
}

impl Connections {
    /// Returns the client for requests without a body.
    fn reader(&self, reach: Reach, trust: &Trust, stall: Duration) -> std::result::Result<&reqwest::Client, HttpError> {
        let slot = match reach {
            Reach::Configured => &self.0.configured,
            Reach::Named => &self.0.named,
            Reach::Redirected => &self.0.redirected,
        };
        built(slot, trust, |builder| builder.dns_resolver(reach).read_timeout(stall))
    }

    /// Returns the client for requests with a body. Nothing may arrive for long while a body is sent, but the other side
    /// acknowledges its bytes within the time of a stall.
    fn uploads(&self, trust: &Trust, stall: Duration) -> std::result::Result<&reqwest::Client, HttpError> {
        built(&self.0.uploads, trust, |builder| builder.tcp_user_timeout(stall))
    }
}

/// Returns the client of a slot, a new one if there is none.
fn built<'a>(
    slot: &'a OnceLock<reqwest::Client>,
    trust: &Trust,
    settings: impl FnOnce(reqwest::ClientBuilder) -> reqwest::ClientBuilder,
) -> std::result::Result<&'a reqwest::Client, HttpError> {
    if let Some(known) = slot.get() {
        return Ok(known);
    }
    let tls = trust.config().map_err(|error| refused(error.to_string()))?;
    let client = settings(builder(&tls)).build().map_err(|error| without_client(&error))?;
    Ok(slot.get_or_init(|| client))
}

fn without_client(error: &reqwest::Error) -> HttpError {
    refused(format!("cannot create a client: {error}"))
}

fn builder(tls: &Arc<ClientConfig>) -> reqwest::ClientBuilder {
    let builder = reqwest::Client::builder();
    // reqwest uses the proxy for IP addresses then.
    let builder = if settings::excludes_all_hosts() { builder.no_proxy() } else { builder };
    builder
        .tls_backend_preconfigured(ClientConfig::clone(tls))
        .http1_only()
        .redirect(Policy::none())
        .retry(reqwest::retry::never())
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(IDLE_TIMEOUT)
        .user_agent(concat!("fst/", env!("CARGO_PKG_VERSION")))
}

/// Sends requests over the connections of the lane that the calling thread runs on, and follows redirects.
///
/// An answer that the same request may not get again, such as 503, is an error with a [`StatusFailure`].
#[derive(Debug, Clone, Default)]
pub(super) struct Transport {
    trust: Trust,
    /// Hosts that the first request may reach. A redirect may lead to fewer.
    reach: Reach,
}

impl HttpConnector for Transport {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Transport {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let (mut parts, body) = request.into_parts();
        if parts.headers.get(header::AUTHORIZATION).is_some_and(|value| value.as_bytes().trim_ascii_end() == b"Bearer")
        {
            parts.headers.remove(header::AUTHORIZATION);
        }
        let mut reach = self.reach;
        for _ in 0..=REDIRECTS_MAX {
            let mut attempt = http::Request::new(body.clone());
            *attempt.method_mut() = parts.method.clone();
            *attempt.uri_mut() = parts.uri.clone();
            *attempt.headers_mut() = parts.headers.clone();
            let response = self.send_within(reach, attempt).await?;
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
            reach = Reach::Redirected;
        }
        Err(refused(format!("the server redirected more than {REDIRECTS_MAX} times")))
    }
}

impl Transport {
    /// Creates the transport to a place that the program or its environment names.
    pub(super) fn new(trust: Trust) -> Transport {
        Transport { trust, reach: Reach::Configured }
    }

    /// Returns the same transport for other hosts.
    pub(super) fn within(self, reach: Reach) -> Transport {
        Transport { reach, ..self }
    }

    /// Sends one request, without following redirects.
    pub(super) async fn send(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        self.send_within(self.reach, request).await
    }

    async fn send_within(&self, reach: Reach, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let client = lane::client().ok_or_else(|| refused("no lane runs this request".into()))?;
        let connections = client.connections(&self.trust);
        let host = request.uri().host().unwrap_or_default();
        reach.check(host)?;
        let response = if reach == Reach::Configured && is_metadata_name(host) {
            self.ask_metadata(request).await?
        } else if request.body().content_length() == 0 {
            let answer = connections.reader(reach, &self.trust, client.stall())?.call(request).await?;
            answer.map(|body| watched(body, client.stall()))
        } else {
            body::send(connections.uploads(&self.trust, client.stall())?, request).await?
        };
        match response.status() {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Err(StatusFailure::error(&response)),
            status if status.is_server_error() => Err(StatusFailure::error(&response)),
            StatusCode::PROXY_AUTHENTICATION_REQUIRED => Err(refused(PROXY_REFUSAL.into())),
            _ => Ok(response),
        }
    }

    /// Sends a request to a service of instance metadata, whose whole answer arrives soon.
    async fn ask_metadata(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        // A proxy would answer for another machine.
        let tls = self.trust.config().map_err(|error| refused(error.to_string()))?;
        let direct = reqwest::Client::builder().no_proxy().tls_backend_preconfigured(ClientConfig::clone(&tls)).build();
        let direct = direct.map_err(|error| without_client(&error))?;
        let answer = async {
            let (parts, body) = direct.call(request).await?.into_parts();
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
pub(super) fn get_request(url: &str, mut headers: HeaderMap) -> std::result::Result<HttpRequest, Failure> {
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
pub(super) fn redirect_target<T>(
    method: &Method,
    from: &Uri,
    response: &Response<T>,
) -> std::result::Result<Option<Uri>, HttpError> {
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

/// Returns whether a name is that of a service of instance metadata, which hands out credentials.
fn is_metadata_name(host: &str) -> bool {
    matches!(host, "metadata.google.internal" | "metadata" | "169.254.169.254" | "169.254.170.2" | "[fd00:ec2::254]")
}

/// Status of an answer after which the same request is repeated.
#[derive(Debug)]
pub(super) struct StatusFailure {
    status: StatusCode,
    retry_after: Option<Duration>,
}

impl StatusFailure {
    fn error<T>(response: &Response<T>) -> HttpError {
        let stated = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let retry_after = stated.map(|seconds| Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
        HttpError::new(HttpErrorKind::Unknown, StatusFailure { status: response.status(), retry_after })
    }
}

impl fmt::Display for StatusFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server answered {}", self.status)
    }
}

impl StdError for StatusFailure {}

/// Refusal to follow an answer.
#[derive(Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Refused {}

pub(super) fn refused(message: String) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, Refused(message))
}

/// Returns the failure that an error of a connection stands for, from its chain of causes.
pub(super) fn failure_of(error: &(dyn StdError + 'static)) -> Failure {
    let mut cause = Some(error);
    let mut last = error;
    let (mut is_timeout, mut tls) = (false, None);
    while let Some(next) = cause {
        if let Some(StatusFailure { status, retry_after }) = next.downcast_ref() {
            let message = format!("the server answered {status}");
            let is_limit = matches!(*status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
            let class = if is_limit { FailureClass::RateLimited(*retry_after) } else { FailureClass::Transient };
            return Failure::new(class, message);
        }
        if let Some(Refused(message)) = next.downcast_ref() {
            return Failure::new(FailureClass::Permanent, message);
        }
        if let Some(late) = next.downcast_ref::<Late>() {
            return Failure::new(FailureClass::Transient, late.to_string());
        }
        if let Some(error) = next.downcast_ref::<HttpError>() {
            is_timeout |= error.kind() == HttpErrorKind::Timeout;
        }
        if next.is::<serde_json::Error>() {
            // Its text may repeat the answer, such as a token.
            return Failure::new(FailureClass::Permanent, "the server sent an answer that cannot be parsed");
        }
        tls = tls.or_else(|| tls_error(next));
        last = next;
        cause = next.source();
    }
    let text = last.to_string();
    if is_timeout {
        return stalled();
    }
    if let Some(error) = tls {
        return tls_failure(error);
    }
    if text.contains("proxy authorization required") {
        return Failure::new(FailureClass::Permanent, PROXY_REFUSAL);
    }
    if text.contains("lookup") || text.contains("dns error") {
        let message = format!("the name of the host cannot be resolved: {text}; check the URL and the network");
        let is_temporary = text.contains("Temporary failure");
        return Failure::new(if is_temporary { FailureClass::Transient } else { FailureClass::Permanent }, message);
    }
    Failure::new(FailureClass::Transient, format!("the connection failed: {text}"))
}

/// Returns the error of TLS inside an error of the operating system, which does not state it as its source.
fn tls_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a rustls::Error> {
    let inside = error.downcast_ref::<io::Error>()?.get_ref()?;
    inside.downcast_ref().or_else(|| tls_error(inside))
}

/// Returns the failure of a connection whose TLS failed. One that ends without an alert is not among them.
fn tls_failure(error: &rustls::Error) -> Failure {
    use rustls::Error::{AlertReceived, DecryptError, General, InvalidCertificate};
    let hint = match error {
        // Bytes were changed on the way, or the server is at its limits.
        DecryptError | AlertReceived(AlertDescription::BadRecordMac | AlertDescription::InternalError) => {
            return Failure::new(FailureClass::Transient, format!("the connection failed: {error}"));
        }
        // The authorities of the environment cannot be read.
        General(message) => {
            return Failure::new(FailureClass::Permanent, format!("the TLS handshake failed: {message}"));
        }
        InvalidCertificate(_) => {
            "; if a private authority signed the server's certificate, name the file of its certificate in SSL_CERT_FILE, \
             or in the option ca_file of fst.storage.configure"
        }
        AlertReceived(
            AlertDescription::AccessDenied
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateRequired
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateUnknown
            | AlertDescription::HandshakeFailure
            | AlertDescription::UnknownCA
            | AlertDescription::UnsupportedCertificate,
        ) => {
            "; if the server asks clients for certificates, name the files of yours in the options client_certificate and \
             client_key of fst.storage.configure"
        }
        _ => "",
    };
    Failure::new(FailureClass::Permanent, format!("the TLS handshake failed: {error}{hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_password_become_a_header() {
        let request = get_request("http://me:p%40ss@host/a file?b=1", HeaderMap::new()).unwrap();
        assert_eq!(request.uri().to_string(), "http://host/a%20file?b=1");
        assert_eq!(request.headers()[header::AUTHORIZATION], "Basic bWU6cEBzcw==");
        let token = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static("Bearer t"))]);
        assert_eq!(get_request("http://me@host/", token).unwrap().headers()[header::AUTHORIZATION], "Bearer t");
        assert!(get_request("http://", HeaderMap::new()).is_err());
    }

    #[test]
    fn end_of_a_tls_connection_is_transient_and_a_refusal_is_not() {
        let ended =
            io::Error::new(io::ErrorKind::UnexpectedEof, "peer closed connection without sending TLS close_notify");
        assert_eq!(failure_of(&ended).class, FailureClass::Transient);
        let alert = |alert| failure_of(&io::Error::other(rustls::Error::AlertReceived(alert)));
        assert_eq!(alert(AlertDescription::InternalError).class, FailureClass::Transient);
        let failure = alert(AlertDescription::CertificateRequired);
        assert!(failure.class == FailureClass::Permanent && !failure.message.contains("SSL_CERT_FILE"));
    }
}
