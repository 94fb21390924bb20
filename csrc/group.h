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

// `torch.classes.fst.GroupPlan`: plan of a load by a group of ranks. Computed from the headers and the shard requests
// of all ranks, and identical on every rank.
class OpenGroupPlan : public torch::CustomClassHolder {
 public:
  // `requests` contains lists of shard requests, encoded as rust/group/shard.rs describes. `list_of_rank` contains the
  // index of each rank's list. Ranks with the same non-negative number in `caches` map the files from one page cache.
  OpenGroupPlan(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, const std::vector<at::Tensor>& requests,
                const std::vector<int64_t>& list_of_rank, const std::vector<int64_t>& caches,
                const std::string& strategy, int64_t window_bytes);

  int64_t windows() const { return static_cast<int64_t>(plan_->windows()); }

  // Returns the collective that follows the reads of a window: "none", "exchange" or "gather".
  std::string collective(int64_t window) const;

  // Returns the bytes sent to each rank and the bytes received from each rank. For "gather", returns the bytes of each
  // rank's segment and an empty list.
  std::vector<std::vector<int64_t>> splits(int64_t rank, int64_t window) const;

  // Returns file, begin and end of each byte range that a rank reads in a window.
  std::vector<int64_t> reads(int64_t rank, int64_t window) const;

  // Returns a tensor of shape [ranks, ranks] with the bytes that each rank sends to each rank.
  at::Tensor sent_bytes(int64_t window) const;

  // Returns whether every rank takes its shard of this tensor from a page cache.
  bool is_cached(const std::string& name) const;

  // Returns the index and the number of the parts of the files that a rank compares with their digests before it loads.
  // Empty if it compares the bytes that it loads.
  std::vector<int64_t> part_to_verify(int64_t rank) const;

  // Loads some shards of a rank, given the indices of its requests, without the other ranks.
  std::vector<at::Tensor> load_own(const LoadOptions& options, int64_t rank, const std::vector<int64_t>& items) const;

  // Overwrites tensors with some shards of a rank, without the other ranks.
  void load_own_into(int64_t rank, const std::vector<int64_t>& items, const std::vector<at::Tensor>& out) const;

  std::string digest() const { return std::to_string(plan_->digest()); }

  rust::Box<RankPlan> plan_for(int64_t rank) const;

  // Returns the window as an index. Throws if it is out of range.
  size_t check_window(int64_t window) const { return check_index("window", window, plan_->windows(), "the plan"); }

 private:
  rust::Box<Selection> select_own(int64_t rank, const std::vector<int64_t>& items) const;

  size_t check_rank(int64_t rank) const { return check_index("rank", rank, plan_->ranks(), "the group"); }

  const rust::Box<GroupPlan> plan_;
};

// `torch.classes.fst.GroupLoad`: executes a plan on one rank, window by window.
class GroupLoad : public torch::CustomClassHolder {
 public:
  using Outputs = c10::List<std::optional<at::Tensor>>;

  // `out` contains a contiguous tensor on `device` for each shard of the rank, in the order of its requests. Shards
  // with None are not loaded.
  GroupLoad(const c10::intrusive_ptr<OpenGroupPlan>& plan, int64_t rank, const Outputs& out, c10::Device device);

  // Reads the rank's own bytes into `out`, and the bytes for other ranks into `send`.
  void read(int64_t window, const at::Tensor& send);

  // Copies received bytes to `out`.
  void unpack(int64_t window, const at::Tensor& received);

  // Ends the load. `out` is ready on the current stream.
  void finish();

 private:
  const c10::intrusive_ptr<OpenGroupPlan> plan_;
  const rust::Box<RankPlan> rank_plan_;
  const rust::Box<Selection> selection_;
  const rust::Vec<Spec> specs_;
  const rust::Vec<Spec> shards_;
  const c10::Device device_;
  // Flat views of the outputs. Undefined for shards that are not loaded.
  std::vector<at::Tensor> out_;
  DeviceTransfer transfer_;
};

}  // namespace fst
