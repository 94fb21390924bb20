// Script classes for loads of a checkpoint by a group of ranks.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "error.h"
#include "fst/rust/bridge.rs.h"
#include "transfer.h"

namespace fst {

// `torch.classes.fst.LoadPlan`: plan of a load by a group of ranks. Computed from the headers and the shard requests
// of all ranks, and identical on every rank.
class OpenLoadPlan : public torch::CustomClassHolder {
 public:
  // `numbers` has lists of shard requests, encoded as rust/ranks/load/shard.rs describes. `request` is in JSON.
  OpenLoadPlan(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, const at::Tensor& numbers,
               const std::string& request);

  // Loads some shards of a rank, given the indices of its requests, without the other ranks.
  std::vector<at::Tensor> load_own(const LoadOptions& options, int64_t rank, const std::vector<int64_t>& items) const;

  // Overwrites tensors with some shards of a rank, without the other ranks.
  void load_own_into(int64_t rank, const std::vector<int64_t>& items, const std::vector<at::Tensor>& out) const;

  const LoadPlan& core() const { return *plan_; }

 private:
  rust::Box<Selection> select_own(int64_t rank, const std::vector<int64_t>& items) const;

  const rust::Box<LoadPlan> plan_;
};

// `torch.classes.fst.RanksLoad`: executes a plan on one rank, window by window.
class RanksLoad : public torch::CustomClassHolder {
 public:
  using Outputs = c10::List<std::optional<at::Tensor>>;

  // `out` contains a contiguous tensor on `device` for each shard of the rank, in the order of its requests. Shards
  // with None are not loaded.
  RanksLoad(const c10::intrusive_ptr<OpenLoadPlan>& plan, int64_t rank, const Outputs& out, c10::Device device);

  // Reads the rank's own bytes into `out`, and the bytes for other ranks into `send`.
  void read(int64_t window, const at::Tensor& send);

  // Copies received bytes to `out`.
  void unpack(int64_t window, const at::Tensor& received);

  // Ends the load. `out` is ready on the current stream.
  void finish();

 private:
  const RankLoad plan_;
  const rust::Vec<Spec> specs_;
  const c10::Device device_;
  // Flat views of the outputs. Undefined for shards that are not loaded.
  std::vector<at::Tensor> out_;
  DeviceTransfer transfer_;
};

}  // namespace fst
