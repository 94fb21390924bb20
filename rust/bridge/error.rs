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

/// Returns the error text for a tensor that PyTorch could not allocate.
pub(super) fn out_of_memory(path: &str, tensor: &str, bytes: u64, device: &str) -> String {
    let message = format!("needs {bytes} bytes on {device}, which could not be allocated; load other tensors only");
    Error::new(Kind::OutOfMemory, message).tensor(tensor).at(path).to_string()
}

/// Returns the text of an error with a code that C++ found.
pub(super) fn error_text(code: &str, message: &str) -> String {
    Error::new(Kind::from_code(code).unwrap_or(Kind::Internal), message).to_string()
}
