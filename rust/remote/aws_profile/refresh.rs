//! Credential provider that keeps keys and renews them before they expire.

use super::keys::Keys;
use crate::error::{Error, Kind, Result};
use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures_util::lock::Mutex;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use std::fmt;
use std::sync::Arc;

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
    use chrono::TimeDelta;
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
            Ok(keys(&format!("new {number}"), minutes))
        }
    }

    fn keys(key_id: &str, valid_minutes: i64) -> Keys {
        let credential = AwsCredential { key_id: key_id.into(), secret_key: "SECRET".into(), token: None };
        Keys { credential: Arc::new(credential), expires: Some(Utc::now() + TimeDelta::minutes(valid_minutes)) }
    }

    /// Returns a provider whose keys are valid for `valid_minutes` and are to be renewed now.
    fn due(valid_minutes: i64, source_minutes: Option<i64>) -> Refreshed<Numbered> {
        let kept = Kept { keys: keys("old", valid_minutes), renewal: Some(Utc::now()) };
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
}
