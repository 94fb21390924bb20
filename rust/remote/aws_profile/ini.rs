//! Parser of the INI dialect of `~/.aws/config` and `~/.aws/credentials`, as botocore reads it.
//!
//! Keys are case-insensitive, names of sections are not. A line that is indented deeper than its property continues the
//! value. A value that begins on the line after its key has nested properties. A line that begins with `#` or `;` is a
//! comment; after a value these characters are part of it. A blank line does not end a value.
//!
//! Differences to botocore: sections and properties may occur twice, and the later one wins, as in the AWS SDKs. Spaces
//! around the names of sections and blank lines in values are dropped.

use crate::error::{Error, Kind, Result};
use std::collections::BTreeMap;

/// Properties of a section, by their names in lower case.
pub type Section = BTreeMap<String, Value>;

/// Value of a property. It may be a secret, so it has no `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub enum Value {
    /// Text without the spaces around it. Lines of a continued value are joined by line feeds.
    Text(String),
    /// Nested properties.
    Nested(BTreeMap<String, String>),
}

impl Value {
    /// Returns the text, or `None` if the value has nested properties.
    pub fn text(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            Value::Nested(_) => None,
        }
    }

    /// Returns a nested property.
    pub fn nested(&self, key: &str) -> Option<&str> {
        match self {
            Value::Text(_) => None,
            Value::Nested(properties) => properties.get(key).map(String::as_str),
        }
    }
}

/// Parses a file. Returns its sections by the text between their brackets.
///
/// ```
/// use fst::remote::aws_profile::ini;
/// let text = "[profile a]\nRegion = eu-west-1 # part of the value\ns3 =\n  addressing_style = path\n";
/// let sections = ini::parse(text).unwrap();
/// let section = &sections["profile a"];
/// assert_eq!(section["region"].text(), Some("eu-west-1 # part of the value"));
/// assert_eq!(section["s3"].nested("addressing_style"), Some("path"));
/// ```
///
/// # Errors
/// `invalid-argument` with the number of the line, whose text may be a secret, and what was expected there.
pub fn parse(text: &str) -> Result<BTreeMap<String, Section>> {
    let mut raw: BTreeMap<String, BTreeMap<String, RawValue>> = BTreeMap::new();
    let mut section: Option<String> = None;
    let mut key: Option<String> = None;
    let mut indent = 0;
    for (line, number) in text.strip_prefix('\u{feff}').unwrap_or(text).lines().zip(1_usize..) {
        let content = line.trim();
        if content.is_empty() || content.starts_with(['#', ';']) {
            continue;
        }
        let depth = line.chars().take_while(|character| character.is_whitespace()).count();
        let properties = section.as_ref().and_then(|name| raw.get_mut(name));
        let continued = properties.and_then(|properties| properties.get_mut(key.as_ref()?));
        if let Some(value) = continued.filter(|_| depth > indent) {
            value.lines.push((number, content.to_owned()));
            continue;
        }
        indent = depth;
        if let Some(title) = content.strip_prefix('[') {
            let (name, _) = title.split_once(']').ok_or_else(|| expected(number, "a ']' after the section's name"))?;
            let name = name.trim().to_owned();
            raw.entry(name.clone()).or_default();
            (section, key) = (Some(name), None);
            continue;
        }
        let name = section.as_ref().ok_or_else(|| expected(number, "a section, such as [default], first"))?;
        let (property, value) =
            content.split_once(['=', ':']).ok_or_else(|| expected(number, "\"key = value\" or a section"))?;
        let property = property.trim().to_lowercase();
        if property.is_empty() {
            return Err(expected(number, "a key before the \"=\""));
        }
        let value = RawValue { lines: vec![(number, value.trim().to_owned())] };
        raw.entry(name.clone()).or_default().insert(property.clone(), value);
        key = Some(property);
    }
    let sections = raw.into_iter().map(|(name, properties)| {
        let section =
            properties.into_iter().map(|(key, value)| Ok((key, value.finish()?))).collect::<Result<Section>>();
        Ok((name, section?))
    });
    sections.collect()
}

fn expected(number: usize, what: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("line {number} is invalid: expected {what}"))
}

/// Lines of a value with their numbers.
struct RawValue {
    lines: Vec<(usize, String)>,
}

impl RawValue {
    fn finish(self) -> Result<Value> {
        match self.lines.split_first() {
            Some(((_, first), nested)) if first.is_empty() && !nested.is_empty() => {
                let properties = nested.iter().map(|(number, line)| {
                    let (key, value) =
                        line.split_once('=').ok_or_else(|| expected(*number, "a nested \"key = value\""))?;
                    Ok((key.trim().to_owned(), value.trim().to_owned()))
                });
                Ok(Value::Nested(properties.collect::<Result<_>>()?))
            }
            _ => {
                let lines: Vec<String> = self.lines.into_iter().map(|(_, line)| line).collect();
                Ok(Value::Text(lines.join("\n")))
            }
        }
    }
}
