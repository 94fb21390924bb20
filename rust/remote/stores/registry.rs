//! Stores of the process, one for each host, bucket or repository, which keep their tokens between loads.

use super::Store;
use super::bucket::{self, Bucket};
use super::host_policy::HostPolicy;
use super::http::HttpStore;
use super::hub::HubStore;
use super::redis::Redis;
use super::store_options;
use super::transport::Transport;
use super::trust::Trust;
use crate::error::{Error, Kind, Result};
use crate::options;
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use crate::remote::find::location::{Location, Service};
use http::header::{self, HeaderMap, HeaderValue};
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Variables that decide about buckets begin with these.
const PREFIXES: [&str; 6] = ["AWS_", "GOOGLE_", "AZURE_", "HF_", "STORAGE_EMULATOR_HOST", "REDISCLI_AUTH"];
/// Other variables that say where credentials are.
const PLACES_OF_CREDENTIALS: [&str; 3] = ["HOME", "XDG_CACHE_HOME", "IDENTITY_ENDPOINT"];

/// Store with the digest of the settings with which it was opened.
type Known = HashMap<String, (u64, Arc<dyn Store>)>;

static STORES: PerProcess<Mutex<Known>> = PerProcess::new(Mutex::default);

/// Forgets the stores with their tokens.
pub fn release() {
    STORES.get().lock().clear();
}

/// Returns the store of a location, and the key of the location there. Fails with `invalid-argument` for options or
/// variables that do not fit.
pub fn store_of(location: &Location) -> Result<(Arc<dyn Store>, String)> {
    let url = location.to_string();
    let mut settings = store_options::options_of(location);
    let key = match location.service() {
        Service::Http => location.secret_url(),
        Service::Hub | Service::Redis => location.key().to_owned(),
        Service::S3 | Service::Gcs | Service::Azure => {
            bucket::check_key(location)?;
            location.key().to_owned()
        }
    };
    let name = format!("{}://{}", location.scheme(), location.host());
    let digest = digest(location, &settings);
    if let Some((known, store)) = STORES.get().lock().get(&name)
        && *known == digest
    {
        return Ok((Arc::clone(store), key));
    }
    let trust = Trust::take_from(&mut settings, &url)?;
    let transport = Transport::new(trust.clone());
    let store: Arc<dyn Store> = match location.service() {
        Service::Http => {
            let transport = transport.within(HostPolicy::Named);
            Arc::new(HttpStore::new(http_headers(&settings, &url)?, transport))
        }
        Service::Hub => Arc::new(HubStore::open(location, &settings, transport)?),
        Service::S3 | Service::Gcs | Service::Azure => Arc::new(Bucket::open(location, &settings, transport)?),
        Service::Redis => Arc::new(Redis::open(location, &settings, trust)?),
    };
    STORES.get().lock().insert(name, (digest, Arc::clone(&store)));
    Ok((store, key))
}

/// Returns the settings that decide which server answers for a URL.
pub fn endpoints(location: &Location) -> Vec<String> {
    let names_server =
        |name: &str| ["ENDPOINT", "EMULATOR"].iter().any(|part| name.to_ascii_uppercase().contains(part));
    let set = store_options::options_of(location).into_iter();
    let variables = PREFIXES.iter().flat_map(|prefix| options::variables_with_prefix(prefix));
    set.chain(variables).filter(|(name, _)| names_server(name)).map(|(name, value)| format!("{name}={value}")).collect()
}

fn digest(location: &Location, settings: &BTreeMap<String, String>) -> u64 {
    let mut hasher = DefaultHasher::new();
    location.user().hash(&mut hasher);
    settings.hash(&mut hasher);
    for prefix in PREFIXES {
        options::variables_with_prefix(prefix).hash(&mut hasher);
    }
    for name in PLACES_OF_CREDENTIALS {
        options::variable(name).hash(&mut hasher);
    }
    hasher.finish()
}

/// Returns the headers that are set for a server: `token`, or `header.NAME`.
fn http_headers(settings: &BTreeMap<String, String>, url: &str) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in settings {
        let (header, value) = match name.strip_prefix("header.") {
            Some(header) => (header.parse().ok(), value.clone()),
            None if name == "token" => (Some(header::AUTHORIZATION), format!("Bearer {value}")),
            None => return Err(store_options::unknown(url, name, "the options are token and header.NAME")),
        };
        let invalid = || Error::new(Kind::InvalidArgument, format!("{name:?} is no valid header")).at(url);
        let mut value = HeaderValue::from_str(&value).map_err(|_| invalid())?;
        value.set_sensitive(true);
        headers.insert(header.ok_or_else(invalid)?, value);
    }
    Ok(headers)
}
