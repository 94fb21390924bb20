//! Options of stores that a program sets for one place, besides the environment.

use crate::error::{Error, Kind, Result};
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use crate::remote::find::location::{Location, Service};
use reqwest::Url;
use std::collections::BTreeMap;

/// Options by the beginning of the URLs for which they are.
type Configurations = BTreeMap<String, BTreeMap<String, String>>;

static CONFIGURATIONS: PerProcess<Mutex<Configurations>> = PerProcess::settings();

/// Sets the options of all URLs that begin with `prefix`, in place of those that were set before. Without options, the
/// environment alone decides again. Fails with `invalid-argument` if the prefix is not a URL.
pub fn configure(prefix: &str, options: BTreeMap<String, String>) -> Result<()> {
    let prefix = normalized(&Location::parse(prefix)?);
    let mut configurations = CONFIGURATIONS.get().lock();
    if options.is_empty() {
        configurations.remove(&prefix);
    } else {
        configurations.insert(prefix, options);
    }
    Ok(())
}

/// Returns the options of a location: options of the longest prefix of its URL that was set.
pub(in crate::remote) fn options_of(location: &Location) -> BTreeMap<String, String> {
    let url = normalized(location);
    let is_prefix = |prefix: &String| {
        let rest = url.strip_prefix(prefix.trim_end_matches('/'));
        // Options of a repository are for all its revisions.
        let ends: &[char] = if location.service() == Service::Hub { &['/', '@'] } else { &['/'] };
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(ends))
    };
    let configurations = CONFIGURATIONS.get().lock();
    let longest = configurations.iter().filter(|(prefix, _)| is_prefix(prefix)).max_by_key(|(prefix, _)| prefix.len());
    longest.map(|(_, options)| options.clone()).unwrap_or_default()
}

/// Returns a URL without secrets as a server reads it: `https://host/a/../b` is not below `https://host/a`.
fn normalized(location: &Location) -> String {
    let shown = location.to_string();
    let parsed = Some(&shown).filter(|_| location.service() == Service::Http).and_then(|url| Url::parse(url).ok());
    parsed.map_or(shown, String::from)
}

/// Returns the error for an option that a service does not have. It does not show the value, which may be secret.
pub(in crate::remote) fn unknown(url: &str, name: &str, known: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("the option {name:?} is not known here; {known}")).at(url)
}
