//! Settings of connections, from the environment.

use crate::error::{Error, Kind, Result};
use crate::options;
use crate::os::per_process::PerProcess;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Variables that name files with further certificates of authorities. `SSL_CERT_FILE` and `SSL_CERT_DIR` replace those
/// of the system instead.
const EXTRA_CA_FILES: [&str; 3] = ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
const SYSTEM_CA_VARIABLES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];
const PROXY_VARIABLES: [&str; 8] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"];

/// Settings on which a connection depends. Connections that were opened with other settings are not used again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Time without a byte after which a request is repeated.
    pub stall: Duration,
    variables: Vec<Option<String>>,
}

/// Authorities, with the variables that name them.
type Roots = Option<(Vec<Option<String>>, Arc<ClientConfig>)>;

static ROOTS: PerProcess<Mutex<Roots>> = PerProcess::new(Mutex::default);

impl Settings {
    /// Reads the settings.
    ///
    /// # Errors
    /// `invalid-argument`, with the variable and its allowed values.
    pub fn from_env() -> Result<Settings> {
        let proxies = PROXY_VARIABLES.iter().map(|name| options::variable(name));
        let variables = ca_variables().chain(proxies).collect();
        Ok(Settings { stall: options::stall_timeout_from_env()?, variables })
    }
}

/// Returns whether `NO_PROXY` is `*`, which stands for all hosts.
pub fn excludes_all_hosts() -> bool {
    ["NO_PROXY", "no_proxy"].iter().any(|name| options::variable(name).is_some_and(|hosts| hosts.trim() == "*"))
}

/// Returns the values of the variables that name certificates.
fn ca_variables() -> impl Iterator<Item = Option<String>> {
    SYSTEM_CA_VARIABLES.iter().chain(&EXTRA_CA_FILES).map(|name| options::variable(name))
}

/// Returns the configuration of TLS. The certificates are read at the first call, and again if their variables change.
///
/// # Errors
/// `io` or `file-not-found` for a file of certificates.
pub fn tls() -> Result<Arc<ClientConfig>> {
    let variables: Vec<_> = ca_variables().collect();
    let mut roots = ROOTS.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, config)) = roots.as_ref().filter(|(known, _)| *known == variables) {
        return Ok(Arc::clone(config));
    }
    let config = Arc::new(read_roots()?);
    *roots = Some((variables, Arc::clone(&config)));
    Ok(config)
}

fn read_roots() -> Result<ClientConfig> {
    let mut store = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::info!(%error, "a certificate authority of the system cannot be read");
    }
    store.add_parsable_certificates(found.certs);
    for name in EXTRA_CA_FILES {
        let Some(path) = options::variable(name) else { continue };
        let failed = |error: String| {
            Error::new(Kind::Io, format!("cannot read the certificates that {name} names: {error}")).at(&path)
        };
        let certificates = CertificateDer::pem_file_iter(&path).map_err(|error| failed(error.to_string()))?;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| failed(error.to_string()))?;
            store.add(certificate).map_err(|error| failed(error.to_string()))?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let versions = versions.map_err(|error| Error::new(Kind::Internal, format!("TLS: {error}")))?;
    Ok(versions.with_root_certificates(store).with_no_client_auth())
}
