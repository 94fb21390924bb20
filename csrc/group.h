// Ranks that load a checkpoint together: who reads what, and what one rank does.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "filler.h"
#include "fst/rust/bridge.rs.h"

namespace fst {

// `torch.classes.fst.GroupPlan`. Made of headers and of what each rank wants, and the same on every rank.
class OpenGroupPlan : public torch::CustomClassHolder {
 public:
  // `wants_of` has for each rank the index of its list among `wants`; rank/group/want.rs tells what the numbers mean.
  // Ranks with the same number in `caches` map the files out of one page cache, if it is not negative.
  OpenGroupPlan(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, const std::vector<at::Tensor>& wants,
                const std::vector<int64_t>& wants_of, const std::vector<int64_t>& caches, const std::string& strategy,
                int64_t window_bytes);

  int64_t windows() const { return static_cast<int64_t>(plan_->windows()); }

  // "none", "exchange" or "gather": what the ranks do after they have read a window.
  std::string collective(int64_t window) const;

  // The bytes for each rank and from each rank; for a gathering the bytes of everyone's segment, and nothing.
  std::vector<std::vector<int64_t>> splits(int64_t rank, int64_t window) const;

  // File, first byte and end of everything that a rank reads in a window.
  std::vector<int64_t> reads(int64_t rank, int64_t window) const;

  // [ranks, ranks]: what each sends to each.
  at::Tensor sent_bytes(int64_t window) const;

  // Whether every rank reads its share of this tensor for itself.
  bool is_own(const std::string& name) const;

  std::string digest() const { return std::to_string(plan_->digest()); }

  rust::Box<RankPlan> plan_for(int64_t rank) const;

  // The same number, if there is such a window.
  size_t check_window(int64_t window) const;

 private:
  size_t check_rank(int64_t rank) const;

  const rust::Box<GroupPlan> plan_;
};

// `torch.classes.fst.GroupLoad`: what one rank does of a plan, window after window.
class GroupLoad : public torch::CustomClassHolder {
 public:
  using Outputs = c10::List<std::optional<at::Tensor>>;

  // `out` has a contiguous tensor of `device` for each share of the rank, in the order of its wants. What is none is
  // not filled.
  GroupLoad(const c10::intrusive_ptr<OpenGroupPlan>& plan, int64_t rank, const Outputs& out, c10::Device device);

  // Reads what the rank keeps into `out`, and what it sends into `send`.
  void read(int64_t window, const at::Tensor& send);

  // Brings what has come into `out`.
  void place(int64_t window, const at::Tensor& received);

  // Ends the load; what it filled is ready on the current stream.
  void finish();

 private:
  const c10::intrusive_ptr<OpenGroupPlan> plan_;
  const rust::Box<RankPlan> rank_plan_;
  const rust::Box<Selection> selection_;
  const rust::Vec<Spec> specs_;
  const rust::Vec<Spec> shares_;
  const c10::Device device_;
  // As rows of elements, or undefined.
  std::vector<at::Tensor> out_;
  Filler filler_;
};

}  // namespace fst
