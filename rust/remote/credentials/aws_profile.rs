//! Profiles of AWS: `~/.aws/config` and `~/.aws/credentials`, which `object_store` does not read.
//!
//! [`Profile::load`] reads the files. [`Profile::credentials`] chooses between the sources of keys that a profile can name
//! as botocore does, and renews temporary keys. A provider belongs to one process: a forked child creates its own.

use super::files::{Files, Properties, Variables};
use crate::error::{Error, Kind, Result};
use chrono::Utc;
use object_store::StaticCredentialProvider;

use super::refresh::{self, Refreshed};
use super::sts::{self, AssumedRole, Proof, Role};
use super::{process, sso};
use crate::remote::stores::transport::Transport;
use object_store::RetryConfig;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredentialProvider};
use reqwest::Url;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Upper bound for the number of profiles that an error lists.
const NAMES_SHOWN: usize = 20;

/// Profile that the environment selects, with the other profiles that it refers to.
pub struct Profile {
    name: String,
    files: Files,
    variables: Variables,
    home: Option<PathBuf>,
}

/// Shows the name only: the rest has secrets.
impl fmt::Debug for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profile").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Profile {
    /// Loads the profile of `AWS_PROFILE` or `AWS_DEFAULT_PROFILE`, else `default`. `variables` are the environment
    /// variables that begin with `AWS_`, and `home` is the user's home directory.
    ///
    /// Returns `None` if no profile is named and `default` does not exist. Fails with `invalid-argument` if a file
    /// cannot be parsed, or has no profile with the name.
    pub fn load(mut variables: BTreeMap<String, String>, home: Option<&Path>) -> Result<Option<Profile>> {
        variables.retain(|_, value| !value.is_empty());
        let files = Files::read(&variables, home)?;
        let named = ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"].into_iter().find_map(|name| variables.get_key_value(name));
        let name = named.map_or("default", |(_, name)| name).to_owned();
        let Some(properties) = files.profiles.get(&name) else {
            let Some((variable, _)) = named else { return Ok(None) };
            let names: Vec<&str> = files.profiles.keys().map(String::as_str).take(NAMES_SHOWN).collect();
            let message = format!(
                "{variable} is {name:?}, but the files of AWS profiles, ~/.aws/config and ~/.aws/credentials or those of \
                 AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE, have no such profile; they have: {}",
                if names.is_empty() { "no profile".to_owned() } else { names.join(", ") }
            );
            return Err(Error::new(Kind::InvalidArgument, message));
        };
        if let Some(region) = properties.text("region") {
            checked_region(region).map_err(|expected| properties.invalid("region", expected))?;
        }
        Ok(Some(Profile { name, files, variables, home: home.map(Path::to_path_buf) }))
    }

    /// Returns the name of the profile.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the region of the profile. The environment takes precedence.
    pub fn region(&self) -> Option<&str> {
        self.own().ok()?.text("region")
    }

    /// Returns the endpoint of S3 that the files have: from the profile's `services` section, or from the profile.
    /// `AWS_ENDPOINT_URL_S3` and `AWS_ENDPOINT_URL` take precedence.
    pub fn endpoint(&self) -> Option<&str> {
        self.configured_endpoint("s3")
    }

    /// Returns whether `s3.addressing_style` of the profile is `path`.
    pub fn is_path_style(&self) -> bool {
        self.own().is_ok_and(|own| own.nested("s3", "addressing_style") == Some("path"))
    }

    /// Returns a provider of the profile's keys, or `None` if the profile has none. Keys in the environment take
    /// precedence.
    ///
    /// Nothing is requested before the first call of the provider. Its errors are [`object_store::Error::Generic`]
    /// around an [`struct@Error`]. Requests run on the runtime of [`block_on`](crate::remote::transfer::runtime::block_on). Fails with
    /// `invalid-argument` with the file, section and key, if the profile lacks a key or has one that does not fit.
    pub fn credentials(&self) -> Result<Option<AwsCredentialProvider>> {
        self.provider(&self.name, self.own()?, &[])
    }

    /// Returns a provider of the keys of a profile. The profiles in `visited` assume roles with them.
    fn provider(&self, name: &str, own: &Properties, visited: &[&str]) -> Result<Option<AwsCredentialProvider>> {
        // Keys beside a role assume the roles of other profiles, or of this one if it is its own source.
        let is_base = own.text("role_arn").is_none()
            || own.text("web_identity_token_file").is_some()
            || (!visited.is_empty() && has_static_keys(own));
        if is_base {
            return self.base_credentials(name, own);
        }
        let role = self.role(own)?;
        let keys = match (own.text("source_profile"), own.text("credential_source")) {
            (Some(source), None) => {
                let invalid = |message: String| own.invalid("source_profile", message);
                let next = self.files.profiles.get(source);
                let next = next.ok_or_else(|| invalid(format!("the profile {source:?} does not exist")))?;
                let visited = [visited, &[name]].concat();
                if visited.contains(&source) && !(source == name && has_static_keys(next)) {
                    let cycle = [&visited[..], &[source]].concat().join(" -> ");
                    return Err(invalid(format!("the profiles {cycle} form a cycle")));
                }
                let missing = || invalid(format!("the profile {source:?} has no keys, which the role needs"));
                self.provider(source, next, &visited)?.ok_or_else(missing)?
            }
            (None, Some(source)) => self.source_credentials(source, own)?,
            (Some(_), Some(_)) => {
                let message = "a role has either source_profile or credential_source, not both";
                return Err(own.invalid("credential_source", message));
            }
            (None, None) => {
                let message = "a role needs source_profile, credential_source or web_identity_token_file";
                return Err(own.invalid("role_arn", message));
            }
        };
        Ok(Some(Arc::new(Refreshed::new(AssumedRole { role, proof: Proof::Keys(keys) }))))
    }

    fn own(&self) -> Result<&Properties> {
        // `load` has found the profile.
        self.files.profiles.get(&self.name).ok_or_else(|| Error::new(Kind::Internal, "the AWS profile is missing"))
    }

    /// Returns the keys that a profile has without assuming a role with other keys.
    fn base_credentials(&self, name: &str, own: &Properties) -> Result<Option<AwsCredentialProvider>> {
        if let Some(file) = own.text("web_identity_token_file") {
            let assumed = AssumedRole { role: self.role(own)?, proof: Proof::TokenFile(file.into()) };
            return Ok(Some(Arc::new(Refreshed::new(assumed))));
        }
        if own.text("sso_account_id").is_some() || own.text("sso_role_name").is_some() {
            return Ok(Some(Arc::new(Refreshed::new(self.sso_role(name, own)?))));
        }
        // Keys in the credentials file precede a process, which precedes keys in the config file.
        let in_credentials_file = STATIC_KEYS.iter().any(|key| own.is_in_credentials_file(key));
        if !in_credentials_file && let Some(command) = own.text("credential_process") {
            let place = own.place("credential_process").clone();
            let process = process::CredentialProcess { place, command: command.to_owned() };
            return Ok(Some(Arc::new(Refreshed::new(process))));
        }
        match has_static_keys(own) {
            true => static_credentials(own).map(Some),
            false => Ok(None),
        }
    }

    fn source_credentials(&self, source: &str, own: &Properties) -> Result<AwsCredentialProvider> {
        const KEY: &str = "credential_source";
        let place = own.place(KEY);
        match source {
            "Environment" => {
                let [id, secret, token] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
                    .map(|name| self.variables.get(name).cloned());
                let (Some(id), Some(secret)) = (id, secret) else {
                    let message = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY must be set for Environment";
                    return Err(place.invalid(KEY, message));
                };
                Ok(Arc::new(StaticCredentialProvider::new(refresh::checked(place, KEY, (id, secret, token))?)))
            }
            "EcsContainer" => of_container(&self.variables)?.ok_or_else(|| {
                let message = "EcsContainer needs AWS_CONTAINER_CREDENTIALS_RELATIVE_URI, or \
                               AWS_CONTAINER_CREDENTIALS_FULL_URI and AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE, which \
                               containers of ECS and EKS have";
                place.invalid(KEY, message)
            }),
            "Ec2InstanceMetadata" => of_instance(&self.variables),
            other => {
                let message = format!("{other:?} must be Environment, Ec2InstanceMetadata or EcsContainer");
                Err(place.invalid(KEY, message))
            }
        }
    }

    fn role(&self, own: &Properties) -> Result<Role> {
        let arn = own.required("role_arn", "web_identity_token_file needs it")?;
        if own.text("mfa_serial").is_some() {
            let message = "fst cannot ask for the code of a device; use a profile with credential_process = \
                           aws configure export-credentials --profile NAME";
            return Err(own.invalid("mfa_serial", message));
        }
        let duration_seconds = own.text("duration_seconds");
        if duration_seconds.is_some_and(|text| text.parse::<u32>().is_err()) {
            let message = "it must be a whole number of seconds, such as 3600";
            return Err(own.invalid("duration_seconds", message));
        }
        let place = own.place("role_arn").clone();
        let session_name = own.text("role_session_name").or_else(|| self.variable("AWS_ROLE_SESSION_NAME"));
        let region = ["AWS_REGION", "AWS_DEFAULT_REGION"].into_iter().find_map(|name| self.variable(name));
        let region = region.or_else(|| self.region());
        let address = self.service_endpoint("sts").map_or_else(|| sts::endpoint(region), str::to_owned);
        let region = region.unwrap_or("us-east-1");
        checked_region(region).map_err(|expected| place.invalid("role_arn", expected))?;
        Ok(Role {
            endpoint: checked_url(&address).map_err(|expected| place.invalid("role_arn", expected))?,
            region: region.to_owned(),
            place,
            arn: arn.to_owned(),
            session_name: session_name.map_or_else(|| format!("fst-{}", Utc::now().timestamp()), str::to_owned),
            external_id: own.text("external_id").map(str::to_owned),
            duration_seconds: duration_seconds.map(str::to_owned),
        })
    }

    fn sso_role(&self, name: &str, own: &Properties) -> Result<sso::SsoRole> {
        let account = own.required("sso_account_id", "sso_role_name needs it")?;
        let role = own.required("sso_role_name", "sso_account_id needs it")?;
        let (session, cache_name) = match own.text("sso_session") {
            Some(session) => {
                let missing = || {
                    let message = format!("the section [sso-session {session}] does not exist");
                    own.invalid("sso_session", message)
                };
                (self.files.sso_sessions.get(session).ok_or_else(missing)?, session)
            }
            None => (own, own.required("sso_start_url", "profiles without sso_session need it")?),
        };
        // A profile may complete its session.
        let session =
            if session.text("sso_region").is_none() && own.text("sso_region").is_some() { own } else { session };
        let region = session.required("sso_region", "IAM Identity Center needs it")?;
        let place = own.place("sso_role_name").clone();
        let invalid = |expected: String| session.invalid("sso_region", expected);
        let region = checked_region(region).map_err(invalid)?;
        let default = || format!("https://portal.sso.{region}.{}", sts::domain(region));
        let address = self.service_endpoint("sso").map_or_else(default, str::to_owned);
        let mut url = checked_url(&address)
            .and_then(|url| url.join("/federation/credentials").map_err(|_| EXPECTED_URL.to_owned()))
            .map_err(invalid)?;
        url.query_pairs_mut().append_pair("role_name", role).append_pair("account_id", account);
        let home = self.home.as_deref().ok_or_else(|| {
            let message = "the cache of `aws sso login` is in the home directory, which is not known; set HOME";
            place.invalid("sso_role_name", message)
        })?;
        let cache = sso::cache_file(home, cache_name);
        Ok(sso::SsoRole { place, profile: name.to_owned(), cache, url })
    }

    /// Returns the endpoint that the environment or the files set for a service that issues keys.
    fn service_endpoint(&self, service: &str) -> Option<&str> {
        if self.ignores_endpoints() {
            return None;
        }
        let set = self.variable(&format!("AWS_ENDPOINT_URL_{}", service.to_uppercase()));
        set.or_else(|| self.variable("AWS_ENDPOINT_URL")).or_else(|| self.configured_endpoint(service))
    }

    fn configured_endpoint(&self, service: &str) -> Option<&str> {
        let own = self.own().ok()?;
        if is_true(own.text("ignore_configured_endpoint_urls")) || self.ignores_endpoints() {
            return None;
        }
        let services = own.text("services").and_then(|name| self.files.services.get(name));
        services.and_then(|services| services.nested(service, "endpoint_url")).or_else(|| own.text("endpoint_url"))
    }

    fn ignores_endpoints(&self) -> bool {
        is_true(self.variable("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"))
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }
}

