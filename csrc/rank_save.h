// Script classes for saves by a group of ranks.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
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
  using MetadataOfFiles = c10::List<c10::Dict<std::string, std::string>>;

  // `numbers` has the layouts and the tensors, encoded as rust/bridge/rank_save.rs describes. `metadata` has the
  // metadata of each file. Empty ones are left out. A block, which has one writer, is a part of an object if
  // the files have parts.
  OpenSavePlan(Strings names, const at::Tensor& numbers, const MetadataOfFiles& metadata, int64_t ranks,
               int64_t window_bytes, bool has_parts);

  int64_t windows() const { return static_cast<int64_t>(plan_->windows()); }

  // Returns the collective that follows the reads of a window: "none" or "exchange".
  std::string collective(int64_t window) const;

  // Returns the bytes sent to each rank and the bytes received from each rank.
  std::vector<std::vector<int64_t>> splits(int64_t rank, int64_t window) const;

  // Returns the elements of each local tensor that a rank writes or sends, in row-major order: the first one, and their
  // count.
  std::vector<std::vector<int64_t>> used_elements(int64_t rank) const;

  // Returns the length of each file.
  std::vector<int64_t> file_bytes() const;

  // Returns whether a file has digests. The first rank seals the headers then.
  bool has_digests() const { return plan_->has_digests(); }

  // Returns a hash that is equal on two ranks if their plans are equal.
  std::string digest() const { return std::to_string(plan_->digest()); }

  const SavePlan& plan() const { return *plan_; }

  // Return the number as an index. Throw if it is out of range.
  size_t check_rank(int64_t rank) const { return check_index("rank", rank, plan_->ranks(), "the group"); }
  size_t check_window(int64_t window) const { return check_index("window", window, plan_->windows(), "the plan"); }

 private:
  const rust::Box<SavePlan> plan_;
};

// Elements of the local tensor of a rank, in row-major order from the element `first` on. All of them, or those that
// are used. The tensor is undefined where the rank has no elements.
struct LocalElements {
  at::Tensor tensor;
  int64_t first = 0;
};

// `torch.classes.fst.GroupSave`: executes a plan on one rank, window by window. The calls are ordered on the stream
// that was the current one when it was created.
class GroupSave : public torch::CustomClassHolder {
 public:
  using Tensors = c10::List<std::optional<at::Tensor>>;
  // File, index and id of a part of an object.
  using SentParts = std::vector<std::tuple<int64_t, int64_t, std::string>>;

  // Opens the files at `paths`, which a `CheckpointSave` has created, with the id of the upload of each.
  // `tensors` has the local tensor of the rank for each tensor of the plan, or None where it holds no elements. A 1-d
  // tensor of the used elements may stand for the local tensor.
  GroupSave(const c10::intrusive_ptr<OpenSavePlan>& plan, int64_t rank, Strings paths, Strings uploads,
            const Tensors& tensors);

  // Fills `send` with the bytes for other ranks.
  void read(int64_t window, const at::Tensor& send);

  // Writes the rank's blocks of the window.
  void unpack(int64_t window, const at::Tensor& received);

  // Returns the hashes of what the rank has written, as bytes on the CPU. Empty if no file has digests.
  at::Tensor hashes();

  // Writes the headers of files with digests, given the hashes of all other ranks. Only the first rank does so.
  void seal(const at::Tensor& hashes);

  // Flushes what the rank has written, and closes the files. Returns the parts of objects that it has sent.
  SentParts finish();

 private:
  RankSave& save();

  const c10::intrusive_ptr<OpenSavePlan> plan_;
  const int64_t rank_;
  std::vector<LocalElements> tensors_;
  DeviceStreams streams_;
  // Empty after `finish`.
  std::optional<rust::Box<RankSave>> save_;
};

}  // namespace fst
