//! Access keys, and the credential provider that keeps them and renews them before they expire.

use super::files::Place;
use crate::error::{Error, Kind, Result};
use async_trait::async_trait;
use chrono::{DateTime, TimeDelta, Utc};
use futures_util::lock::Mutex;
use object_store::aws::AwsCredential;
use object_store::{CredentialProvider, HeaderValue};
use std::fmt;
use std::sync::Arc;

/// Remaining validity at which keys are renewed. The longest request that they sign is shorter.
const RENEWED_BEFORE: TimeDelta = TimeDelta::minutes(5);

pub(super) struct Keys {
    pub(super) credential: Arc<AwsCredential>,
    pub(super) expires: Option<DateTime<Utc>>,
}

impl Keys {
    pub(super) fn are_valid(&self, now: DateTime<Utc>) -> bool {
        self.expires.is_none_or(|expires| expires > now)
    }

    /// Returns when keys that are obtained or kept at `now` are to be renewed: five minutes before they expire, or after
    /// half of a remaining validity that is shorter than ten minutes. So a source that returns short-lived keys, or
    /// fails, is not asked for each request.
    pub(super) fn renewal(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let expires = self.expires?;
        let margin = RENEWED_BEFORE.min((expires - now) / 2);
        expires.checked_sub_signed(margin)
    }
}

/// Checks the id, the secret key and the session token that come from `key` at `place`.
///
/// # Errors
/// `invalid-argument` if a header of a request cannot hold them.
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
pub(super) fn parse_date(text: &str) -> Option<DateTime<Utc>> {
    let text = text.strip_suffix("UTC").map_or_else(|| text.to_owned(), |date| format!("{date}Z"));
    DateTime::parse_from_rfc3339(&text).ok().map(|date| date.to_utc())
}

#[async_trait]
pub(super) trait KeySource: Send + Sync {
    async fn fetch(&self) -> Result<Keys>;
}

/// Keys of a source, renewed when a request needs them. One request renews, and the others wait for it.
pub(super) struct Refreshed<S> {
    source: S,
    kept: Mutex<Option<Kept>>,
}

struct Kept {
    keys: Keys,
    renewal: Option<DateTime<Utc>>,
}

impl<S: KeySource> Refreshed<S> {
    pub(super) fn new(source: S) -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Source whose keys expire after some minutes, or that fails.
    struct Numbered {
        fetched: AtomicUsize,
        valid_minutes: Option<i64>,
    }

    #[async_trait]
    impl KeySource for Numbered {
        async fn fetch(&self) -> Result<Keys> {
            let number = self.fetched.fetch_add(1, Ordering::Relaxed);
            let minutes = self.valid_minutes.ok_or_else(|| Error::new(Kind::Io, "no answer"))?;
            Ok(keys(&format!("new {number}"), in_minutes(minutes)))
        }
    }

    fn keys(key_id: &str, expires: Option<DateTime<Utc>>) -> Keys {
        let credential = AwsCredential { key_id: key_id.into(), secret_key: "SECRET".into(), token: None };
        Keys { credential: Arc::new(credential), expires }
    }

    fn in_minutes(minutes: i64) -> Option<DateTime<Utc>> {
        Some(Utc::now() + TimeDelta::minutes(minutes))
    }

    /// Returns a provider whose keys are valid for `valid_minutes` and are to be renewed now.
    fn due(valid_minutes: i64, source_minutes: Option<i64>) -> Refreshed<Numbered> {
        let kept = Kept { keys: keys("old", in_minutes(valid_minutes)), renewal: Some(Utc::now()) };
        let source = Numbered { fetched: AtomicUsize::new(0), valid_minutes: source_minutes };
        Refreshed { source, kept: Mutex::new(Some(kept)) }
    }

    fn key_id(provider: &Refreshed<Numbered>) -> Result<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let keys = runtime.block_on(provider.get_credential()).map_err(unwrap)?;
        Ok(keys.key_id.clone())
    }

    #[test]
    fn keys_are_renewed_once_when_due() {
        let provider = due(60, Some(60));
        for _ in 0..3 {
            assert_eq!(key_id(&provider).unwrap(), "new 0");
        }
    }

    #[test]
    fn previous_keys_are_used_until_they_expire_if_a_renewal_fails() {
        let provider = due(60, None);
        for _ in 0..3 {
            assert_eq!(key_id(&provider).unwrap(), "old");
        }
        // The source is not asked for each request.
        assert_eq!(provider.source.fetched.load(Ordering::Relaxed), 1);
        let error = key_id(&due(0, None)).unwrap_err();
        assert_eq!((error.kind(), error.to_string().contains("no answer")), (Kind::Io, true));
    }

    #[test]
    fn keys_that_have_expired_are_refused() {
        let error = key_id(&due(0, Some(-1))).unwrap_err();
        assert!(error.to_string().contains("expired already"), "{error}");
    }

    #[test]
    fn keys_are_renewed_five_minutes_before_they_expire() {
        let now = parse_date("2026-01-01T00:00:00Z").unwrap();
        let after = |minutes| now + TimeDelta::minutes(minutes);
        assert_eq!(keys("a", None).renewal(now), None);
        assert_eq!(keys("a", Some(after(60))).renewal(now), Some(after(55)));
        assert_eq!(keys("a", Some(after(4))).renewal(now), Some(after(2)));
        assert!(keys("a", Some(after(4))).are_valid(after(3)));
        assert!(!keys("a", Some(after(4))).are_valid(after(4)));
    }

    #[test]
    fn dates_of_all_aws_programs_are_parsed() {
        let date = parse_date("2019-11-14T04:05:45Z");
        assert!(date.is_some());
        for text in ["2019-11-14T04:05:45UTC", "2019-11-14T04:05:45.000Z", "2019-11-14T05:05:45+01:00"] {
            assert_eq!(parse_date(text), date, "{text}");
        }
        assert_eq!(parse_date("soon"), None);
    }
}