fn is_true(text: Option<&str>) -> bool {
    text.is_some_and(|text| text.eq_ignore_ascii_case("true"))
}

/// Keys that a profile has as text.
const STATIC_KEYS: [&str; 2] = ["aws_access_key_id", "aws_secret_access_key"];

fn has_static_keys(own: &Properties) -> bool {
    STATIC_KEYS.iter().any(|key| own.text(key).is_some())
}

fn static_credentials(own: &Properties) -> Result<AwsCredentialProvider> {
    let [id, secret] = STATIC_KEYS;
    let texts = (
        own.required(id, "aws_secret_access_key needs it")?.to_owned(),
        own.required(secret, "aws_access_key_id needs it")?.to_owned(),
        own.text("aws_session_token").or_else(|| own.text("aws_security_token")).map(str::to_owned),
    );
    Ok(Arc::new(StaticCredentialProvider::new(refresh::checked(own.place(id), id, texts)?)))
}

/// Checks a region, which becomes part of addresses and of headers.
fn checked_region(region: &str) -> std::result::Result<&str, String> {
    match region.chars().all(|character| character.is_ascii_alphanumeric() || character == '-') {
        true => Ok(region),
        false => Err(format!("the region {region:?} must have letters, digits and hyphens only, such as us-east-1")),
    }
}

