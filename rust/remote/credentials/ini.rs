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

/// Value of a property: text, or nested properties on lines of their own. It may be a secret, so it has no `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Value(String);

impl Value {
    /// Returns the text, or `None` if the value has nested properties. It has no spaces around it, and line feeds between
    /// the lines of a continued value.
    pub fn text(&self) -> Option<&str> {
        (!self.is_nested()).then_some(&self.0)
    }

    /// Returns a nested property.
    pub fn nested(&self, key: &str) -> Option<&str> {
        let mut properties = self.0.lines().filter_map(|line| line.split_once('=')).filter(|_| self.is_nested());
        properties.rfind(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
    }

    /// Nothing is on the line of the key.
    fn is_nested(&self) -> bool {
        self.0.starts_with('\n')
    }
}

/// Parses a file. Returns its sections by the text between their brackets.
///
/// ```
/// use fst::remote::credentials::ini;
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
    let mut sections: BTreeMap<String, Section> = BTreeMap::new();
    let mut section: Option<String> = None;
    let mut key: Option<String> = None;
    let mut indent = 0;
    for (line, number) in text.strip_prefix('\u{feff}').unwrap_or(text).lines().zip(1_usize..) {
        let content = line.trim();
        if content.is_empty() || content.starts_with(['#', ';']) {
            continue;
        }
        let depth = line.chars().take_while(|character| character.is_whitespace()).count();
        let properties = section.as_ref().and_then(|name| sections.get_mut(name));
        let continued = properties.and_then(|properties| properties.get_mut(key.as_ref()?));
        if let Some(Value(value)) = continued.filter(|_| depth > indent) {
            value.push('\n');
            value.push_str(content);
            if value.starts_with('\n') && !content.contains('=') {
                return Err(expected(number, "a nested \"key = value\""));
            }
            continue;
        }
        indent = depth;
        if let Some(title) = content.strip_prefix('[') {
            let (name, _) = title.split_once(']').ok_or_else(|| expected(number, "a ']' after the section's name"))?;
            let name = name.trim().to_owned();
            sections.entry(name.clone()).or_default();
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
        sections.entry(name.clone()).or_default().insert(property.clone(), Value(value.trim().to_owned()));
        key = Some(property);
    }
    Ok(sections)
}

fn expected(number: usize, what: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("line {number} is invalid: expected {what}"))
}

/// Splits a command or the title of a section into words, as `shlex.split` of Python does. Returns `None` if a quote is not closed or the text ends with
/// a backslash.
///
/// ```
/// use fst::remote::credentials::ini::split_words;
/// assert_eq!(split_words(r#"a "b c"  'd"e' f\ g"#).unwrap(), ["a", "b c", "d\"e", "f g"]);
/// assert_eq!(split_words("a 'b"), None);
/// ```
pub fn split_words(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    // `None` between words: a word may be empty if it is quoted.
    let mut word: Option<String> = None;
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\'' => {
                let (quoted, rest) = characters.as_str().split_once('\'')?;
                word.get_or_insert_default().push_str(quoted);
                characters = rest.chars();
            }
            '"' => {
                let quoted = word.get_or_insert_default();
                loop {
                    match characters.next()? {
                        '"' => break,
                        '\\' => match characters.next()? {
                            escaped @ ('"' | '\\') => quoted.push(escaped),
                            other => quoted.extend(['\\', other]),
                        },
                        other => quoted.push(other),
                    }
                }
            }
            '\\' => word.get_or_insert_default().push(characters.next()?),
            ' ' | '\t' | '\r' | '\n' => words.extend(word.take()),
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Some(words)
}
