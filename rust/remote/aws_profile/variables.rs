//! Environment variables that profiles use, read once.

use std::collections::BTreeMap;

/// Names of the variables.
const NAMES: [&str; 18] = [
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_STS",
    "AWS_ENDPOINT_URL_SSO",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_ROLE_SESSION_NAME",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
];

/// Values of the variables. Some are secrets, so the type has no `Debug`.
pub(super) struct Variables(BTreeMap<&'static str, String>);

impl Variables {
    pub(super) fn read(env: &dyn Fn(&str) -> Option<String>) -> Self {
        let values = NAMES.into_iter().filter_map(|name| Some((name, env(name).filter(|value| !value.is_empty())?)));
        Variables(values.collect())
    }

    /// Returns the value of a variable that is set and not empty.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Returns whether a variable is `true`.
    pub(super) fn is_true(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value.eq_ignore_ascii_case("true"))
    }
}
