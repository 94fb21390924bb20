//! Errors of HTTP, and the failures for which they stand.

use super::refusal::Refusal;
use super::{Failure, FailureClass};
use http::{Response, StatusCode, header};
use object_store::client::{HttpError, HttpErrorKind};
use rustls::AlertDescription;
use std::error::Error as StdError;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::time::Duration;
use tokio::time::{Instant, timeout};

pub type HttpResult<T> = Result<T, HttpError>;

/// Largest pause that a server may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
pub(super) const PROXY_REFUSAL: &str = "the proxy refuses access (status 407); check the user and the password in HTTPS_PROXY, \
                             HTTP_PROXY or ALL_PROXY";

/// Failure of a server that takes no bytes, or does not answer. The request is sent again.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Late(String);

impl Late {
    pub fn error(message: String) -> HttpError {
        HttpError::new(HttpErrorKind::Timeout, Late(message))
    }
}

/// Status of an answer after which the same request is repeated.
#[derive(Debug, thiserror::Error)]
#[error("the server failed ({codes})")]
pub(super) struct StatusFailure {
    status: StatusCode,
    codes: String,
    retry_after: Option<Duration>,
}

impl StatusFailure {
    pub(super) fn error<T>(response: &Response<T>) -> HttpError {
        let stated = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let retry_after = stated.map(|seconds| Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
        let codes = Refusal::of_response(response).codes();
        HttpError::new(HttpErrorKind::Unknown, StatusFailure { status: response.status(), codes, retry_after })
    }
}

/// Refusal to follow an answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refused(pub(super) String);

pub(super) fn refused(message: String) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, Refused(message))
}

/// Returns the failure that an error of a connection stands for, from its chain of causes.
pub fn failure_of(error: &(dyn StdError + 'static)) -> Failure {
    let mut cause = Some(error);
    let mut last = error;
    let (mut is_timeout, mut tls) = (false, None);
    while let Some(next) = cause {
        if let Some(StatusFailure { status, retry_after, .. }) = next.downcast_ref() {
            let is_limit = matches!(*status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
            let class = if is_limit { FailureClass::RateLimited(*retry_after) } else { FailureClass::Transient };
            return Failure::new(class, next.to_string());
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
    // The texts of hyper for an answer that it cannot parse.
    if text.ends_with(" parsed") || text == "message head is too large" {
        let message =
            format!("the server does not answer with HTTP ({text}); check the scheme and the port of the URL");
        return Failure::new(FailureClass::NoServer, message);
    }
    let is_refused = last.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    let class = if is_refused { FailureClass::NoServer } else { FailureClass::Transient };
    Failure::new(class, format!("the connection failed: {text}"))
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

/// Number of bytes that arrive at least in the time of a stall, or all that are missing. A record of TLS has as many, and
/// can be used only once it is whole.
pub const STALL_BYTES: usize = 16 << 10;

/// Bytes of an answer since the connection last was fast enough.
#[derive(Debug)]
pub struct Progress {
    stall: Duration,
    /// Time since the last [`STALL_BYTES`] bytes, without that in which nobody waited.
    waited: Duration,
    bytes: usize,
}

impl Progress {
    /// Creates the progress of an answer, of which nothing has arrived. Fewer than [`STALL_BYTES`] bytes in the time
    /// `stall` are a failure.
    pub fn new(stall: Duration) -> Progress {
        Progress { stall, waited: Duration::ZERO, bytes: 0 }
    }

    /// Waits for bytes, of which `length` returns the number. Returns `None` if too few have arrived in time.
    pub async fn receive<T>(&mut self, bytes: impl Future<Output = T>, length: impl FnOnce(&T) -> usize) -> Option<T> {
        let begin = Instant::now();
        let arrived = timeout(self.stall.saturating_sub(self.waited), bytes).await.ok()?;
        self.waited += begin.elapsed();
        self.bytes += length(&arrived);
        if self.bytes >= STALL_BYTES {
            *self = Progress::new(self.stall);
        }
        Some(arrived)
    }
}

/// Returns the failure of a connection on which too few bytes arrive.
pub(super) fn stalled() -> Failure {
    let message = format!("the connection stalled: fewer than {STALL_BYTES} bytes in the time of FST_STALL_SECONDS");
    Failure::new(FailureClass::Transient, message)
}
