//! The two files of profiles, merged.

use super::ini::{self, Section, Value, split_words};
use crate::error::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Environment variables that begin with `AWS_` and are not empty. Some are secrets.
pub(super) type Variables = BTreeMap<String, String>;

#[derive(Default)]
pub(super) struct Files {
    pub(super) profiles: BTreeMap<String, Properties>,
    pub(super) sso_sessions: BTreeMap<String, Properties>,
    pub(super) services: BTreeMap<String, Properties>,
}

impl Files {
    /// Reads the files that exist.
    pub(super) fn read(variables: &Variables, home: Option<&Path>) -> Result<Self> {
        let path = |variable: &str, name: &str| match (variables.get(variable), home) {
            (Some(text), home) => Some(match (text.strip_prefix("~/"), home) {
                (Some(rest), Some(home)) => home.join(rest),
                _ => PathBuf::from(text),
            }),
            (None, home) => home.map(|home| home.join(".aws").join(name)),
        };
        let mut files = Files::default();
        let mut default_profile = None;
        if let Some(path) = path("AWS_CONFIG_FILE", "config") {
            for (title, section) in read(&path)? {
                let words = split_words(&title).unwrap_or_default();
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let (kind, name) = match words.as_slice() {
                    ["default"] => (&mut files.profiles, "default"),
                    // Takes precedence over [default].
                    ["profile", "default"] => {
                        default_profile = Some(Properties::new(&path, &title, section, false));
                        continue;
                    }
                    ["profile", name] => (&mut files.profiles, *name),
                    ["sso-session", name] => (&mut files.sso_sessions, *name),
                    ["services", name] => (&mut files.services, *name),
                    _ => continue,
                };
                kind.insert(name.to_owned(), Properties::new(&path, &title, section, false));
            }
            files.profiles.extend(default_profile.map(|properties| ("default".to_owned(), properties)));
        }
        if let Some(path) = path("AWS_SHARED_CREDENTIALS_FILE", "credentials") {
            for (name, section) in read(&path)? {
                let own = Properties::new(&path, &name, section, true);
                match files.profiles.get_mut(&name) {
                    Some(known) => known.values.extend(own.values),
                    None => _ = files.profiles.insert(name, own),
                }
            }
        }
        Ok(files)
    }
}

fn read(path: &Path) -> Result<BTreeMap<String, Section>> {
    // A folder that this user may not enter has no profiles for this user: HOME is often root's in containers.
    if !path.is_file() {
        return Ok(BTreeMap::new());
    }
    let bytes = std::fs::read(path).map_err(|error| Error::from_io(error, path, "cannot read the AWS profiles"))?;
    let text = String::from_utf8(bytes)
        .map_err(|_| Error::new(Kind::InvalidArgument, "AWS profiles must be UTF-8 text").at(path))?;
    ini::parse(&text).map_err(|error| error.at(path))
}

/// Section of a file.
#[derive(Clone)]
pub(super) struct Place {
    path: Arc<PathBuf>,
    title: Arc<str>,
    is_in_credentials_file: bool,
}

impl Place {
    pub(super) fn error(&self, kind: Kind, key: &str, message: impl AsRef<str>) -> Error {
        Error::new(kind, format!("[{}] {key}: {}", self.title, message.as_ref())).at(self.path.as_path())
    }

    pub(super) fn invalid(&self, key: &str, message: impl AsRef<str>) -> Error {
        self.error(Kind::InvalidArgument, key, message)
    }
}

/// Properties of a profile or another section, each with the section that has its value.
pub(super) struct Properties {
    place: Place,
    values: BTreeMap<String, (Value, Place)>,
}

impl Properties {
    fn new(path: &Path, title: &str, section: Section, is_in_credentials_file: bool) -> Self {
        let place = Place { path: Arc::new(path.to_path_buf()), title: title.into(), is_in_credentials_file };
        let values = section.into_iter().map(|(key, value)| (key, (value, place.clone()))).collect();
        Properties { values, place }
    }

    /// Returns the text of a property that is not empty.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.values.get(key)?.0.text().filter(|text| !text.is_empty())
    }

    pub(super) fn nested(&self, key: &str, nested: &str) -> Option<&str> {
        self.values.get(key)?.0.nested(nested).filter(|text| !text.is_empty())
    }

    /// Returns the text of a property. Fails with `invalid-argument` if it is missing, with `why` it is required.
    pub(super) fn required(&self, key: &str, why: &str) -> Result<&str> {
        self.text(key).ok_or_else(|| self.place.invalid(key, format!("the key is missing; {why}")))
    }

    /// Returns the section that has a property, or the first one of the profile.
    pub(super) fn place(&self, key: &str) -> &Place {
        self.values.get(key).map_or(&self.place, |(_, place)| place)
    }

    pub(super) fn invalid(&self, key: &str, message: impl AsRef<str>) -> Error {
        self.place(key).invalid(key, message)
    }

    pub(super) fn is_in_credentials_file(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|(_, place)| place.is_in_credentials_file)
    }
}
