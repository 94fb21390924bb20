//! Keys that the machine issues to its programs, through the providers of `object_store`.

use super::{Variables, refresh};
use crate::error::Result;
use crate::remote::transport::Transport;
use object_store::RetryConfig;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredentialProvider};
use std::time::Duration;

/// Returns the keys of an ECS or EKS container, or `None` outside of containers.
pub(super) fn of_container(variables: &Variables) -> Result<Option<AwsCredentialProvider>> {
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

pub(super) fn of_instance(variables: &Variables) -> Result<AwsCredentialProvider> {
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