const EXPECTED_URL: &str = "the endpoint of the service that issues keys must be a URL such as https://host:port";

fn checked_url(text: &str) -> std::result::Result<Url, String> {
    match Url::parse(text) {
        Ok(url) if url.has_host() && matches!(url.scheme(), "http" | "https") => Ok(url),
        _ => Err(EXPECTED_URL.to_owned()),
    }
}

/// Returns the keys of an ECS or EKS container, or `None` outside of containers.
fn of_container(variables: &Variables) -> Result<Option<AwsCredentialProvider>> {
    let settings = [
        (AmazonS3ConfigKey::ContainerCredentialsRelativeUri, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        (AmazonS3ConfigKey::ContainerCredentialsFullUri, "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        (AmazonS3ConfigKey::ContainerAuthorizationTokenFile, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
    ];
    let has = |name| variables.get(name).is_some();
    let full = has("AWS_CONTAINER_CREDENTIALS_FULL_URI") && has("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
    if !full && !has("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") {
        return Ok(None);
    }
    let set = settings.into_iter().filter_map(|(key, name)| Some((key, variables.get(name)?)));
    provider(set.fold(builder(), |builder, (key, value)| builder.with_config(key, value))).map(Some)
}

fn of_instance(variables: &Variables) -> Result<AwsCredentialProvider> {
    let builder = builder();
    provider(match variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") {
        Some(endpoint) => builder.with_metadata_endpoint(endpoint.trim_end_matches('/')),
        None => builder,
    })
}

fn builder() -> AmazonS3Builder {
    // A machine answers within milliseconds or has no such service.
    let retry = RetryConfig { max_retries: 2, retry_timeout: Duration::from_secs(10), ..RetryConfig::default() };
    AmazonS3Builder::new().with_bucket_name("-").with_retry(retry).with_http_connector(Transport::default())
}

fn provider(builder: AmazonS3Builder) -> Result<AwsCredentialProvider> {
    builder.build().map(|store| store.credentials().clone()).map_err(refresh::unwrap)
}
