// Changes of existing tensors, staged before they are written.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fst {

// Change of an existing tensor, staged before it is written.
struct Change {
  at::Tensor target;
  // Numbers of the elements that change, ascending, uint32 of one dimension. Undefined if all elements change.
  at::Tensor positions;
  // New values of these elements, of one dimension, or of the whole target, in its shape. They have its dtype.
  at::Tensor values;
};

// Writes changes on the current streams of their devices. Reads no files.
void write_changes(const std::vector<Change>& changes);

}  // namespace fst
