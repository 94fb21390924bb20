// Calls of operators and script classes for the crate in rust/tch.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <rust/cxx.h>

#include <exception>
#include <memory>
#include <string>

namespace fst::tch {

struct Value;

// Object of a script class.
using Object = c10::intrusive_ptr<c10::ivalue::Object>;

// Calls an operator. A value holds all texts, numbers and tensors of the result, one after the other.
Value call_operator(rust::Str name, rust::Slice<const Value> arguments);

// Return the object that an operator returns, or a new one of a class.
std::unique_ptr<Object> object_of_operator(rust::Str name, rust::Slice<const Value> arguments);
std::unique_ptr<Object> new_object(rust::Str name, rust::Slice<const Value> arguments);

// Calls a method without arguments.
Value call_method(const Object& object, rust::Str name);

// Returns the error text without a backtrace. Adds the code to out-of-memory errors of PyTorch's allocator.
std::string text_of(const c10::Error& error);

}  // namespace fst::tch

namespace rust::behavior {

// Passes the text of exceptions to Rust.
template <typename Try, typename Fail>
static void trycatch(Try&& call, Fail&& fail) noexcept {
  try {
    call();
  } catch (const c10::Error& error) {
    fail(fst::tch::text_of(error));
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

}  // namespace rust::behavior
