// Errors of the core as PyTorch's exceptions.
#pragma once

#include <rust/cxx.h>

#include <stdexcept>
#include <string>

namespace fst {

// Throws the c10 exception that fits the code in brackets with which every error text of the core begins. Python
// sees ValueError, IndexError, NotImplementedError, torch.OutOfMemoryError or RuntimeError.
[[noreturn]] void throw_as_torch_error(const std::string& text);

[[noreturn]] void throw_invalid_argument(const std::string& message);

// Calls into the core, and lets its errors out as PyTorch's.
template <typename Call>
auto call_core(Call&& call) -> decltype(call()) {
  try {
    return call();
  } catch (const rust::Error& error) {
    throw_as_torch_error(error.what());
  }
}

// The core takes UTF-8, and so do the dictionaries that names end up in.
inline rust::String to_rust(const std::string& text) {
  try {
    return rust::String(text);
  } catch (const std::invalid_argument&) {
    throw_invalid_argument("a path or name is not UTF-8");
  }
}

}  // namespace fst
