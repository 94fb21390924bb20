//! Requests to the service of a bucket, and their failures.
//!
//! An answer without the bytes of an object has a bound, whatever it says.

use super::http_error::{self, HttpResult, refused};
use super::refusal::{Refusal, read_up_to};
use super::transport::Transport;
use super::{Failure, FailureClass};
use crate::remote::find::listing::{self, ANSWER_BYTES_MAX};
use crate::remote::find::location::Service;
use async_trait::async_trait;
use http::{Response, StatusCode, header};
use object_store::ClientOptions;
use object_store::client::{HttpClient, HttpConnector, HttpRequest, HttpResponse, HttpService};

/// Hosts that are asked for keys if nothing else has any.
const METADATA_HOSTS: [&str; 3] = ["169.254.169.254", "169.254.170.2", "metadata.google.internal"];

/// Transport to a bucket, which bounds listings and names the region of a redirect.
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
        let mut response = self.0.call(request).await?;
        if !response.status().is_success() {
            let refusal = Refusal::of_response(&response);
            if response.status().is_redirection() && refusal.region.is_some() {
                // A redirect without a location, whose body would not be passed on.
                *response.status_mut() = StatusCode::BAD_REQUEST;
            }
            return Ok(response.map(|_| refusal.to_string().into()));
        }
        if is_object {
            return Ok(response);
        }
        let (mut parts, body) = response.into_parts();
        let text = read_up_to(ANSWER_BYTES_MAX, body).await?;
        if text.len() > ANSWER_BYTES_MAX {
            let message = format!("the service sent more than {ANSWER_BYTES_MAX} bytes that are not of an object");
            return Err(refused(message));
        }
        let (rest, keys) = listing::take_keys(&String::from_utf8_lossy(&text));
        parts.extensions.insert(keys);
        Ok(Response::from_parts(parts, rest.into()))
    }
}

/// Returns the variables that have the credentials of a service.
fn credentials_of(service: Service) -> &'static str {
    match service {
        Service::S3 => "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL",
        Service::Gcs => "GOOGLE_APPLICATION_CREDENTIALS",
        _ => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    }
}

/// Returns the failure that an error stands for. Answers of services may repeat the request, so no text of theirs is
/// shown for refusals.
pub(super) fn failure_of(error: &object_store::Error, service: Service) -> Failure {
    let credentials = credentials_of(service);
    match error {
        object_store::Error::NotSupported { source } => Failure::new(FailureClass::Permanent, source.to_string()),
        object_store::Error::Generic { source, .. } if let Some(error) = source.downcast_ref() => {
            Failure::of_keys(error)
        }
        other => {
            let text = other.to_string();
            let failed = |class, message: &str| Failure::new(class, message);
            let refusal = Refusal::of(other);
            let codes = refusal.as_ref().map_or_else(String::new, Refusal::codes);
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
                    Some(401 | 403) if !refusal.has_expired() => {
                        let check = format!("; check the credentials: {credentials}");
                        let advice = refusal.advice(&check);
                        failed(FailureClass::Denied, &format!("the service refuses access ({codes}){advice}"))
                    }
                    // Errors of listings have no class of their own.
                    Some(404) if refusal.has_no_bucket() || !matches!(other, object_store::Error::NotFound { .. }) => {
                        failed(FailureClass::NotFound, &format!("the service has no such bucket ({codes})"))
                    }
                    Some(404) => {
                        let message =
                            format!("the service has no object of this name ({codes}); check the bucket and the key");
                        failed(FailureClass::NotFound, &message)
                    }
                    Some(304 | 412) => Failure::changed(&format!("the object changed while it was loaded ({codes})")),
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
