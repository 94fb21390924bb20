// Writes of staged changes to existing tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace fst {

// Change of an existing tensor, staged before it is written.
struct Change {
  at::Tensor target;
  // uint32 numbers of the elements that change, ascending, 1-D. Undefined if all elements change.
  at::Tensor positions;
  // New values of these elements (1-D), or of the whole target (its shape), of its dtype.
  at::Tensor values;
};

// Writes changes on the current streams of their devices. Checks all of them before the first write, and reads no
// files. Values and positions are in host memory or on the device of the target. The streams that have written them
// must be complete, or the current stream must wait for them.
//
// The caller guarantees what only the elements would show: positions ascend without duplicates and are less than the
// number of elements of the target, and no targets share memory.
void write_changes(const std::vector<Change>& changes);

// Operator fst::_write_changes. Writes one change for each target.
void write_change_lists(at::TensorList targets, const c10::List<std::optional<at::Tensor>>& positions,
                        at::TensorList values);

}  // namespace fst
