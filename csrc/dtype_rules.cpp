#include "dtype_rules.h"

#include <c10/util/StringUtil.h>

#include "cast.h"
#include "error.h"

namespace fst {

namespace {

// Number in place of a dtype for tensors that keep the stored one.
constexpr int64_t kStoredDtype = -1;

}  // namespace

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

std::vector<int8_t> target_types(const Selection& selection, const DtypeRules& rules) {
  const auto types = call_core([&] { return selection.scalar_types(slice_of(rules)); });
  return {types.begin(), types.end()};
}

std::vector<int64_t> requested_types(Strings names, const DtypeRules& rules) {
  const auto converted = to_rust(names);
  const auto types = call_core([&] { return requested_scalar_types(slice_of(converted), slice_of(rules)); });
  return {types.begin(), types.end()};
}

}  // namespace fst
