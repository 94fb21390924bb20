//! Buckets of S3, Google Cloud Storage and Azure. `object_store` signs the requests and renews tokens.

use super::refusal::Refusal;
use super::service::{self, Codes};
use super::store_options::unknown;
use super::transport::Transport;
use super::{Answer, Attempt, Failure, FailureClass, Store, Uploads};
use crate::error::{Error, Kind, Result};
use crate::options;
use crate::os::mutex::Mutex;
use crate::remote::credentials::aws_profile::Profile;
use crate::remote::find::listing::{self, Keys};
use crate::remote::find::location::{Location, Service};
use crate::remote::find::name::Name;
use crate::remote::find::version::Version;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as Key;
use object_store::{
    Attribute, ClientOptions, GetOptions, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig,
    StaticCredentialProvider,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) struct Bucket {
    location: Location,
    settings: BTreeMap<String, String>,
    transport: Transport,
    opened: Mutex<Arc<Opened>>,
}

/// Bucket with the keys and the region of its requests.
struct Opened {
    store: Arc<dyn BucketStore>,
    /// Region that the service has named. Otherwise the settings say it.
    region: Option<String>,
    /// Whether it was opened because the keys had expired.
    is_renewed: bool,
    has_answered: AtomicBool,
}

/// Interface of a bucket for whole objects, for objects in parts, and for lists of objects.
trait BucketStore: ObjectStore + MultipartStore + PaginatedListStore {}

impl<T: ObjectStore + MultipartStore + PaginatedListStore> BucketStore for T {}

impl Bucket {
    /// Opens the bucket of a URL. Sends no request. Fails with `invalid-argument` for options that do not fit.
    pub(super) fn open(
        location: &Location,
        settings: &BTreeMap<String, String>,
        transport: Transport,
    ) -> Result<Bucket> {
        let opened = Opened::new(location, settings, transport.clone(), None)?;
        let opened = Mutex::new(Arc::new(opened));
        Ok(Bucket { location: location.clone(), settings: settings.clone(), transport, opened })
    }

    fn opened(&self) -> Arc<Opened> {
        Arc::clone(&self.opened.lock())
    }

    /// Notes how a request ended, and explains its failure. If the service names another region, or the keys have expired,
    /// the bucket is opened again, once, and the request may be repeated.
    fn ended<T>(
        &self,
        opened: &Arc<Opened>,
        result: object_store::Result<T>,
        explain: impl FnOnce(&Bucket, &object_store::Error) -> Failure,
    ) -> Attempt<T> {
        match result {
            Ok(answer) => {
                opened.has_answered.store(true, Ordering::Relaxed);
                Ok(answer)
            }
            Err(error) => Err(self.reopened(opened, &error).unwrap_or_else(|| explain(self, &error))),
        }
    }

    fn reopened(&self, opened: &Arc<Opened>, error: &object_store::Error) -> Option<Failure> {
        let refusal = Refusal::of(error)?;
        let has_expired = refusal.has_expired();
        let message = match &refusal.region {
            Some(region) if opened.region.is_none() => format!("the bucket is in the region {region}"),
            None if has_expired && (!opened.is_renewed || opened.has_answered.load(Ordering::Relaxed)) => {
                "the keys have expired".to_owned()
            }
            _ => return None,
        };
        let mut current = self.opened.lock();
        // Another request may have done so.
        if Arc::ptr_eq(&current, opened) {
            tracing::info!(url = %self.location, why = message, "the bucket is opened again");
            let region = refusal.region.or_else(|| opened.region.clone());
            match Opened::new(&self.location, &self.settings, self.transport.clone(), region) {
                Ok(new) => *current = Arc::new(Opened { is_renewed: has_expired, ..new }),
                Err(error) => return Some(Failure::of_keys(&error)),
            }
        }
        Some(Failure::new(FailureClass::Transient, message))
    }
}

