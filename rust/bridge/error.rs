//! Exception classes and texts of errors in C++.

use super::ffi::ExceptionClass;
use crate::error::{Error, Kind};

/// Returns the exception class for an error text. A text without a code is a plain error.
pub(super) fn exception_of(text: &str) -> ExceptionClass {
    let Some(error) = Error::from_text(text) else { return ExceptionClass::Error };
    match error.kind() {
        Kind::Malformed
        | Kind::Integrity
        | Kind::DuplicateTensor
        | Kind::InvalidArgument
        | Kind::Mismatch
        | Kind::Version => ExceptionClass::ValueError,
        Kind::TensorNotFound => ExceptionClass::IndexError,
        Kind::UnsupportedDtype => ExceptionClass::NotImplementedError,
        Kind::OutOfMemory => ExceptionClass::OutOfMemoryError,
        Kind::FileNotFound
        | Kind::PermissionDenied
        | Kind::IsADirectory
        | Kind::Io
        | Kind::SourceChanged
        | Kind::Interrupted
        | Kind::Device
        | Kind::Internal => ExceptionClass::Error,
    }
}

/// Returns the text of an error with a code that C++ found. Tensor and path are empty if the error has none.
pub(super) fn error_text(code: &str, message: &str, tensor: &str, path: &str) -> String {
    let error = Error::new(Kind::from_code(code).unwrap_or(Kind::Internal), message);
    let error = if tensor.is_empty() { error } else { error.tensor(tensor) };
    if path.is_empty() { error.to_string() } else { error.at(path).to_string() }
}
