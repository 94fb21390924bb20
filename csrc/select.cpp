#include "select.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "cast.h"
#include "error.h"
#include "memory.h"

namespace fst {

namespace {

// Number in place of a dtype for tensors that keep the stored one.
constexpr int64_t kStoredDtype = -1;

}  // namespace

rust::Vec<rust::String> to_rust(Strings strings) {
  rust::Vec<rust::String> converted;
  converted.reserve(strings.size());
  for (size_t index = 0; index < strings.size(); ++index) {
    converted.push_back(fst::to_rust(strings.get(index)));
  }
  return converted;
}

void configure_stores(const std::string& url, Strings names, Strings values) {
  const auto rust_names = to_rust(names);
  const auto rust_values = to_rust(values);
  call_core([&] { ::fst::configure_storage(fst::to_rust(url), slice_of(rust_names), slice_of(rust_values)); });
}

void verify_files_of(Strings paths, const std::string& verify) {
  const auto converted = to_rust(paths);
  call_core([&] { verify_checkpoint(slice_of(converted), fst::to_rust(verify)); });
}

rust::Box<OpenRequest> request_of(const OpenOptions& options) {
  auto request = call_core([&] { return open_request(fst::to_rust(options.verify)); });
  if (options.key) {
    request->set_key((*options.key)->key(), options.accepts_plain);
  }
  if (const auto& headers = options.headers) {
    check_vector("the list of headers", *headers, at::kByte);
    request->set_headers(bytes_of(*headers));
  }
  return request;
}

rust::Box<Checkpoint> open_checkpoint(Strings paths, const OpenOptions& options) {
  const auto converted = to_rust(paths);
  const auto request = request_of(options);
  return call_core([&] { return open(slice_of(converted), *request); });
}

rust::Box<Selection> select(const Checkpoint& checkpoint, const Selected& selected) {
  const auto names = to_rust(selected.names);
  return call_core([&] {
    return checkpoint.select(selected.parts, slice_of(names), slice_of(selected.starts), slice_of(selected.lengths),
                             slice_of(selected.steps_or_dims));
  });
}

rust::Vec<Spec> specs_of(const Selection& selection) {
  return call_core([&] { return selection.specs(); });
}

DtypeRules dtype_rules(std::optional<c10::ScalarType> dtype, const Patterns& patterns, const DtypeNumbers& dtypes) {
  const auto names = patterns.value_or(c10::List<std::string>());
  const auto numbers = dtypes.value_or(std::vector<int64_t>());
  if (names.size() != numbers.size()) {
    throw_invalid_argument(
        c10::str(names.size(), " patterns, but ", numbers.size(), " dtypes; give one for every pattern"));
  }
  DtypeRules rules;
  for (size_t index = 0; index < numbers.size(); ++index) {
    const int64_t number = numbers[index];
    if (number < kStoredDtype || number >= static_cast<int64_t>(c10::ScalarType::NumOptions)) {
      throw_invalid_argument(c10::str(number, " is not the number of a dtype; use the numbers of c10::ScalarType, or ",
                                      kStoredDtype, " to keep the stored dtype"));
    }
    if (number != kStoredDtype) {
      check_cast_target(static_cast<c10::ScalarType>(number));
    }
    rules.push_back(DtypeRule{to_rust(names.get(index)), static_cast<int8_t>(number)});
  }
  if (dtype) {
    check_cast_target(*dtype);
    rules.push_back(DtypeRule{"*", static_cast<int8_t>(*dtype)});
  }
  return rules;
}

std::vector<int8_t> target_types(const Selection& selection, const rust::Vec<Spec>& specs, const DtypeRules& rules) {
  if (rules.empty()) {
    std::vector<int8_t> stored(specs.size());
    std::ranges::transform(specs, stored.begin(), &Spec::scalar_type);
    return stored;
  }
  const auto types = call_core([&] { return selection.scalar_types(slice_of(rules)); });
  return {types.begin(), types.end()};
}

}  // namespace fst
