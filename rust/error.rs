//! Error type of the crate. Only its text crosses the FFI boundary to C++, so the text contains a code for programs, the
//! path, the tensor, the byte offset, the expectation and a remedy.

use rustix::io::Errno;
use std::fmt::{self, Write};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Declares an enumeration whose values have names, which a method returns.
macro_rules! named_enum {
    ($(#[$about:meta])* $name:ident, $(#[$method_about:meta])* $method:ident: $($(#[$doc:meta])* $value:ident = $text:literal,)*) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $value,)*
        }

        impl $name {
            /// All values.
            pub const ALL: &[$name] = &[$($name::$value,)*];

            $(#[$method_about])*
            pub fn $method(self) -> &'static str {
                match self {
                    $($name::$value => $text,)*
                }
            }
        }
    };
}

pub(crate) use named_enum;

named_enum! {
    /// Kind of an error.
    Kind,
    /// Returns the code in brackets at the start of an error's text.
    code:
    /// A file or directory does not exist.
    FileNotFound = "file-not-found",
    /// The operating system denied access.
    PermissionDenied = "permission-denied",
    /// The path is a directory instead of a file, or of a directory with one checkpoint.
    IsADirectory = "is-a-directory",
    /// Any other failure of the operating system to read or write.
    Io = "io",
    /// A checkpoint or an object was replaced while it was loaded.
    SourceChanged = "source-changed",
    /// The bytes of a file are not valid safetensors.
    Malformed = "malformed",
    /// Data differ from their digest, or no digest is known.
    Integrity = "integrity",
    /// No file contains a requested tensor.
    TensorNotFound = "tensor-not-found",
    /// Two files contain a tensor with the same name.
    DuplicateTensor = "duplicate-tensor",
    /// PyTorch has no dtype for stored data, or the format has none for a tensor.
    UnsupportedDtype = "unsupported-dtype",
    /// Arguments do not fit together or do not fit the file.
    InvalidArgument = "invalid-argument",
    /// Existing tensors do not fit a checkpoint.
    Mismatch = "mismatch",
    /// Tensors do not hold the version that an update needs.
    Version = "version",
    /// SIGINT (Ctrl-C) ended the operation.
    Interrupted = "interrupted",
    /// The device or the host is out of memory.
    OutOfMemory = "out-of-memory",
    /// A driver call failed.
    Device = "device",
    /// A bug in fst.
    Internal = "internal",
}

impl Kind {
    /// Returns the kind with this code.
    pub(crate) fn from_code(code: &str) -> Option<Kind> {
        Kind::ALL.iter().copied().find(|kind| kind.code() == code)
    }
}

/// Error with its location: `[code] path: tensor "name": byte offset: message`.
///
/// ```
/// use fst::error::{Error, Kind};
/// let error = Error::new(Kind::Malformed, "the shape does not fit").at("a.safetensors").tensor("w").offset(8);
/// assert_eq!(error.to_string(), r#"[malformed] a.safetensors: tensor "w": byte 8: the shape does not fit"#);
/// ```
#[derive(Clone, Debug, thiserror::Error)]
pub struct Error {
    kind: Kind,
    path: Option<PathBuf>,
    tensor: Option<String>,
    offset: Option<u64>,
    message: String,
    #[source]
    source: Option<Arc<io::Error>>,
}

/// Compares all parts of the text. The source is an error of the operating system, which the message contains.
impl PartialEq for Error {
    fn eq(&self, other: &Error) -> bool {
        (self.kind, self.offset, &self.path, &self.tensor, &self.message)
            == (other.kind, other.offset, &other.path, &other.tensor, &other.message)
    }
}

impl Eq for Error {}

