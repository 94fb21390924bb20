//! Access keys, and the credential provider that keeps them and renews them before they expire.

use super::files::Place;
use crate::error::{Error, Kind, Result};
use crate::remote::stores::http::collect;
use crate::remote::stores::http_error::failure_of;
use crate::remote::stores::transport::Transport;
use crate::remote::stores::{Attempt, Failure, FailureClass};
use async_trait::async_trait;
use chrono::{DateTime, TimeDelta, Utc};
use futures_util::lock::Mutex;
use object_store::aws::AwsCredential;
use object_store::client::{HttpRequest, HttpService};
use object_store::{CredentialProvider, HeaderValue};
use reqwest::StatusCode;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Remaining validity at which keys are renewed. The longest request that they sign is shorter.
const RENEWED_BEFORE: TimeDelta = TimeDelta::minutes(5);

/// Access keys, and the time until which they are valid.
pub struct Keys {
    /// Id, secret key and session token.
    pub credential: Arc<AwsCredential>,
    /// `None` if they do not expire.
    pub expires: Option<DateTime<Utc>>,
}

impl Keys {
    /// Returns whether the keys are valid at `now`.
    pub fn are_valid(&self, now: DateTime<Utc>) -> bool {
        self.expires.is_none_or(|expires| expires > now)
    }

    /// Returns when keys that are obtained or kept at `now` are to be renewed: five minutes before they expire, or after
    /// half of a remaining validity that is shorter than ten minutes. So a source that returns short-lived keys, or
    /// fails, is not asked for each request.
    pub fn renewal(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let expires = self.expires?;
        let margin = RENEWED_BEFORE.min((expires - now) / 2);
        expires.checked_sub_signed(margin)
    }
}

/// Checks the id, the secret key and the session token that come from `key` at `place`. Fails with `invalid-argument`
/// if a header of a request cannot hold them.
pub(super) fn checked(
    place: &Place,
    key: &str,
    (key_id, secret_key, token): (String, String, Option<String>),
) -> Result<AwsCredential> {
    let texts = [Some(&key_id), Some(&secret_key), token.as_ref()];
    if texts.into_iter().flatten().any(|text| text.is_empty() || HeaderValue::from_str(text).is_err()) {
        let message = "an access key or session token is empty, or has line breaks or other characters that are not \
                       printable ASCII; expected the text as AWS issued it";
        return Err(place.invalid(key, message));
    }
    Ok(AwsCredential { key_id, secret_key, token })
}

/// Parses a date as AWS programs write it: RFC 3339, with `UTC` for the `Z` in old caches of the CLI.
pub fn parse_date(text: &str) -> Option<DateTime<Utc>> {
    let text = text.strip_suffix("UTC").map_or_else(|| text.to_owned(), |date| format!("{date}Z"));
    DateTime::parse_from_rfc3339(&text).ok().map(|date| date.to_utc())
}

/// Source of temporary keys.
#[async_trait]
pub trait KeySource: Send + Sync {
    /// Requests new keys.
    async fn fetch(&self) -> Result<Keys>;
}

/// Keys of a source, renewed when a request needs them. One request renews, and the others wait for it.
pub struct Refreshed<S> {
    source: S,
    kept: Mutex<Option<Kept>>,
}

struct Kept {
    keys: Keys,
    renewal: Option<DateTime<Utc>>,
}

impl<S: KeySource> Refreshed<S> {
    /// Creates a provider that has no keys yet.
    pub fn new(source: S) -> Self {
        Refreshed { source, kept: Mutex::new(None) }
    }
}

impl<S> fmt::Debug for Refreshed<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refreshed").finish_non_exhaustive()
    }
}

#[async_trait]
impl<S: KeySource> CredentialProvider for Refreshed<S> {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let mut kept = self.kept.lock().await;
        let now = Utc::now();
        if let Some(Kept { keys, renewal }) = &*kept
            && renewal.is_none_or(|renewal| now < renewal)
        {
            return Ok(keys.credential.clone());
        }
        let keys = match self.source.fetch().await {
            Ok(keys) => keys,
            Err(error) => match kept.take().map(|kept| kept.keys).filter(|keys| keys.are_valid(Utc::now())) {
                Some(keys) => {
                    tracing::warn!(%error, "cannot renew the access keys of AWS; uses the previous ones until they expire");
                    keys
                }
                None => return Err(wrap(error)),
            },
        };
        let now = Utc::now();
        if !keys.are_valid(now) {
            let message = "the new access keys of AWS have expired already; check the clock of this machine, and the \
                           cache of the program that returned the keys";
            return Err(wrap(Error::new(Kind::PermissionDenied, message)));
        }
        let credential = keys.credential.clone();
        *kept = Some(Kept { renewal: keys.renewal(now), keys });
        Ok(credential)
    }
}

fn wrap(error: Error) -> object_store::Error {
    object_store::Error::Generic { store: "S3", source: Box::new(error) }
}

/// Returns the error of a provider. It is an error of fst, except for providers of `object_store`.
pub(super) fn unwrap(error: object_store::Error) -> Error {
    match &error {
        object_store::Error::Generic { source, .. } if let Some(error) = source.downcast_ref::<Error>() => {
            error.clone()
        }
        error => Error::new(Kind::PermissionDenied, format!("cannot get access keys of AWS: {error}")),
    }
}

/// Number of times that a request is sent before its failure is an error.
const ATTEMPTS: u32 = 3;
/// Delay before the second attempt. It doubles for each further one.
const DELAY: Duration = Duration::from_millis(200);
/// Time limit of an attempt.
const LIMIT: Duration = Duration::from_secs(20);
/// Upper bound for the size of an answer. Answers take a few KB.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// Sends a request and returns the status and the body of the answer. Repeats it after failures that may pass.
///
/// # Errors
/// Text with the host and the reason, if no answer arrives. It has neither the URL nor the headers of the request.
pub(super) async fn send(request: &HttpRequest) -> std::result::Result<(StatusCode, Vec<u8>), String> {
    let (mut attempt, mut delay) = (1, DELAY);
    loop {
        let late = |_| Err(Failure::new(FailureClass::Transient, format!("not within {} s", LIMIT.as_secs())));
        match tokio::time::timeout(LIMIT, send_once(request.clone())).await.unwrap_or_else(late) {
            Ok(answer) => return Ok(answer),
            Err(failure) if attempt == ATTEMPTS || !failure.is_transient() => {
                let host = request.uri().authority().map_or("", |authority| authority.as_str());
                return Err(format!("no answer from {host}: {}", failure.message));
            }
            Err(_) => tokio::time::sleep(delay).await,
        }
        attempt += 1;
        delay *= 2;
    }
}

async fn send_once(request: HttpRequest) -> Attempt<(StatusCode, Vec<u8>)> {
    let response = Transport::default().call(request).await.map_err(|error| failure_of(&error))?;
    Ok((response.status(), collect(response, ANSWER_BYTES_MAX).await?))
}
