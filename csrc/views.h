// CPU tensors that are views of mapped files.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "fst/rust/bridge.rs.h"

namespace fst {

// Private mappings of files. Each view keeps only its own bytes mapped.
class MappedFiles {
 public:
  // Maps the files of a selection. Only tensors whose target dtype is the stored one become views. With `is_verified`,
  // their digests are compared.
  MappedFiles(const Selection& selection, const rust::Vec<Spec>& specs, bool is_verified);

  bool is_view(size_t index) const { return mapped_.addresses[index] != 0; }

  // Returns a view of the mapping, or an undefined tensor if the tensor must be read.
  at::Tensor view(size_t index, const Spec& spec) const;

 private:
  MappedViews mapped_;
};

// Returns whether the elements of a tensor are in a file that fst has mapped. An access ends the process with SIGBUS if
// the file has become shorter, so fst reads them with system calls, which fail.
bool is_mapped(const at::Tensor& tensor);

// Returns the tensor itself, or, if it is mapped, one with the same values, sizes and strides in new memory. `name` is
// the tensor's name in errors.
at::Tensor in_memory(const std::string& name, const at::Tensor& tensor);

}  // namespace fst
