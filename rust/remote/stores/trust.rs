//! Certificates that connections accept, and those that they show.

use crate::error::{Error, Kind, Result};
use crate::options;
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use rustls::client::WantsClientCert;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, ConfigBuilder, DigitallySignedStruct, RootCertStore, SignatureScheme, WantsVerifier};
use rustls_native_certs::{CertificateResult, load_certs_from_paths, load_native_certs};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Options for one place: a file or a directory with certificates of authorities, in place of the system's, or
/// no check of certificates at all.
const OPTIONS: [&str; 3] = ["ca_file", "ca_directory", "allow_invalid_certificates"];
/// Options for one place: files with the certificate that its servers get, and with its private key.
const IDENTITY_OPTIONS: [&str; 2] = ["client_certificate", "client_key"];
/// Variables that name files with further certificates of authorities. `SSL_CERT_FILE` and `SSL_CERT_DIR` replace those
/// of the system instead.
const EXTRA_CA_FILES: [&str; 3] = ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
const SYSTEM_CA_VARIABLES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Configuration of TLS, with the values of the variables that decide about it.
type Known = Option<(Vec<Option<String>>, Arc<ClientConfig>)>;

static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new(Mutex::default);

/// Certificates that the connections to one place accept.
#[derive(Clone, Debug, Default)]
pub enum Trust {
    /// Authorities of the system, and authorities that the environment names.
    #[default]
    Environment,
    /// Those that the options of the place say.
    Place(Arc<ClientConfig>),
}

impl Trust {
    /// Takes the options about certificates out of `settings`, and reads the certificates. Fails with
    /// `invalid-argument` for several of the options, or for a value that does not fit; `io` for certificates that
    /// cannot be read.
    pub fn take_from(settings: &mut BTreeMap<String, String>, url: &str) -> Result<Trust> {
        let given: Vec<(&str, String)> =
            OPTIONS.iter().filter_map(|name| Some((*name, settings.remove(*name)?))).collect();
        let identity = Identity::take_from(settings, url)?;
        let config = match given.as_slice() {
            [] if identity.is_none() => return Ok(Trust::Environment),
            [] => with_verifier(Accepted::Environment(OnceLock::new()), identity)?,
            [("ca_file", path)] => {
                with_roots(authorities(path, load_certs_from_paths(Some(Path::new(path)), None))?, identity)?
            }
            [("ca_directory", path)] => {
                with_roots(authorities(path, load_certs_from_paths(None, Some(Path::new(path))))?, identity)?
            }
            [("allow_invalid_certificates", value)] if value == "false" => {
                with_verifier(Accepted::Environment(OnceLock::new()), identity)?
            }
            [("allow_invalid_certificates", value)] if value == "true" => with_verifier(Accepted::All, identity)?,
            [(name, _)] => {
                let message = format!("the option {name:?} must be true or false");
                return Err(Error::new(Kind::InvalidArgument, message).at(url));
            }
            _ => {
                let message = format!("give only one of the options {}", OPTIONS.join(", "));
                return Err(Error::new(Kind::InvalidArgument, message).at(url));
            }
        };
        Ok(Trust::Place(Arc::new(config)))
    }

    /// Returns the configuration of TLS.
    pub(super) fn config(&self) -> Result<Arc<ClientConfig>> {
        match self {
            Trust::Environment => environment(),
            Trust::Place(config) => Ok(Arc::clone(config)),
        }
    }
}

/// Returns the values of the variables that name certificates.
pub(super) fn variables() -> impl Iterator<Item = Option<String>> {
    SYSTEM_CA_VARIABLES.iter().chain(&EXTRA_CA_FILES).map(|name| options::variable(name))
}

/// Returns the configuration of TLS for places without options, a new one if the variables that name certificates change.
pub(super) fn environment() -> Result<Arc<ClientConfig>> {
    let variables: Vec<_> = variables().collect();
    let mut known = KNOWN.get().lock();
    if let Some((_, config)) = known.as_ref().filter(|(used, _)| *used == variables) {
        return Ok(Arc::clone(config));
    }
    let config = Arc::new(with_verifier(Accepted::Environment(OnceLock::new()), None)?);
    *known = Some((variables, Arc::clone(&config)));
    Ok(config)
}

/// Returns the certificates of the authorities of the environment, or the reason why there are none.
fn authorities_of_environment() -> std::result::Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    let found = load_native_certs();
    for error in &found.errors {
        tracing::info!(%error, "a certificate authority of the system cannot be read");
    }
    store.add_parsable_certificates(found.certs);
    for name in EXTRA_CA_FILES {
        let Some(path) = options::variable(name) else { continue };
        let failed = |error: &dyn fmt::Display| format!("cannot read the certificates of {name}, {path}: {error}");
        for certificate in CertificateDer::pem_file_iter(&path).map_err(|error| failed(&error))? {
            store.add(certificate.map_err(|error| failed(&error))?).map_err(|error| failed(&error))?;
        }
    }
    if !store.is_empty() {
        return Ok(store);
    }
    let given = |name| options::variable(name).map(|path| format!("{name}, {path}"));
    let given: Vec<String> = SYSTEM_CA_VARIABLES.into_iter().filter_map(given).collect();
    if given.is_empty() {
        return Err("this system has no certificate of an authority; install the package ca-certificates".to_owned());
    }
    let why = found.errors.first().map_or_else(|| "there is none".to_owned(), ToString::to_string);
    Err(format!("cannot read the certificates of {}: {why}", given.join(", or of ")))
}

