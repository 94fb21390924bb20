//! Temporary keys of a role from the Security Token Service.

use super::files::Place;
use super::refresh::{self, KeySource, Keys, parse_date};
use crate::error::{Error, Kind, Result};
use async_trait::async_trait;
use object_store::HeaderValue;
use object_store::aws::{AwsAuthorizer, AwsCredentialProvider};
use object_store::client::{HttpRequest, HttpRequestBody};
use reqwest::{Method, Url, header};
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Arc;

/// Upper bound for the length of a service's message in an error, in characters.
const MESSAGE_CHARS_MAX: usize = 500;

pub(super) struct Role {
    pub(super) place: Place,
    pub(super) arn: String,
    pub(super) session_name: String,
    pub(super) external_id: Option<String>,
    pub(super) duration_seconds: Option<String>,
    /// Address of the service.
    pub(super) endpoint: Url,
    /// Region for which requests are signed.
    pub(super) region: String,
}

/// Role with the right to assume it.
pub(super) struct AssumedRole {
    pub(super) role: Role,
    pub(super) proof: Proof,
}

/// Right to assume a role.
pub(super) enum Proof {
    /// Keys that sign the request.
    Keys(AwsCredentialProvider),
    /// Token of a file, such as a Kubernetes service account's.
    TokenFile(PathBuf),
}

/// Answer of both actions.
#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "AssumeRoleResult", alias = "AssumeRoleWithWebIdentityResult")]
    result: Assumed,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Assumed {
    credentials: Credentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Credentials {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    expiration: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Refusal {
    error: RefusalError,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RefusalError {
    code: String,
    #[serde(default)]
    message: String,
}

#[async_trait]
impl KeySource for AssumedRole {
    async fn fetch(&self) -> Result<Keys> {
        let AssumedRole { role, proof } = self;
        let (action, additional, signed_by) = match proof {
            Proof::Keys(source) => {
                let keys = source.get_credential().await.map_err(refresh::unwrap)?;
                ("AssumeRole", role.external_id.clone().map(|id| ("ExternalId", id)), Some(keys))
            }
            // The file is read each time, because its owner replaces the token before it expires.
            Proof::TokenFile(path) => {
                let token = std::fs::read_to_string(path)
                    .map_err(|error| Error::from_io(error, path, "cannot read the token of web_identity_token_file"))?;
                ("AssumeRoleWithWebIdentity", Some(("WebIdentityToken", token.trim().to_owned())), None)
            }
        };
        let mut form = role.endpoint.clone();
        form.set_query(None);
        form.query_pairs_mut()
            .append_pair("Action", action)
            .append_pair("Version", "2011-06-15")
            .append_pair("RoleArn", &role.arn)
            .append_pair("RoleSessionName", &role.session_name)
            .extend_pairs(role.duration_seconds.as_ref().map(|seconds| ("DurationSeconds", seconds)))
            .extend_pairs(&additional);
        let mut request = HttpRequest::new(HttpRequestBody::from(form.query().unwrap_or_default().to_owned()));
        *request.method_mut() = Method::POST;
        let invalid_url = |_| role.place.invalid("role_arn", format!("{} is no endpoint of STS", role.endpoint));
        *request.uri_mut() = role.endpoint.as_str().parse().map_err(invalid_url)?;
        let content_type = HeaderValue::from_static("application/x-www-form-urlencoded; charset=utf-8");
        request.headers_mut().insert(header::CONTENT_TYPE, content_type);
        if let Some(credential) = &signed_by {
            AwsAuthorizer::new(credential, "sts", &role.region).try_authorize(&mut request, None).map_err(|_| {
                role.place.error(Kind::Internal, "role_arn", "the request to assume the role cannot be signed")
            })?;
        }
        let (status, body) = refresh::send(&request).await.map_err(|error| {
            role.place.error(Kind::Io, "role_arn", format!("cannot assume the role {}: {error}", role.arn))
        })?;
        let text = String::from_utf8_lossy(&body);
        let parsed = match status.is_success() {
            true => quick_xml::de::from_str::<Answer>(&text).ok(),
            false => None,
        };
        let Some(Credentials { access_key_id, secret_access_key, session_token, expiration }) =
            parsed.map(|answer| answer.result.credentials)
        else {
            // Only the first line: a message about a wrong signature goes on with the headers that were signed.
            let reason = match quick_xml::de::from_str::<Refusal>(&text) {
                Ok(Refusal { error }) => {
                    let line = error.message.lines().next().unwrap_or_default();
                    format!("{}: {}", error.code, line.chars().take(MESSAGE_CHARS_MAX).collect::<String>())
                }
                Err(_) => format!("the answer with status {} is not one of STS", status.as_u16()),
            };
            let token = signed_by.as_ref().and_then(|keys| keys.token.as_ref());
            let secrets = [token, additional.as_ref().map(|(_, value)| value)];
            let reason = secrets
                .into_iter()
                .flatten()
                .filter(|secret| !secret.is_empty())
                .fold(reason, |reason, secret| reason.replace(secret, "***"));
            let message = format!(
                "cannot assume the role {}: {} answered {reason}. Check the role's trust policy, external_id and \
                 duration_seconds, and the keys that assume the role",
                role.arn,
                role.endpoint.host_str().unwrap_or_default(),
            );
            return Err(role.place.error(Kind::PermissionDenied, "role_arn", message));
        };
        let expires = parse_date(&expiration).ok_or_else(|| {
            role.place.error(Kind::Io, "role_arn", "STS answered with an Expiration that is not a date in RFC 3339")
        })?;
        let texts = (access_key_id, secret_access_key, Some(session_token));
        Ok(Keys { credential: Arc::new(refresh::checked(&role.place, "role_arn", texts)?), expires: Some(expires) })
    }
}

/// Returns the regional endpoint of the service, or the global one without a region.
pub(super) fn endpoint(region: Option<&str>) -> String {
    match region {
        None => "https://sts.amazonaws.com".to_owned(),
        Some(region) => format!("https://sts.{region}.{}", domain(region)),
    }
}

pub(super) fn domain(region: &str) -> &'static str {
    const DOMAINS: [(&str, &str); 6] = [
        ("cn-", "amazonaws.com.cn"),
        ("eusc-", "amazonaws.eu"),
        ("us-iso-", "c2s.ic.gov"),
        ("us-isob-", "sc2s.sgov.gov"),
        ("us-isof-", "csp.hci.ic.gov"),
        ("eu-isoe-", "cloud.adc-e.uk"),
    ];
    DOMAINS.iter().find(|(prefix, _)| region.starts_with(prefix)).map_or("amazonaws.com", |(_, domain)| domain)
}
