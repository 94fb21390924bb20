// Dtypes that a load requests, by names and patterns of tensors. The core decides which rule applies to a tensor.
#pragma once

#include <ATen/core/List.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "select.h"

namespace fst {

using DtypeRules = rust::Vec<DtypeRule>;
using Patterns = std::optional<c10::List<std::string>>;
using DtypeNumbers = std::optional<std::vector<int64_t>>;

// Returns the rules of arguments: `dtypes[i]` is the c10::ScalarType number for `patterns[i]`, or -1 to keep the stored
// dtype, and `dtype` is for all tensors that match no pattern.
DtypeRules dtype_rules(std::optional<c10::ScalarType> dtype, const Patterns& patterns, const DtypeNumbers& dtypes);

// Returns the c10::ScalarType number of each result of a load. Only floating-point tensors of 16 bits or more are cast.
std::vector<int8_t> target_types(const Selection& selection, const DtypeRules& rules);

// Returns the c10::ScalarType number that rules request for each of all names, or -1.
std::vector<int64_t> requested_types(Strings names, const DtypeRules& rules);

}  // namespace fst
