#include "error.h"

#include <c10/util/Exception.h>

#include <string_view>

namespace fst {

namespace {

std::string_view code_of(std::string_view text) {
  const auto end = text.find(']');
  return end == std::string_view::npos || text.empty() ? std::string_view() : text.substr(1, end - 1);
}

}  // namespace

void throw_as_torch_error(const std::string& text) {
  const auto code = code_of(text);
  if (code == "malformed" || code == "duplicate-tensor" || code == "invalid-argument") {
    C10_THROW_ERROR(ValueError, text);
  }
  if (code == "tensor-not-found") {
    C10_THROW_ERROR(IndexError, text);
  }
  if (code == "unsupported-dtype") {
    C10_THROW_ERROR(NotImplementedError, text);
  }
  if (code == "out-of-memory") {
    C10_THROW_ERROR(OutOfMemoryError, text);
  }
  C10_THROW_ERROR(Error, text);
}

void throw_invalid_argument(const std::string& message) { throw_as_torch_error("[invalid-argument] " + message); }

}  // namespace fst
