//! Options of stores that a program sets for one place, besides the environment.

use crate::error::{Error, Kind, Result};
use crate::os::per_process::PerProcess;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Options by the beginning of the URLs for which they are.
type Configurations = BTreeMap<String, BTreeMap<String, String>>;

static CONFIGURATIONS: PerProcess<Mutex<Configurations>> = PerProcess::settings();

fn lock() -> MutexGuard<'static, Configurations> {
    CONFIGURATIONS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the options of all URLs that begin with `prefix`, in place of those that were set before. Without options, the
/// environment alone decides again.
///
/// # Errors
/// `invalid-argument` if the prefix is not a URL.
pub fn configure(prefix: &str, options: BTreeMap<String, String>) -> Result<()> {
    super::location::Location::parse(prefix)?;
    let mut configurations = lock();
    if options.is_empty() {
        configurations.remove(prefix);
    } else {
        configurations.insert(prefix.to_owned(), options);
    }
    Ok(())
}

/// Returns the options of a URL: those of the longest prefix that was set.
pub(super) fn options_of(url: &str) -> BTreeMap<String, String> {
    let is_prefix = |prefix: &String| {
        url.strip_prefix(prefix.trim_end_matches('/')).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let configurations = lock();
    let longest = configurations.iter().filter(|(prefix, _)| is_prefix(prefix)).max_by_key(|(prefix, _)| prefix.len());
    longest.map(|(_, options)| options.clone()).unwrap_or_default()
}

/// Returns the error for an option that a service does not have. It does not show the value, which may be secret.
pub(super) fn unknown(url: &str, name: &str, known: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("the option {name:?} is not known here; {known}")).at(url)
}
