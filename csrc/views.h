// Tensors that need no copy on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fst/rust/bridge.rs.h"

namespace fst {

// Tensors that are views of mapped files. Each keeps its own bytes, and no others.
class MappedFiles {
 public:
  // Of tensors that are wanted with these dtypes, those can be views whose dtype is that of the file.
  MappedFiles(const Selection& selection, const std::vector<int8_t>& types);

  bool is_view(size_t index) const { return views_->address(index) != 0; }

  // Undefined where the tensor has to be read.
  at::Tensor view(size_t index, const Spec& spec) const;

 private:
  rust::Box<Views> views_;
};

}  // namespace fst