/// Checks that the key of an object or of a prefix arrives as it is. `object_store` removes slashes at both ends, and Azure
/// reads a backslash as a slash.
pub(super) fn check_key(location: &Location) -> Result<()> {
    let key = location.key();
    let why = match Name::parse(key.strip_suffix('/').unwrap_or(key)) {
        _ if key.is_empty() => return Ok(()),
        Ok(_) if location.service() == Service::Azure && key.contains('\\') => "it has a backslash",
        Ok(_) => return Ok(()),
        Err(why) => why,
    };
    let parts: Vec<&str> = key.split(['/', '\\']).filter(|part| !matches!(*part, "" | "." | "..")).collect();
    let meant = location.with_key(parts.join("/"));
    let message = format!(
        "the key {key:?} would reach the service as another one: {why}; write the key that is meant, such as {meant}"
    );
    Err(Error::new(Kind::InvalidArgument, message).at(location.to_string()))
}

impl Opened {
    fn new(
        location: &Location,
        settings: &BTreeMap<String, String>,
        transport: Transport,
        region: Option<String>,
    ) -> Result<Opened> {
        let url = format!("{}://{}", location.scheme(), location.host());
        let store: Arc<dyn BucketStore> = match location.service() {
            Service::S3 => Arc::new(s3(location, settings, transport, region.as_deref(), &url)?),
            Service::Gcs => Arc::new(gcs(location, settings, transport, &url)?),
            Service::Azure => Arc::new(azure(settings, transport, &url)?),
            Service::Http | Service::Hub | Service::Redis => {
                return Err(Error::new(Kind::Internal, format!("{url} is not a bucket")));
            }
        };
        Ok(Opened { store, region, is_renewed: false, has_answered: AtomicBool::new(false) })
    }
}

/// Builds a store with these settings. Requests are repeated in [`crate::remote::transfer::retry`], which counts them.
macro_rules! build {
    ($builder:expr, $transport:expr, $url:expr) => {
        $builder
            .with_client_options(ClientOptions::new().with_allow_http(true))
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .with_http_connector(Codes($transport))
            .build()
            .map_err(|error| Error::new(Kind::InvalidArgument, format!("the store cannot be opened: {error}")).at($url))
    };
}

/// Returns the options of a service that the environment sets, in variables that begin with `prefix`.
fn from_environment<K: FromStr>(prefix: &str) -> impl Iterator<Item = (K, String)> {
    let parse = |(name, value): (String, String)| Some((name.to_ascii_lowercase().parse().ok()?, value));
    options::variables_with_prefix(prefix).into_iter().filter_map(parse)
}

/// Returns the options of a service that are set for a place.
fn from_settings<K: FromStr>(settings: &BTreeMap<String, String>, url: &str) -> Result<Vec<(K, String)>> {
    let parse = |(name, value): (&String, &String)| {
        let key = name.parse().map_err(|_| unknown(url, name, "docs/remote.md lists the options of each service"));
        Ok((key?, value.clone()))
    };
    settings.iter().map(parse).collect()
}

fn s3(
    location: &Location,
    settings: &BTreeMap<String, String>,
    transport: Transport,
    region: Option<&str>,
    url: &str,
) -> Result<object_store::aws::AmazonS3> {
    let is_set = |key: AmazonS3ConfigKey, builder: &AmazonS3Builder| builder.get_config_value(&key).is_some();
    // What is set for the bucket goes before the environment, and that before the profile.
    let set = from_environment("AWS_").chain(from_settings(settings, url)?);
    let mut builder = set.fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value));
    // object_store panics if these do not fit a header.
    for key in [AmazonS3ConfigKey::AccessKeyId, AmazonS3ConfigKey::Token, AmazonS3ConfigKey::Region] {
        let value = builder.get_config_value(&key).unwrap_or_default();
        if !value.chars().all(|c| c.is_ascii_graphic()) {
            let message = format!("{} has characters that cannot be sent; check it", key.as_ref());
            return Err(Error::new(Kind::InvalidArgument, message).at(url));
        }
    }
    let has_keys = is_set(AmazonS3ConfigKey::AccessKeyId, &builder)
        || is_set(AmazonS3ConfigKey::WebIdentityTokenFile, &builder)
        || builder.get_config_value(&AmazonS3ConfigKey::SkipSignature).is_some_and(|value| value == "true");
    let (home, variables) = (options::variable("HOME"), options::variables_with_prefix("AWS_").into_iter().collect());
    if let Some(profile) = Profile::load(variables, home.as_deref().map(Path::new))? {
        if let Some(region) = profile.region().filter(|_| !is_set(AmazonS3ConfigKey::Region, &builder)) {
            builder = builder.with_region(region);
        }
        if let Some(endpoint) = profile.endpoint().filter(|_| endpoint_of(&builder).is_none()) {
            builder = builder.with_endpoint(endpoint);
        }
        if profile.is_path_style() {
            builder = builder.with_virtual_hosted_style_request(false);
        }
        if !has_keys && let Some(credentials) = profile.credentials()? {
            builder = builder.with_credentials(credentials);
        }
    }
    if let Some(region) = region {
        builder = builder.with_region(region);
    }
    build!(with_rules_of_aws(builder, location.host()).with_bucket_name(location.host()), transport, url)
}

