//! URLs below a prefix. The names are encoded, and the URL is compared with the prefix once it is parsed.

use super::location::{Location, Service};
use super::name::{Name, encode};
use crate::error::{Error, Kind, Result};
use crate::remote::stores::{Attempt, Failure, FailureClass};
use reqwest::Url;

impl Location {
    /// Returns the location of a file below this prefix. Fails with `invalid-argument` if a server would read the URL
    /// as one outside the prefix.
    pub fn child(&self, name: &Name) -> Result<Location> {
        let slash = if self.key().is_empty() || self.key().ends_with('/') { "" } else { "/" };
        let prefix = self.with_key(format!("{}{slash}", self.key()));
        prefix.join(prefix.key(), name)
    }

    /// Returns the location of a file beside this one.
    pub fn sibling(&self, name: &Name) -> Result<Location> {
        let directory = self.key().rfind('/').and_then(|slash| self.key().get(..=slash));
        self.join(directory.unwrap_or_default(), name)
    }

    fn join(&self, directory: &str, name: &Name) -> Result<Location> {
        // Keys of stores and paths in repositories are no URLs.
        if self.service() != Service::Http {
            return Ok(self.with_key(format!("{directory}{}", name.as_str())));
        }
        let encoded = name.encoded();
        let location = self.with_key(format!("{directory}{encoded}"));
        let parse = |location: &Location| Url::parse(&location.secret_url()).ok();
        let is_below = parse(self)
            .and_then(|own| own.join(".").ok())
            .zip(parse(&location))
            .is_some_and(|(base, url)| path_below(&base, &url) == Some(&encoded));
        let outside = || {
            let message = format!("{encoded:?} would be outside the directory of this URL; write the URL without `\\`");
            Error::new(Kind::InvalidArgument, message).at(self.to_string())
        };
        is_below.then_some(location).ok_or_else(outside)
    }
}

/// Returns the URL whose path has these parts below a base. Fails if the base is not a URL, or if the URL would be
/// outside the base.
pub fn url_below<'a>(base: &str, parts: impl Iterator<Item = &'a str>) -> Attempt<Url> {
    let encoded = parts.map(encode).collect::<Vec<_>>().join("/");
    let base = directory(base)?;
    let url = base.join(&encoded).ok().filter(|url| path_below(&base, url) == Some(&encoded));
    url.ok_or_else(|| Failure::new(FailureClass::Invalid, format!("{encoded:?} is not a path below {base}")))
}

/// Returns whether a URL is below a base.
pub fn is_below(base: &str, url: &str) -> bool {
    let base = directory(base).ok();
    base.zip(Url::parse(url).ok()).is_some_and(|(base, url)| path_below(&base, &url).is_some())
}

fn directory(base: &str) -> Attempt<Url> {
    let url = Url::parse(&format!("{}/", base.trim_end_matches('/')));
    url.map_err(|error| Failure::new(FailureClass::Invalid, format!("the endpoint is not a URL: {error}")))
}

/// Returns the path of a URL below the path of a base, which ends with a slash.
fn path_below<'a>(base: &Url, url: &'a Url) -> Option<&'a str> {
    url.path().strip_prefix(base.path()).filter(|_| base.origin() == url.origin())
}
