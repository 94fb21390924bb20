//! Temporary keys from IAM Identity Center, with the token that `aws sso login` left in its cache.

use super::files::Place;
use super::refresh::{self, KeySource, Keys, parse_date};
use crate::error::{Error, Kind, Result};
use async_trait::async_trait;
use chrono::{DateTime, Utc};
use object_store::HeaderValue;
use object_store::client::{HttpRequest, HttpRequestBody};
use reqwest::{StatusCode, Url};
use serde::Deserialize;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) struct SsoRole {
    pub(super) place: Place,
    pub(super) profile: String,
    /// File with the token.
    pub(super) cache: PathBuf,
    /// Address of GetRoleCredentials, with the account and the name of the role.
    pub(super) url: Url,
}

/// Returns the file in which the CLI keeps the token of a session or, for profiles without a session, of a start URL.
pub(super) fn cache_file(home: &Path, session_or_url: &str) -> PathBuf {
    let digest = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, session_or_url.as_bytes());
    let hex: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    home.join(".aws/sso/cache").join(format!("{hex}.json"))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Token {
    access_token: String,
    expires_at: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    role_credentials: RoleCredentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RoleCredentials {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    /// Milliseconds since 1970.
    expiration: i64,
}

#[async_trait]
impl KeySource for SsoRole {
    async fn fetch(&self) -> Result<Keys> {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        let invalid_url = |_| self.place.invalid("sso_region", "the region is not part of a valid address");
        *request.uri_mut() = self.url.as_str().parse().map_err(invalid_url)?;
        request.headers_mut().insert("x-amz-sso_bearer_token", self.token()?);
        let (status, body) = refresh::send(&request).await.map_err(|error| {
            self.place.error(Kind::Io, "sso_role_name", format!("cannot get the role's keys: {error}"))
        })?;
        if status == StatusCode::UNAUTHORIZED {
            return Err(self.login("the service does not accept the token"));
        }
        if !status.is_success() {
            let message = format!(
                "IAM Identity Center answered with status {}. Check that sso_account_id and sso_role_name are among \
                 those that `aws sso login` shows",
                status.as_u16()
            );
            return Err(self.place.error(Kind::PermissionDenied, "sso_role_name", message));
        }
        // Errors of serde_json quote values, which may be secrets.
        let Ok(Answer { role_credentials: role }) = serde_json::from_slice(&body) else {
            let message = "the answer of IAM Identity Center has no roleCredentials with keys, token and expiration";
            return Err(self.place.error(Kind::Io, "sso_role_name", message));
        };
        let expires = DateTime::from_timestamp_millis(role.expiration);
        let texts = (role.access_key_id, role.secret_access_key, Some(role.session_token));
        Ok(Keys { credential: Arc::new(refresh::checked(&self.place, "sso_role_name", texts)?), expires })
    }
}

impl SsoRole {
    /// Reads the token each time, because a new login replaces it.
    fn token(&self) -> Result<HeaderValue> {
        let bytes = match std::fs::read(&self.cache) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(self.login("no token is cached")),
            Err(error) => return Err(Error::from_io(error, &self.cache, "cannot read the token of `aws sso login`")),
        };
        let Ok(Token { access_token, expires_at }) = serde_json::from_slice(&bytes) else {
            return Err(self.login("the cache has no accessToken and expiresAt"));
        };
        if parse_date(&expires_at).is_none_or(|expires| expires <= Utc::now()) {
            return Err(self.login("the cached token has expired"));
        }
        let mut header =
            HeaderValue::from_str(&access_token).map_err(|_| self.login("the cached token is not printable ASCII"))?;
        header.set_sensitive(true);
        Ok(header)
    }

    fn login(&self, reason: &str) -> Error {
        let (cache, profile) = (self.cache.display(), &self.profile);
        let message = format!("{reason} ({cache}); run aws sso login --profile {profile}");
        self.place.error(Kind::PermissionDenied, "sso_role_name", message)
    }
}
