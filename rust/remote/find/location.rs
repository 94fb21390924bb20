//! Locations: URLs of objects and of prefixes.

use super::repository::Repository;
use crate::error::{Error, Kind, Result};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Service that answers for a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Service {
    /// Server that answers GET requests for ranges: `http`, `https`.
    Http,
    /// S3 and compatible services: `s3`.
    S3,
    /// Google Cloud Storage: `gs`.
    Gcs,
    /// Azure Blob Storage: `az`, `abfss`.
    Azure,
    /// Hugging Face Hub: `hf`.
    Hub,
    /// Redis: `redis`, `rediss`.
    Redis,
}

const SCHEMES: [(&str, Service); 9] = [
    ("http", Service::Http),
    ("https", Service::Http),
    ("s3", Service::S3),
    ("gs", Service::Gcs),
    ("az", Service::Azure),
    ("abfss", Service::Azure),
    ("hf", Service::Hub),
    ("redis", Service::Redis),
    ("rediss", Service::Redis),
];

/// URL of an object or of a prefix, in parts.
///
/// ```
/// use fst::remote::find::location::Location;
/// let location = Location::parse("s3://bucket/llama/model.safetensors")?;
/// assert_eq!((location.host(), location.key()), ("bucket", "llama/model.safetensors"));
/// let signed = Location::parse("https://user:secret@host/m.safetensors?signature=secret")?;
/// assert_eq!(signed.to_string(), "https://host/m.safetensors?...");
/// # Ok::<(), fst::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Location {
    service: Service,
    scheme: &'static str,
    /// User name and password, if any, before the host.
    user: Option<String>,
    /// The repository as its URL names it, for the Hub.
    host: String,
    key: String,
    query: Option<String>,
    repository: Option<Arc<Repository>>,
}

impl Location {
    /// Splits a URL. Fails with `invalid-argument` if the scheme is not built in, or if the URL has no host.
    pub fn parse(url: &str) -> Result<Location> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let known = SCHEMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(scheme));
        let Some(&(scheme, service)) = known else {
            let names: Vec<String> = SCHEMES.iter().map(|(name, _)| format!("{name}://")).collect();
            let message = format!(
                "the scheme {scheme:?} is not built in; give a local path or a URL that begins with file://, {}",
                names.join(", ")
            );
            let shown = Location::split("http", Service::Http, rest).to_string().replacen("http", scheme, 1);
            return Err(Error::new(Kind::InvalidArgument, message).at(shown.trim_start_matches("://")));
        };
        let mut location = Location::split(scheme, service, rest);
        let invalid = |message: &str| Error::new(Kind::InvalidArgument, message).at(location.to_string());
        if rest.chars().any(|character| character.is_control()) {
            return Err(invalid("a URL cannot contain control characters"));
        }
        if location.host.is_empty() {
            return Err(invalid("the URL names no host or bucket"));
        }
        if service == Service::Hub {
            let (repository, path) = Repository::parse(rest).map_err(|message| invalid(&message))?;
            location = location.with_repository(repository, &path);
        }
        Ok(location)
    }

    fn split(scheme: &'static str, service: Service, rest: &str) -> Location {
        // Keys of objects may contain any character. Only URLs of HTTP have queries and fragments.
        let (rest, query) = match service {
            Service::Http => {
                let rest = rest.split_once('#').map_or(rest, |(before, _)| before);
                rest.split_once('?').map_or((rest, None), |(before, query)| (before, Some(query.to_owned())))
            }
            _ => (rest, None),
        };
        let (authority, key) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, host) = match service {
            // In abfss://container@account.dfs.core.windows.net, the part before the @ is the container.
            Service::Azure | Service::Hub => (None, authority),
            _ => authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user.to_owned()), host)),
        };
        Location { service, scheme, user, host: host.to_owned(), key: key.to_owned(), query, repository: None }
    }

    /// Returns the service that answers.
    pub fn service(&self) -> Service {
        self.service
    }

    /// Returns the scheme.
    pub fn scheme(&self) -> &'static str {
        self.scheme
    }

    /// Returns the host with its port, the bucket, the container, or the repository.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns what is before the host: a user name, and a password after a colon. It is secret.
    pub(in crate::remote) fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Returns the path without the slash at its beginning.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns whether the URL has a query, as presigned ones do.
    pub fn has_query(&self) -> bool {
        self.query.is_some()
    }

    /// Returns the query, which may be secret.
    pub(in crate::remote) fn query(&self) -> Option<&str> {
        self.query.as_deref()
    }

    /// Returns whether the files belong to a revision, which do not change. Buckets of the Hub have none.
    pub fn is_at_revision(&self) -> bool {
        self.repository().is_some_and(|repository| !repository.is_bucket())
    }

    /// Returns the repository that a URL of the Hub names.
    pub(in crate::remote) fn repository(&self) -> Option<&Repository> {
        self.repository.as_deref()
    }

    /// Returns the location of another key of the same host, with the same credentials and query.
    #[must_use]
    pub(in crate::remote) fn with_key(&self, key: impl Into<String>) -> Location {
        Location { key: key.into(), ..self.clone() }
    }

    /// Returns the location of a path in another repository of the Hub.
    #[must_use]
    pub(super) fn with_repository(&self, repository: Repository, path: &str) -> Location {
        let (host, key) = (repository.to_string(), path.to_owned());
        Location { host, key, repository: Some(Arc::new(repository)), ..self.clone() }
    }

    /// Returns the last part of the path.
    pub fn file_name(&self) -> &str {
        self.key.rsplit('/').next().unwrap_or_default()
    }

    /// Returns the whole URL, with its secrets. It is for requests only.
    pub fn secret_url(&self) -> String {
        let user = self.user.as_ref().map(|user| format!("{user}@")).unwrap_or_default();
        let query = self.query.as_ref().map(|query| format!("?{query}")).unwrap_or_default();
        format!("{}://{user}{}{query}", self.scheme, self.address())
    }

    /// Returns the host and the key, as they are in the URL.
    pub(in crate::remote) fn address(&self) -> String {
        let Location { host, key, repository, .. } = self;
        match repository {
            Some(_) if key.is_empty() => host.clone(),
            Some(repository) if repository.needs_revision() => format!("{host}@{}/{key}", repository.revision()),
            _ => format!("{host}/{key}"),
        }
    }
}

/// Writes the URL without a password or a query, which may be secret.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.address())?;
        if self.query.is_some() { f.write_str("?...") } else { Ok(()) }
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Returns the URL for a path that would be one with two slashes, such as `s3:/bucket/key`, or the path of `file:/path`.
pub fn with_slashes(path: &str) -> Option<String> {
    let (scheme, rest) = path.split_once(':')?;
    let rest = if scheme == "file" { return Some(rest.to_owned()) } else { rest.trim_start_matches('/') };
    SCHEMES.iter().any(|(name, _)| *name == scheme).then(|| format!("{scheme}://{rest}"))
}

/// Returns whether a path is a URL: letters, digits, `+`, `-` and `.` before `://`.
pub fn is_url(path: &Path) -> bool {
    path.to_str().and_then(|text| text.split_once("://")).is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
    })
}