fn endpoint_of(builder: &AmazonS3Builder) -> Option<String> {
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::S3Endpoint);
    endpoint.or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint))
}

/// Applies rules of AWS, which other services with the interface of S3 do not have.
///
/// - Objects have checksums, without which a bucket with Object Lock takes none. Some other services refuse requests with
///   checksums.
/// - Aliases of access points and directory buckets (S3 Express) are names of hosts, and are not found by path. An endpoint
///   that is set stays as it is.
pub fn with_rules_of_aws(builder: AmazonS3Builder, bucket: &str) -> AmazonS3Builder {
    let endpoint = endpoint_of(&builder);
    if endpoint.as_ref().is_some_and(|endpoint| !endpoint.contains(".amazonaws.com")) {
        return builder;
    }
    let is_true = |key| builder.get_config_value(&key).is_some_and(|value| value == "true");
    let is_unsigned = is_true(AmazonS3ConfigKey::UnsignedPayload) || is_true(AmazonS3ConfigKey::SkipSignature);
    let has_checksum = builder.get_config_value(&AmazonS3ConfigKey::Checksum).is_some();
    let builder = match (has_checksum, is_unsigned) {
        (true, _) => builder,
        // The signature needs this digest anyway.
        (false, false) => builder.with_checksum_algorithm(Checksum::SHA256),
        (false, true) => builder.with_checksum_algorithm(Checksum::CRC64NVME),
    };
    let ends_with = |endings: &[&str]| endings.iter().any(|ending| bucket.ends_with(ending));
    match () {
        () if endpoint.is_some() => builder,
        () if ends_with(&["--x-s3", "--xa-s3"]) => builder.with_s3_express(true),
        () if ends_with(&["-s3alias", "--ol-s3"]) => builder.with_virtual_hosted_style_request(true),
        () => builder,
    }
}

fn gcs(
    location: &Location,
    settings: &BTreeMap<String, String>,
    transport: Transport,
    url: &str,
) -> Result<object_store::gcp::GoogleCloudStorage> {
    let mut builder = GoogleCloudStorageBuilder::new();
    for (key, value) in from_environment("GOOGLE_") {
        builder = builder.with_config(key, value);
    }
    // Google's own libraries read this variable, too.
    if let Some(emulator) = options::variable("STORAGE_EMULATOR_HOST") {
        let base = if emulator.contains("://") { emulator } else { format!("http://{emulator}") };
        builder = builder.with_base_url(&base).with_skip_signature(true);
    }
    for (key, value) in from_settings(settings, url)? {
        builder = builder.with_config(key, value);
    }
    if builder.get_config_value(&GoogleConfigKey::SkipSignature).as_deref() == Some("true") {
        // The option is for reads only. The transport drops an empty token.
        let unsigned = GcpCredential { bearer: String::new() };
        builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(unsigned)));
    }
    build!(builder.with_bucket_name(location.host()), transport, url)
}