/// Returns the certificates that were found in a file, or in the files of a directory.
fn authorities(path: &str, found: CertificateResult) -> Result<RootCertStore> {
    let failed = |message: String| Error::new(Kind::Io, message).at(path);
    if let Some(error) = found.errors.first() {
        return Err(failed(format!("cannot read the certificates: {error}")));
    }
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(found.certs);
    if store.is_empty() {
        return Err(failed("there is no certificate here; expected certificates of authorities as PEM".to_owned()));
    }
    Ok(store)
}

fn with_roots(store: RootCertStore, identity: Option<Identity>) -> Result<ClientConfig> {
    let (_, versions) = builder()?;
    with_identity(versions.with_root_certificates(store), identity)
}

fn with_verifier(accepted: Accepted, identity: Option<Identity>) -> Result<ClientConfig> {
    let (provider, versions) = builder()?;
    let verifier = Arc::new(Verifier { provider, accepted });
    with_identity(versions.dangerous().with_custom_certificate_verifier(verifier), identity)
}

fn with_identity(
    builder: ConfigBuilder<ClientConfig, WantsClientCert>,
    identity: Option<Identity>,
) -> Result<ClientConfig> {
    let Some(Identity { chain, key, path }) = identity else { return Ok(builder.with_no_client_auth()) };
    builder.with_client_auth_cert(chain, key).map_err(|error| {
        let message = format!("the client certificate and its private key cannot be used together: {error}");
        Error::new(Kind::InvalidArgument, message).at(path)
    })
}

fn builder() -> Result<(Arc<CryptoProvider>, ConfigBuilder<ClientConfig, WantsVerifier>)> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| Error::new(Kind::Internal, format!("TLS: {error}")))?;
    Ok((provider, builder))
}

/// Certificate of the client with its private key.
struct Identity {
    /// The certificate, and certificates of the authorities between it and one that the server knows.
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    /// Path of the certificate, for errors.
    path: String,
}

impl Identity {
    /// Takes the options about the client's certificate out of `settings`, and reads the files. One file may have both.
    fn take_from(settings: &mut BTreeMap<String, String>, url: &str) -> Result<Option<Identity>> {
        let (path, key) = match IDENTITY_OPTIONS.map(|name| settings.remove(name)) {
            [None, None] => return Ok(None),
            [Some(path), key] => (path.clone(), key.unwrap_or(path)),
            [None, Some(_)] => {
                let message = "the option client_key needs the option client_certificate";
                return Err(Error::new(Kind::InvalidArgument, message).at(url));
            }
        };
        let chain = CertificateDer::pem_file_iter(&path).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
        let chain = chain.map_err(|error| {
            Error::new(Kind::Io, format!("cannot read the client certificate as PEM: {error}")).at(&path)
        })?;
        if chain.is_empty() {
            return Err(Error::new(Kind::Io, "there is no certificate here; expected one as PEM").at(&path));
        }
        let key = PrivateKeyDer::from_pem_file(&key).map_err(|error| {
            Error::new(Kind::Io, format!("cannot read the private key of the client certificate as PEM: {error}"))
                .at(&key)
        })?;
        Ok(Some(Identity { chain, key, path }))
    }
}

/// Verifier of servers. The signatures of the handshake are always verified.
#[derive(Debug)]
struct Verifier {
    provider: Arc<CryptoProvider>,
    accepted: Accepted,
}

/// Certificates that a verifier accepts.
#[derive(Debug)]
enum Accepted {
    /// Certificates of the environment. They are read when the first server is verified: that takes milliseconds, and loads
    /// without TLS do not need them.
    Environment(OnceLock<std::result::Result<Arc<WebPkiServerVerifier>, String>>),
    /// All, for a place that is set to `allow_invalid_certificates`. Who answers is then unknown, but the bytes are still
    /// encrypted.
    All,
}

impl Verifier {
    fn load(&self) -> std::result::Result<Arc<WebPkiServerVerifier>, String> {
        let roots = Arc::new(authorities_of_environment()?);
        let built = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&self.provider)).build();
        built.map_err(|error| error.to_string())
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let Accepted::Environment(loaded) = &self.accepted else { return Ok(ServerCertVerified::assertion()) };
        let verifier = loaded.get_or_init(|| self.load()).as_ref();
        let verifier = verifier.map_err(|message| rustls::Error::General(message.clone()))?;
        verifier.verify_server_cert(certificate, intermediates, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
