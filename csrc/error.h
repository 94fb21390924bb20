// Calls the core: maps its errors to PyTorch's exceptions, and converts arguments and results.
#pragma once

#include <c10/core/ScalarType.h>
#include <rust/cxx.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fst {

// Throws the c10 exception for an error text of the core. Python sees ValueError, IndexError, NotImplementedError,
// torch.OutOfMemoryError or RuntimeError.
[[noreturn]] void throw_as_torch_error(const std::string& text);

// Throws c10::ValueError with the code for invalid arguments.
[[noreturn]] void throw_invalid_argument(const std::string& message);

// Throws c10::ValueError, with the names of the items, unless there are equally many of two sorts.
void check_counts(size_t expected, const char* items, size_t found, const char* others);

// Throws c10::ValueError with the code for tensors that do not hold the version that an update needs.
[[noreturn]] void throw_version_conflict(const std::string& message);

// Returns the name of a dtype as in Python, such as "float32".
// PyTorch 2.15 returns views, and earlier ones strings.
inline std::string name_of(c10::ScalarType type) {
  const auto name = c10::getDtypeNames(type).first;
  return {name.begin(), name.end()};
}

// Throws c10::ValueError with the code for tensors that do not fit a checkpoint.
[[noreturn]] void throw_mismatch(const std::string& message);

// Calls the core and converts its errors to PyTorch's exceptions.
template <typename Call>
auto call_core(Call&& call) -> decltype(call()) {
  try {
    return call();
  } catch (const rust::Error& error) {
    throw_as_torch_error(error.what());
  }
}

// Views a list as a slice of the core.
template <typename List>
auto slice_of(const List& list) {
  return rust::Slice<const typename List::value_type>(list.data(), list.size());
}

// Converts a path or name. Throws c10::ValueError if it is not UTF-8.
inline rust::String to_rust(const std::string& text) {
  try {
    return {text};
  } catch (const std::invalid_argument&) {
    throw_invalid_argument("a path or name is not UTF-8");
  }
}

}  // namespace fst
