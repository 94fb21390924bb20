//! Settings of connections, from the environment.

use super::trust;
use crate::error::Result;
use crate::options;
use std::time::Duration;

const PROXY_VARIABLES: [&str; 8] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"];

/// Settings on which a connection depends. Connections that were opened with other settings are not used again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Time with too few bytes after which a request is repeated.
    pub stall: Duration,
    variables: Vec<Option<String>>,
}

impl Settings {
    /// Reads the settings.
    ///
    /// # Errors
    /// `invalid-argument`, with the variable and its allowed values.
    pub fn from_env() -> Result<Settings> {
        let proxies = PROXY_VARIABLES.iter().map(|name| options::variable(name));
        let variables = trust::variables().chain(proxies).collect();
        Ok(Settings { stall: options::stall_timeout_from_env()?, variables })
    }
}

/// Returns whether `NO_PROXY` is `*`, which stands for all hosts.
pub fn excludes_all_hosts() -> bool {
    ["NO_PROXY", "no_proxy"].iter().any(|name| options::variable(name).is_some_and(|hosts| hosts.trim() == "*"))
}
