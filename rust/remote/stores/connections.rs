//! Connections of one runtime, and the settings with which they are opened.

use super::handover::{Handover, Stream};
use super::host_policy::HostPolicy;
use super::http_error::{HttpResult, refused};
use super::trust::{self, Trust};
use crate::error::Result;
use crate::options;
use crate::os::mutex::Mutex;
use object_store::client::HttpError;
use reqwest::redirect::Policy;
use rustls::ClientConfig;
use std::any::Any;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use tower_layer::layer_fn;

/// Time for a connection to open.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which an unused connection is not used again. Some servers close it soon afterwards.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
pub(super) const USER_AGENT: &str = concat!("fst/", env!("CARGO_PKG_VERSION"));

#[derive(Clone)]
pub struct Client {
    http: Connections,
    /// Connections to places with certificates of their own. Connections to a place without an open object are closed.
    others: Arc<Mutex<Vec<Other>>>,
    /// Connections without HTTP. Each belongs to the credentials with which it was opened.
    idle: Arc<Idle<Arc<dyn Any + Send + Sync>, Box<dyn Any + Send>>>,
    settings: Settings,
}

/// Connections for a configuration of TLS.
type Other = (Weak<ClientConfig>, Connections);

/// Connections for HTTP, all with one configuration of TLS. Clients are created when they are needed.
#[derive(Clone, Default)]
pub(super) struct Connections(Arc<Clients>);

#[derive(Default)]
struct Clients {
    configured: OnceLock<Arc<Reader>>,
    named: OnceLock<Arc<Reader>>,
    redirected: OnceLock<Arc<Reader>>,
    /// The one for requests with a body, during which nothing is received for long.
    uploads: OnceLock<reqwest::Client>,
}

/// Connections for requests without a body.
pub(super) struct Reader {
    /// Client that opens connections. Only requests over a proxy that is told the whole URL run on it.
    pub(super) client: reqwest::Client,
    /// Open connections, each with its scheme, host and port.
    pub(super) idle: Idle<String, Box<dyn Stream>>,
}

impl Client {
    /// Creates a client without open connections. Fails with `invalid-argument` for settings in the environment.
    pub fn new() -> Result<Client> {
        let settings = Settings::from_env()?;
        Ok(Client { http: Connections::default(), others: Arc::default(), idle: Arc::default(), settings })
    }

    /// Returns the connections to places that trust these certificates.
    pub(super) fn connections(&self, trust: &Trust) -> Connections {
        let Trust::Place(tls) = trust else { return self.http.clone() };
        let mut others = self.others.lock();
        if let Some((_, known)) = others.iter().find(|(known, _)| known.as_ptr() == Arc::as_ptr(tls)) {
            return known.clone();
        }
        let new = Connections::default();
        others.retain(|(known, _)| known.strong_count() > 0);
        others.push((Arc::downgrade(tls), new.clone()));
        new
    }

    pub(super) fn idle(&self) -> &Idle<Arc<dyn Any + Send + Sync>, Box<dyn Any + Send>> {
        &self.idle
    }

    /// Returns the time in which some bytes arrive, after which a request is repeated.
    pub(super) fn stall(&self) -> Duration {
        self.settings.stall
    }

    pub fn is_current(&self) -> bool {
        Settings::from_env().is_ok_and(|settings| settings == self.settings)
    }
}

impl Connections {
    pub(super) fn reader(&self, policy: HostPolicy, trust: &Trust, stall: Duration) -> HttpResult<&Arc<Reader>> {
        let slot = match policy {
            HostPolicy::Configured => &self.0.configured,
            HostPolicy::Named => &self.0.named,
            HostPolicy::Redirected => &self.0.redirected,
        };
        kept(slot, || {
            let builder = builder(trust)?.dns_resolver(policy).read_timeout(stall).connector_layer(layer_fn(Handover));
            Ok(Arc::new(Reader { client: built(builder)?, idle: Idle::default() }))
        })
    }

    /// Returns the client for requests with a body. Nothing may arrive for long while a body is sent, but the other side
    /// acknowledges its bytes within the time of a stall.
    pub(super) fn uploads(&self, trust: &Trust, stall: Duration) -> HttpResult<&reqwest::Client> {
        kept(&self.0.uploads, || built(builder(trust)?.dns_resolver(HostPolicy::Configured).tcp_user_timeout(stall)))
    }
}

/// Open connections that no request uses, each with what it was opened for.
pub(super) struct Idle<K, C>(Mutex<Vec<Unused<K, C>>>);

struct Unused<K, C> {
    key: K,
    since: Instant,
    connection: C,
}

impl<K, C> Default for Idle<K, C> {
    fn default() -> Self {
        Idle(Mutex::default())
    }
}

impl<K, C> Idle<K, C> {
    pub(super) fn take(&self, is_wanted: impl Fn(&K) -> bool) -> Option<C> {
        let mut connections = self.0.lock();
        connections.retain(|unused| unused.since.elapsed() < IDLE_TIMEOUT);
        let found = connections.iter().position(|unused| is_wanted(&unused.key))?;
        Some(connections.swap_remove(found).connection)
    }

    pub(super) fn keep(&self, key: K, connection: C) {
        self.0.lock().push(Unused { key, since: Instant::now(), connection });
    }
}

/// Returns the value of a slot, a new one if there is none.
fn kept<T>(slot: &OnceLock<T>, new: impl FnOnce() -> HttpResult<T>) -> HttpResult<&T> {
    if let Some(known) = slot.get() {
        return Ok(known);
    }
    let new = new()?;
    Ok(slot.get_or_init(|| new))
}

fn built(builder: reqwest::ClientBuilder) -> HttpResult<reqwest::Client> {
    builder.build().map_err(|error| without_client(&error))
}

pub(super) fn without_client(error: &reqwest::Error) -> HttpError {
    refused(format!("cannot create a client: {error}"))
}

fn builder(trust: &Trust) -> HttpResult<reqwest::ClientBuilder> {
    let tls = trust.config().map_err(|error| refused(error.to_string()))?;
    let builder = reqwest::Client::builder();
    // reqwest uses the proxy for IP addresses then.
    let builder = if excludes_all_hosts() { builder.no_proxy() } else { builder };
    Ok(builder
        .tls_backend_preconfigured(ClientConfig::clone(&tls))
        .http1_only()
        .redirect(Policy::none())
        .retry(reqwest::retry::never())
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(IDLE_TIMEOUT)
        .user_agent(USER_AGENT))
}

const PROXY_VARIABLES: [&str; 8] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"];

/// Settings on which a connection depends. Connections that were opened with other settings are not used again.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Settings {
    /// Time with too few bytes after which a request is repeated.
    stall: Duration,
    variables: Vec<Option<String>>,
}

impl Settings {
    /// Reads the settings. Fails with `invalid-argument`, with the variable and its allowed values.
    fn from_env() -> Result<Settings> {
        let proxies = PROXY_VARIABLES.iter().map(|name| options::variable(name));
        let variables = trust::variables().chain(proxies).collect();
        Ok(Settings { stall: options::stall_timeout_from_env()?, variables })
    }
}

/// Returns whether `NO_PROXY` is `*`, which stands for all hosts.
fn excludes_all_hosts() -> bool {
    ["NO_PROXY", "no_proxy"].iter().any(|name| options::variable(name).is_some_and(|hosts| hosts.trim() == "*"))
}
