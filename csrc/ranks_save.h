// Script classes for saves by a group of ranks.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "error.h"
#include "fst/rust/bridge.rs.h"
#include "memory_streams.h"
#include "select.h"

namespace fst {

// `torch.classes.fst.SavePlan`: plan of a save by a group of ranks. Computed from the descriptions of all tensors, and
// identical on every rank.
class OpenSavePlan : public torch::CustomClassHolder {
 public:
  // `numbers` has the layouts and the tensors, encoded as rust/bridge/ranks_save.rs describes. `request` is in JSON.
  OpenSavePlan(const at::Tensor& numbers, const std::string& request);

  const SavePlan& core() const { return *plan_; }

 private:
  const rust::Box<SavePlan> plan_;
};

// Elements of the local tensor of a rank, in row-major order from the element `first` on. All of them, or those that
// are used. The tensor is undefined where the rank has no elements.
struct LocalElements {
  at::Tensor tensor;
  int64_t first = 0;
};

// `torch.classes.fst.RanksSave`: executes a plan on one rank, window by window. The calls are ordered on the stream
// that was the current one when it was created.
class RanksSave : public torch::CustomClassHolder {
 public:
  using Tensors = c10::List<std::optional<at::Tensor>>;

  // Opens the files at `paths`, which a `CheckpointSave` has created, with the id of the upload of each.
  // `tensors` has the local tensor of the rank for each tensor of the plan, or None where it holds no elements. A 1-d
  // tensor of the used elements may stand for the local tensor.
  RanksSave(const c10::intrusive_ptr<OpenSavePlan>& plan, int64_t rank, Strings paths, Strings uploads,
            const Tensors& tensors);

  // Fills `send` with the bytes for other ranks.
  void read(int64_t window, const at::Tensor& send);

  // Writes the rank's blocks of the window.
  void unpack(int64_t window, const at::Tensor& received);

  RankSave& core() { return *save_; }

 private:
  // Local tensors in the order of the plan, and their elements.
  const rust::Vec<LocalTensor> specs_;
  const std::vector<LocalElements> tensors_;
  DeviceStreams streams_;
  rust::Box<RankSave> save_;
};

}  // namespace fst
