#include "select.h"

#include <c10/util/StringUtil.h>

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

rust::Box<OpenRequest> request_of(const OpenOptions& options) {
  rust::Slice<const uint8_t> headers;
  if (options.headers) {
    check_vector("the list of headers", *options.headers, at::kByte);
    headers = bytes_of(*options.headers);
  }
  auto request = call_core([&] { return open_request(fst::to_rust(options.verify), headers); });
  if (options.key) {
    request->set_key((*options.key)->key(), options.accepts_plain);
  }
  return request;
}

rust::Box<Selection> select(const Checkpoint& checkpoint, const Selected& selected) {
  const auto names = to_rust(selected.names);
  return call_core([&] {
    return checkpoint.select(selected.parts, slice_of(names), slice_of(selected.starts), slice_of(selected.lengths),
                             slice_of(selected.steps_or_dims));
  });
}

DtypeRules dtype_rules(std::optional<c10::ScalarType> dtype, const Patterns& patterns, const DtypeNumbers& dtypes) {
  const auto names = patterns.value_or(c10::List<std::string>());
  const auto numbers = dtypes.value_or(std::vector<int64_t>());
  check_counts(names.size(), "patterns", numbers.size(), "dtypes; give one for every pattern");
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

rust::Vec<Spec> specs_of(const Selection& selection, const DtypeRules& rules) {
  return call_core([&] { return selection.specs(slice_of(rules)); });
}

}  // namespace fst
