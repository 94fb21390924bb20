// Writes of staged changes to existing tensors.
#pragma once

#include <ATen/core/List.h>
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

// Writes changes on the current streams of their devices: one launch for up to 85 changes of a GPU. Checks all of them
// before the first write, and reads no files. Writes to contiguous tensors on the CPU cannot fail after that.
//
// Values and positions are both in host memory, or both on the device of the target. Other streams that write them must
// be complete, or the current stream must wait for them. They may be freed after the call: pinned memory of PyTorch and
// memory of a GPU are not reused before the stream has read them.
//
// The caller guarantees what only the elements would show: positions ascend without duplicates and are less than the
// number of elements of the target, and no targets share memory.
void write_changes(const std::vector<Change>& changes);

// Returns one change for each target. Throws if the lists differ in length.
std::vector<Change> changes_of(at::TensorList targets, const c10::List<std::optional<at::Tensor>>& positions,
                               at::TensorList values);

}  // namespace fst