fn azure(
    settings: &BTreeMap<String, String>,
    transport: Transport,
    url: &str,
) -> Result<object_store::azure::MicrosoftAzure> {
    let mut builder = MicrosoftAzureBuilder::new();
    if let Some(text) = options::variable("AZURE_STORAGE_CONNECTION_STRING") {
        builder = with_connection_string(builder, &text);
    }
    // Set where Azure runs programs with a managed identity outside virtual machines.
    if let Some(endpoint) = options::variable("IDENTITY_ENDPOINT") {
        builder = builder.with_msi_endpoint(endpoint);
    }
    let set = from_environment("AZURE_").chain(from_settings(settings, url)?);
    let builder = set.fold(builder, |builder, (key, value)| builder.with_config(key, value));
    let has_account = builder.get_config_value(&AzureConfigKey::AccountName).is_some();
    build!(builder.with_url(url), transport, url).map_err(|error| match has_account {
        true => error,
        false => error.note("set AZURE_STORAGE_ACCOUNT_NAME, or account_name with fst.storage.configure"),
    })
}

/// Applies a connection string of Azure: `AccountName=...;AccountKey=...;BlobEndpoint=...`.
fn with_connection_string(mut builder: MicrosoftAzureBuilder, text: &str) -> MicrosoftAzureBuilder {
    for (name, value) in text.split(';').filter_map(|part| part.split_once('=')) {
        builder = match name.trim() {
            "AccountName" => builder.with_account(value),
            "AccountKey" => builder.with_access_key(value),
            "BlobEndpoint" => builder.with_endpoint(value.trim_end_matches('/').to_owned()),
            "SharedAccessSignature" => builder.with_config(AzureConfigKey::SasKey, value),
            _ => builder,
        };
    }
    builder
}

#[async_trait]
impl Store for Bucket {
    async fn get(&self, key: &str, range: Range<u64>, version: Option<&Version>) -> Attempt<Answer> {
        let path = self.path_of(key)?;
        let options = GetOptions {
            range: Some(range.clone().into()),
            if_match: version.and_then(|version| version.etag.clone()),
            // A version needs further permissions: s3:GetObjectVersion, or a signature of Azure for that version.
            version: version.filter(|version| !version.has_strong_etag()).and_then(|version| version.id.clone()),
            ..GetOptions::default()
        };
        let is_of_version = options.version.is_some();
        let opened = self.opened();
        let result = match opened.store.get_opts(&path, options).await {
            Err(object_store::Error::NotFound { .. }) if is_of_version => {
                return Err(Failure::changed(
                    "this version of the object is gone: the object changed while it was loaded",
                ));
            }
            Err(error) if Refusal::of(&error).is_some_and(|refusal| refusal.status == Some(416)) => {
                return outside(&range, Refusal::of(&error).and_then(|refusal| refusal.length));
            }
            result => self.ended(&opened, result, Bucket::failure_of)?,
        };
        let encoding = result.attributes.get(&Attribute::ContentEncoding).map(|value| value.as_ref());
        if let Some(encoding) = encoding.filter(|encoding| !matches!(*encoding, "identity" | "aws-chunked" | "")) {
            let message = format!("the object is stored with the content encoding {encoding:?}; store it without one");
            return Err(Failure::new(FailureClass::Permanent, message));
        }
        let version = Version {
            etag: result.meta.e_tag.clone(),
            id: result.meta.version.clone(),
            modified: Some(result.meta.last_modified.to_rfc3339()),
        };
        let (length, range) = (result.meta.size, result.range.clone());
        let service = self.location.service();
        let unreceived = result.extensions.get().cloned();
        let body = result.into_stream().map_err(move |error| service::failure_of(&error, service)).boxed();
        Ok(Answer { length: Some(length), version, range, body, unreceived })
    }

