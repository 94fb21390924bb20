//! Names of files below a prefix.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::path::Path;

/// Characters that are escaped in a URL: all but the unreserved ones of RFC 3986.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Name of a file below a prefix: a directory, a prefix of a store, or a repository of the Hub.
///
/// Names come from indices, listings, manifests and answers of servers. A name is neither a URL nor a path: it has parts,
/// between slashes, whose characters mean nothing else. So no name leads out of its prefix.
///
/// ```
/// use fst::remote::find::name::Name;
/// let name = Name::parse("a/100%#1.safetensors").unwrap();
/// assert_eq!((name.as_str(), name.encoded().as_str()), ("a/100%#1.safetensors", "a/100%25%231.safetensors"));
/// for text in ["", "/a", "a//b", "../a", "a/.", "a\n"] {
///     assert!(Name::parse(text).is_err());
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

impl Name {
    /// Parses a name. The error is the reason why the text is not a name, for an error that quotes the text.
    pub fn parse(text: &str) -> Result<Name, &'static str> {
        let has = |part: &str| text.split('/').any(|found| found == part);
        match () {
            () if text.is_empty() => Err("it is empty"),
            () if has("") => Err("it has an empty part before, between or after slashes"),
            () if has(".") || has("..") => Err("it has the part \".\" or \"..\""),
            () if text.chars().any(char::is_control) => Err("it has a control character"),
            () => Ok(Name(text.to_owned())),
        }
    }

    /// Returns the name as it is: a key of a store, or a path of a file.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Iterates over the parts between slashes.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.split('/')
    }

    /// Returns the name as the path of a URL, without a slash at the beginning.
    pub fn encoded(&self) -> String {
        self.parts().map(encode).collect::<Vec<_>>().join("/")
    }
}

/// Returns a text as one part of the path of a URL.
pub(super) fn encode(part: &str) -> String {
    utf8_percent_encode(part, ESCAPED).to_string()
}

impl AsRef<Path> for Name {
    fn as_ref(&self) -> &Path {
        Path::new(&self.0)
    }
}
