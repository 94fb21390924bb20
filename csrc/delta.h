// Script class for deltas: the elements of tensors that change from one version of a checkpoint to a later one.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "change.h"
#include "encryption_key.h"
#include "fst/rust/bridge.rs.h"
#include "select.h"

namespace fst {

// Returns the metadata of the index that a path or URL leads to. Empty if it leads to no index.
c10::Dict<std::string, std::string> index_metadata_of(const std::string& path);

// `torch.classes.fst.DeltaChain`: open deltas, the oldest first. Opening reads their indices and headers, and checks
// that they are valid and follow each other. All methods may be called concurrently.
class DeltaChain : public torch::CustomClassHolder {
 public:
  // Numbers of each tensor.
  using Numbers = std::vector<std::vector<int64_t>>;

  explicit DeltaChain(Strings paths, const OpenEncryptionKey::Optional& key = std::nullopt);

  // Return the version that the first delta changes, and the one that the last results in.
  std::string base_version() const { return std::string(chain_->base_version()); }
  std::string version() const { return std::string(chain_->version()); }

  // Throws a version error unless all tensors have the version that the first delta changes. `names` are for errors.
  void check_base(at::TensorList tensors, const std::optional<std::vector<std::string>>& names) const;

  // Returns the names of the tensors that change, in the order of the deltas and of the bytes in their files.
  std::vector<std::string> names() const;

  // Computes the changes of tensors of these names, without writing them. `old` has their values in the base version,
  // on any device and with any strides. `shapes` has the shapes of the checkpoint's tensors. Where `ranges` is not
  // empty, it has a start, a length and a step for each dimension, and the old values are those of this index region.
  // The results are on the devices of the old values. Names in the order of `names` are read in the order of the files.
  //
  // Throws if a frame is malformed, or if the new values of a whole tensor differ from their checksum.
  std::vector<Change> changes(Strings names, const std::vector<at::Tensor>& old, const Numbers& shapes,
                              const Numbers& ranges) const;

  // Returns the names of the tensors whose changes were computed for a part of the tensor, which no checksum covers.
  std::vector<std::string> unverified() const;

 private:
  const rust::Box<Deltas> chain_;
  mutable std::mutex mutex_;
  mutable std::set<std::string> unverified_;
};

// Encodes the changes of tensors for a new delta. Returns their frames as uint8, and the checksums of the new values.
// Both are empty for a tensor that does not change.
std::tuple<std::vector<at::Tensor>, std::vector<std::string>> encode_delta(Strings names, at::TensorList old,
                                                                           at::TensorList changed,
                                                                           const std::string& encoding,
                                                                           const std::string& checksum);

}  // namespace fst
