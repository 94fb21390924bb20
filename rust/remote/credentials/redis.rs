//! Address of a server, and what it asks for.

use crate::error::{Error, Kind, Result};
use crate::options;
use crate::remote::find::location::Location;
use crate::remote::stores::store_options;
use crate::remote::stores::trust::Trust;
use percent_encoding::percent_decode_str;
use std::collections::BTreeMap;

const PORT: u16 = 6379;

/// Address and credentials. They have no `Debug`, so that no log shows them.
pub struct Credentials {
    pub host: String,
    pub port: u16,
    pub is_tls: bool,
    pub trust: Trust,
    /// User name. Empty for the default user.
    pub user: String,
    /// Password. Empty if there is none.
    pub password: String,
    pub database: u32,
}

impl Credentials {
    /// Returns the credentials of the URL. What it does not have comes from the options, then from `REDISCLI_AUTH`.
    pub fn of(location: &Location, settings: &BTreeMap<String, String>, trust: Trust) -> Result<Credentials> {
        let invalid = |message: &str| Error::new(Kind::InvalidArgument, message).at(location.to_string());
        let known = ["username", "password", "database"];
        if let Some(name) = settings.keys().find(|name| !known.contains(&name.as_str())) {
            let message = "the options are username, password and database";
            return Err(store_options::unknown(&location.to_string(), name, message));
        }
        let (host, port) = split_port(location.host()).ok_or_else(|| invalid("the port is not valid"))?;
        let (user, password) = match location.user() {
            Some(text) => text.split_once(':').map_or((text, None), |(user, password)| (user, Some(password))),
            None => ("", None),
        };
        let decode = |text: &str| {
            let decoded = percent_decode_str(text).decode_utf8().map(|text| text.into_owned());
            decoded.map_err(|_| invalid("the user name and the password must be UTF-8"))
        };
        let user = match user {
            "" => settings.get("username").cloned().unwrap_or_default(),
            user => decode(user)?,
        };
        let password = match password {
            Some(password) => decode(password)?,
            None => {
                settings.get("password").cloned().or_else(|| options::variable("REDISCLI_AUTH")).unwrap_or_default()
            }
        };
        let database = settings.get("database").map_or(Ok(0), |number| number.parse());
        let database = database.map_err(|_| invalid("the option \"database\" must be a number"))?;
        Ok(Credentials { host, port, is_tls: location.scheme() == "rediss", trust, user, password, database })
    }
}

/// Splits `host:port`, where the host may be an IPv6 address in brackets.
pub fn split_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
        _ => (text, PORT),
    };
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    (!host.is_empty()).then(|| (host.to_owned(), port))
}