    async fn list(&self, directory: &str) -> Attempt<Option<Vec<Name>>> {
        let prefix = Some(listing::prefix_of(directory)).filter(|prefix| !prefix.is_empty());
        let page = |page_token| async {
            let delimiter = Some("/".into());
            let options = PaginatedListOptions { delimiter, page_token, ..PaginatedListOptions::default() };
            let opened = self.opened();
            let page = opened.store.list_paginated(prefix.as_deref(), options).await;
            let mut page = self.ended(&opened, page, Bucket::failure_of)?;
            let keys = page.result.extensions.remove().map_or(Vec::new(), |Keys(keys)| keys);
            Ok((keys, page.page_token))
        };
        listing::names(directory, page).await.map(Some)
    }

    fn uploads(&self) -> Option<&dyn Uploads> {
        Some(self)
    }
}

#[async_trait]
impl Uploads for Bucket {
    async fn put(&self, key: &str, bytes: Bytes) -> Attempt<()> {
        let opened = self.opened();
        let put = opened.store.put(&self.path_of(key)?, PutPayload::from(bytes)).await;
        self.ended(&opened, put, Bucket::refused).map(|_| ())
    }

    async fn begin(&self, key: &str, _: Option<u64>) -> Attempt<String> {
        let opened = self.opened();
        let begun = opened.store.create_multipart(&self.path_of(key)?).await;
        self.ended(&opened, begun, Bucket::refused)
    }

    async fn put_part(&self, key: &str, id: &str, index: usize, _: u64, bytes: Bytes) -> Attempt<String> {
        let opened = self.opened();
        let sent = opened.store.put_part(&self.path_of(key)?, &id.to_owned(), index, PutPayload::from(bytes)).await;
        self.ended(&opened, sent, Bucket::refused).map(|part| part.content_id)
    }

    async fn complete(&self, key: &str, id: &str, parts: &[String]) -> Attempt<()> {
        let parts = parts.iter().map(|part| PartId { content_id: part.clone() }).collect();
        let opened = self.opened();
        let completed = opened.store.complete_multipart(&self.path_of(key)?, &id.to_owned(), parts).await;
        self.ended(&opened, completed, Bucket::refused).map(|_| ())
    }

    async fn abort(&self, key: &str, id: &str) -> Attempt<()> {
        let opened = self.opened();
        let aborted = opened.store.abort_multipart(&self.path_of(key)?, &id.to_owned()).await;
        self.ended(&opened, aborted, Bucket::refused)
    }

    async fn remove(&self, key: &str) -> Attempt<()> {
        let opened = self.opened();
        match opened.store.delete(&self.path_of(key)?).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            removed => self.ended(&opened, removed, Bucket::refused),
        }
    }
}

impl Bucket {
    fn path_of(&self, key: &str) -> Attempt<Key> {
        let exact = Key::parse(key).ok().filter(|path| path.as_ref() == key);
        exact.ok_or_else(|| Failure::new(FailureClass::Invalid, "the service's client would change this key"))
    }

    /// Returns the failure of a request that stores an object.
    fn refused(&self, error: &object_store::Error) -> Failure {
        let Some(refusal) = Refusal::of(error) else { return self.failure_of(error) };
        let (codes, advice) = (refusal.codes(), refusal.advice(""));
        match refusal.status {
            Some(404) => Failure::no_upload(&codes),
            Some(409) => {
                let message = format!("another request changes the object or the bucket ({codes}){advice}");
                Failure::new(FailureClass::Transient, message)
            }
            Some(412) => {
                let message =
                    format!("the service does not allow that the object is replaced ({codes}); it may be locked");
                Failure::new(FailureClass::Permanent, message)
            }
            _ => self.failure_of(error),
        }
    }

    fn failure_of(&self, error: &object_store::Error) -> Failure {
        service::failure_of(error, self.location.service())
    }
}

/// Returns the answer for an object without bytes, which has no range, or the failure of a range outside the object.
fn outside(range: &Range<u64>, length: Option<u64>) -> Attempt<Answer> {
    match length {
        _ if range.start > 0 => Err(Failure::changed("the object became shorter while it was loaded (status 416)")),
        Some(length) if length > 0 => Err(Failure::no_range(length)),
        _ => {
            let body = futures_util::stream::empty().boxed();
            Ok(Answer { length: Some(0), version: Version::default(), range: 0..0, body, unreceived: None })
        }
    }
}
