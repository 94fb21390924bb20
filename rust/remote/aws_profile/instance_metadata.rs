//! Keys that the machine issues to its programs, through the providers of `object_store`.

use super::refresh;
use super::variables::Variables;
use crate::error::Result;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredentialProvider};
use object_store::client::{HttpClient, HttpConnector};
use object_store::{ClientOptions, RetryConfig};
use std::time::Duration;

/// Returns the keys of an ECS or EKS container, or `None` outside of containers.
pub(super) fn of_container(variables: &Variables, http: HttpClient) -> Result<Option<AwsCredentialProvider>> {
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
    provider(set.fold(builder(http), |builder, (key, value)| builder.with_config(key, value))).map(Some)
}

/// Returns the keys of the role of an EC2 instance.
pub(super) fn of_instance(variables: &Variables, http: HttpClient) -> Result<AwsCredentialProvider> {
    let builder = builder(http);
    provider(match variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") {
        Some(endpoint) => builder.with_metadata_endpoint(endpoint.trim_end_matches('/')),
        None => builder,
    })
}

fn builder(http: HttpClient) -> AmazonS3Builder {
    // A machine answers within milliseconds or has no such service.
    let retry = RetryConfig { max_retries: 2, retry_timeout: Duration::from_secs(10), ..RetryConfig::default() };
    AmazonS3Builder::new().with_bucket_name("-").with_retry(retry).with_http_connector(Connector(http))
}

fn provider(builder: AmazonS3Builder) -> Result<AwsCredentialProvider> {
    builder.build().map(|store| store.credentials().clone()).map_err(refresh::unwrap)
}

/// Passes the client of the profile to `object_store`.
#[derive(Debug)]
struct Connector(HttpClient);

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(self.0.clone())
    }
}
