//! The one error type. Only its text crosses the border to C++, so the text
//! carries everything: a code for programs, and for people the path, the
//! tensor, the byte offset, what was expected and what to do.

use std::fmt::{self, Write};
use std::io;
use std::path::{Path, PathBuf};

/// What went wrong, as a program may want to tell it apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file or directory does not exist.
    FileNotFound,
    /// The operating system refused access.
    PermissionDenied,
    /// A directory was given where a file, or a directory with a checkpoint, is needed.
    IsADirectory,
    /// Any other failure of the operating system to read or write.
    Io,
    /// The bytes of a file are not valid safetensors.
    Malformed,
    /// A name was asked for that no file holds.
    TensorNotFound,
    /// A name stands in two files.
    DuplicateTensor,
    /// PyTorch has no dtype for what the file holds, or the format has none for what the tensor holds.
    UnsupportedDtype,
    /// The caller's arguments do not fit together or do not fit the file.
    InvalidArgument,
    /// Ctrl-C.
    Interrupted,
    /// The device or the host has no memory left.
    OutOfMemory,
    /// A driver call failed.
    Device,
    /// A bug in fst.
    Internal,
}

impl Kind {
    /// The code that begins an error's text, in brackets.
    pub fn code(self) -> &'static str {
        match self {
            Kind::FileNotFound => "file-not-found",
            Kind::PermissionDenied => "permission-denied",
            Kind::IsADirectory => "is-a-directory",
            Kind::Io => "io",
            Kind::Malformed => "malformed",
            Kind::TensorNotFound => "tensor-not-found",
            Kind::DuplicateTensor => "duplicate-tensor",
            Kind::UnsupportedDtype => "unsupported-dtype",
            Kind::InvalidArgument => "invalid-argument",
            Kind::Interrupted => "interrupted",
            Kind::OutOfMemory => "out-of-memory",
            Kind::Device => "device",
            Kind::Internal => "internal",
        }
    }

    /// The kind with this code.
    fn from_code(code: &str) -> Option<Kind> {
        let kinds = [
            Kind::FileNotFound,
            Kind::PermissionDenied,
            Kind::IsADirectory,
            Kind::Io,
            Kind::Malformed,
            Kind::TensorNotFound,
            Kind::DuplicateTensor,
            Kind::UnsupportedDtype,
            Kind::InvalidArgument,
            Kind::Interrupted,
            Kind::OutOfMemory,
            Kind::Device,
            Kind::Internal,
        ];
        kinds.into_iter().find(|kind| kind.code() == code)
    }
}

/// An error with its place: `[code] path: tensor "name": byte offset: message`.
///
/// ```
/// use fst::error::{Error, Kind};
/// let error = Error::new(Kind::Malformed, "the shape does not fit").at("a.safetensors").tensor("w").offset(8);
/// assert_eq!(error.to_string(), r#"[malformed] a.safetensors: tensor "w": byte 8: the shape does not fit"#);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    kind: Kind,
    path: Option<PathBuf>,
    tensor: Option<String>,
    offset: Option<u64>,
    message: String,
}

/// A result whose error is [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error without a place yet.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error { kind, path: None, tensor: None, offset: None, message: message.into() }
    }

    /// The error with this text, which has crossed the border. Its place stays in the text.
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

    /// An error of the operating system while `doing` something with `path`.
    pub fn from_io(error: &io::Error, path: &Path, doing: &str) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => Kind::FileNotFound,
            io::ErrorKind::PermissionDenied => Kind::PermissionDenied,
            io::ErrorKind::IsADirectory => Kind::IsADirectory,
            io::ErrorKind::OutOfMemory => Kind::OutOfMemory,
            _ => Kind::Io,
        };
        Error::new(kind, format!("{doing}: {error}")).at(path)
    }

    /// Names the file or directory.
    #[must_use]
    pub fn at(mut self, path: impl AsRef<Path>) -> Self {
        self.path = Some(path.as_ref().to_path_buf());
        self
    }

    /// Names the tensor.
    #[must_use]
    pub fn tensor(mut self, name: impl Into<String>) -> Self {
        self.tensor = Some(name.into());
        self
    }

    /// Gives the position in the file, in bytes from its start.
    #[must_use]
    pub fn offset(mut self, bytes: u64) -> Self {
        self.offset = Some(bytes);
        self
    }

    /// The position in the file, in bytes from its start, where there is one.
    pub fn position(&self) -> Option<u64> {
        self.offset
    }

    /// What went wrong.
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

/// Names can be any JSON string; a long one must not bury the message.
const NAME_SHOWN_CHARS: usize = 200;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] ", self.kind.code())?;
        if let Some(path) = &self.path {
            // The text ends up in a C string, which a zero would end, and on terminals.
            for character in path.to_string_lossy().chars() {
                match character.is_control() {
                    true => write!(f, "{}", character.escape_default())?,
                    false => f.write_char(character)?,
                }
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
        f.write_str(&self.message)
    }
}