/// Result with [`struct@Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an error without a location.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error { kind, path: None, tensor: None, offset: None, message: message.into(), source: None }
    }

    /// Parses the text of an error that crossed the FFI boundary. The location stays part of the message.
    ///
    /// ```
    /// use fst::error::{Error, Kind};
    /// let text = r#"[malformed] a.safetensors: tensor "w": byte 8: the shape does not fit"#;
    /// let error = Error::from_text(text).unwrap();
    /// assert_eq!((error.kind(), error.to_string().as_str()), (Kind::Malformed, text));
    /// assert_eq!(Error::from_text("a text without a code"), None);
    /// ```
    pub fn from_text(text: &str) -> Option<Self> {
        let (code, message) = text.strip_prefix('[')?.split_once("] ")?;
        Some(Error::new(Kind::from_code(code)?, message))
    }

    /// Creates an error from an operating system error that occurred while `doing` something with `path`. Keeps it as the source.
    ///
    /// ```
    /// use fst::error::{Error, Kind};
    /// use std::{error::Error as _, io, path::Path};
    /// let error = Error::from_io(io::ErrorKind::NotFound.into(), Path::new("a.safetensors"), "cannot open");
    /// assert_eq!(error.kind(), Kind::FileNotFound);
    /// assert_eq!(error.source().unwrap().to_string(), "entity not found");
    /// ```
    pub fn from_io(error: io::Error, path: &Path, doing: &str) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => Kind::FileNotFound,
            io::ErrorKind::PermissionDenied => Kind::PermissionDenied,
            io::ErrorKind::IsADirectory => Kind::IsADirectory,
            io::ErrorKind::OutOfMemory => Kind::OutOfMemory,
            _ => Kind::Io,
        };
        let remedy = match Errno::from_io_error(&error) {
            Some(Errno::MFILE) => "; raise the limit of open files of the process with `ulimit -n`",
            _ => "",
        };
        let message = format!("{doing}: {error}{remedy}");
        Error { source: Some(Arc::new(error)), ..Error::new(kind, message).at(path) }
    }

    /// Sets the path of the file or directory.
    #[must_use]
    pub fn at(mut self, path: impl AsRef<Path>) -> Self {
        self.path = Some(path.as_ref().to_path_buf());
        self
    }

    /// Sets the name of the tensor.
    #[must_use]
    pub fn tensor(mut self, name: impl Into<String>) -> Self {
        self.tensor = Some(name.into());
        self
    }

    /// Sets the position in the file, in bytes from its start.
    #[must_use]
    pub fn offset(mut self, bytes: u64) -> Self {
        self.offset = Some(bytes);
        self
    }

    /// Removes the position, if it is a position in bytes other than the file's.
    #[must_use]
    pub fn without_offset(mut self) -> Self {
        self.offset = None;
        self
    }

    /// Adds a sentence to the message.
    #[must_use]
    pub fn note(mut self, text: &str) -> Self {
        self.message = format!("{}; {text}", self.message);
        self
    }

    /// Returns the position in the file, in bytes from its start, if it is known.
    pub fn position(&self) -> Option<u64> {
        self.offset
    }

    /// Returns the message without the location.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

/// Maximum number of characters of a tensor's name in the text. Names can be arbitrarily long.
const NAME_SHOWN_CHARS: usize = 200;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] ", self.kind.code())?;
        if let Some(path) = &self.path {
            for chunk in path.as_os_str().as_encoded_bytes().utf8_chunks() {
                write_visible(f, chunk.valid())?;
                chunk.invalid().iter().try_for_each(|byte| write!(f, "\\x{byte:02x}"))?;
            }
            f.write_str(": ")?;
        }
        if let Some(name) = &self.tensor {
            match name.char_indices().nth(NAME_SHOWN_CHARS) {
                None => write!(f, "tensor {name:?}: ")?,
                Some((end, _)) => write!(f, "tensor {:?}...: ", name.get(..end).unwrap_or(name))?,
            }
        }
        if let Some(offset) = self.offset {
            write!(f, "byte {offset}: ")?;
        }
        write_visible(f, &self.message)
    }
}

/// Writes text with escapes for characters that would act on a terminal instead of being shown, or, like NUL, end the
/// text in C.
fn write_visible(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    for character in text.chars() {
        match character.is_control() || changes_direction(character) {
            true => write!(f, "{}", character.escape_default())?,
            false => f.write_char(character)?,
        }
    }
    Ok(())
}

/// Returns whether a character breaks lines or changes the direction of the text around it, so that a text reads as
/// another one. torch_ext/fst/_profile/formatting.py has the same list.
fn changes_direction(character: char) -> bool {
    matches!(
        character,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}
