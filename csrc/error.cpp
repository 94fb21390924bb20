#include "error.h"

#include <c10/util/Exception.h>

#include "fst/rust/bridge.rs.h"

namespace fst {

void throw_as_torch_error(const std::string& text) {
  switch (exception_of(rust::String::lossy(text))) {
    case ExceptionClass::ValueError:
      C10_THROW_ERROR(ValueError, text);
    case ExceptionClass::IndexError:
      C10_THROW_ERROR(IndexError, text);
    case ExceptionClass::NotImplementedError:
      C10_THROW_ERROR(NotImplementedError, text);
    case ExceptionClass::OutOfMemoryError:
      C10_THROW_ERROR(OutOfMemoryError, text);
    case ExceptionClass::Error:
      break;
  }
  C10_THROW_ERROR(Error, text);
}

namespace {

[[noreturn]] void throw_with_code(const char* code, const std::string& message) {
  throw_as_torch_error(std::string(error_text(code, rust::String::lossy(message), "", "")));
}

}  // namespace

void throw_invalid_argument(const std::string& message) { throw_with_code("invalid-argument", message); }

void check_counts(size_t expected, const char* items, size_t found, const char* others) {
  if (expected != found) {
    throw_invalid_argument(c10::str(expected, " ", items, ", but ", found, " ", others));
  }
}

void throw_version_conflict(const std::string& message) { throw_with_code("version", message); }

void throw_mismatch(const std::string& message) { throw_with_code("mismatch", message); }

}  // namespace fst
