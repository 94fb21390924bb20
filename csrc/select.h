// Selects tensors, and reads the arguments that open checkpoints or arguments that request their dtypes. The core
// decides which rule of a name or pattern applies to a tensor.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "encryption_key.h"
#include "fst/rust/bridge.rs.h"

namespace fst {

using Strings = const c10::List<std::string>&;

rust::Vec<rust::String> to_rust(Strings strings);

struct OpenOptions {
  // Digests that loads compare: none if it is empty, digests in the files if it is "digests", or from the manifest of
  // which it is the path or the text in JSON.
  std::string verify = {};
  // Key of encrypted files, or else one of the registered keys opens them. With a key, all files must be encrypted.
  OpenEncryptionKey::Optional key = std::nullopt;
  // Headers that another process exported. No header is read then.
  std::optional<at::Tensor> headers = std::nullopt;
  // Whether files that are not encrypted, or have a registered key, are accepted although there is a key.
  bool accepts_plain = false;
};

rust::Box<OpenRequest> request_of(const OpenOptions& options);

// What a load selects of a checkpoint: all tensors, or the named ones, or parts of these.
struct Selected {
  static Selected whole(Strings names) { return {.parts = Parts::Whole, .names = names}; }
  static Selected slices(Strings names, c10::IntArrayRef dims, c10::IntArrayRef starts, c10::IntArrayRef lengths) {
    return {Parts::Slices, names, starts, lengths, dims};
  }
  static Selected regions(Strings names, c10::IntArrayRef starts, c10::IntArrayRef lengths, c10::IntArrayRef steps) {
    return {Parts::Regions, names, starts, lengths, steps};
  }

  Parts parts = Parts::All;
  c10::List<std::string> names = c10::List<std::string>();
  c10::IntArrayRef starts = {};
  c10::IntArrayRef lengths = {};
  c10::IntArrayRef steps_or_dims = {};
};

rust::Box<Selection> select(const Checkpoint& checkpoint, const Selected& selected);

using DtypeRules = rust::Vec<DtypeRule>;
using Patterns = std::optional<c10::List<std::string>>;
using DtypeNumbers = std::optional<std::vector<int64_t>>;

// Returns the rules of arguments: `dtypes[i]` is the c10::ScalarType number for `patterns[i]`, or -1 to keep the stored
// dtype, and `dtype` is for all tensors that match no pattern.
DtypeRules dtype_rules(std::optional<c10::ScalarType> dtype, const Patterns& patterns, const DtypeNumbers& dtypes);

// Returns what a load with these rules allocates. Only floating-point tensors of 16 bits or more are cast.
rust::Vec<Spec> specs_of(const Selection& selection, const DtypeRules& rules = {});

}  // namespace fst
