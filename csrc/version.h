// Versions of the contents of tensors. They belong to storages, so that all views of a storage have the same version.
// All functions may be called concurrently.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fst {

// Name that an index or the caller gives to contents, or nothing if they have no name.
using Version = std::optional<std::string>;

// Returns the version that all tensors have. Throws a version error if they have different ones, or if an update that
// wrote bytes as they arrived has failed and no later load or update has succeeded. Ignores tensors without a storage.
// `names` are for errors.
Version version_of(at::TensorList tensors, const std::optional<std::vector<std::string>>& names);

// Sets the version of contents that are complete.
void set_version(at::TensorList tensors, const Version& version);

// Marks contents as a mixture of two versions, until `set_version` or `forget_version`.
void mark_torn(at::TensorList tensors);

// Removes the versions of tensors that a load has overwritten.
void forget_version(at::TensorList tensors);

// Returns a number for each tensor that changes with each write by fst from now on.
std::vector<uint64_t> writes_of(at::TensorList tensors);

// Counts a write to all tensors, and replaces their numbers, unless one of them has another number than in `writes`.
// Returns the index of that tensor then. Of several callers with the same numbers, one succeeds.
std::optional<size_t> begin_write(at::TensorList tensors, std::vector<uint64_t>& writes);

}  // namespace fst
