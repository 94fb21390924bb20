// Script class for the source of an update, and frames of new deltas.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "change.h"
#include "checkpoint.h"
#include "fst/rust/bridge.rs.h"
#include "select.h"
#include "version.h"

namespace fst {

// `torch.classes.fst.UpdateSource`: one open checkpoint, or open deltas, the oldest first. Opening reads indices and
// headers, and checks that deltas are valid and follow each other. With a request to verify, the frames of deltas are
// read and compared, too. All methods may be called concurrently.
class OpenUpdateSource : public torch::CustomClassHolder {
 public:
  // Numbers of each tensor.
  using Numbers = std::vector<std::vector<int64_t>>;

  explicit OpenUpdateSource(Strings paths, const OpenOptions& options = {});
  explicit OpenUpdateSource(OpenedUpdate opened) : opened_(std::move(opened)), is_verified_(false) {}

  // Returns the deltas of another object, followed by these.
  c10::intrusive_ptr<OpenUpdateSource> after(const c10::intrusive_ptr<OpenUpdateSource>& older) const;

  // Returns the whole checkpoint.
  c10::intrusive_ptr<OpenCheckpoint> checkpoint() const;

  // Computes the changes of tensors of these names, without writing them. `old` has their values in the base version,
  // on any device and with any strides. `shapes` has the shapes of the checkpoint's tensors. Where `ranges` is not
  // empty, it has a start, a length and a step for each dimension, and the old values come from this index region.
  // The results are on the devices of the old values. `limit_bytes` bounds the memory for decoding, unless it is
  // negative.
  //
  // Throws if a frame is malformed, if the new values of a whole tensor differ from their checksum, or if the new
  // values of a tensor that has several names differ.
  std::vector<Change> changes(Strings names, const std::vector<at::Tensor>& old, const Numbers& shapes,
                              const Numbers& ranges, int64_t limit_bytes = -1) const;

  const UpdateSource& core() const { return *opened_.source; }

  // Whether it is a chain of deltas, and the version of the tensors after the update, if there is one.
  const OpenedUpdate& opened() const { return opened_; }

 private:
  const OpenedUpdate opened_;
  const bool is_verified_;
};

using OptionalCheckpoint = std::optional<c10::intrusive_ptr<OpenCheckpoint>>;

// Encodes the changes of tensors for a new delta. Returns their frames as uint8, and the checksums of the new values.
// Both are empty for a tensor that does not change. The values of tensors on meta are read from local files.
std::tuple<std::vector<at::Tensor>, std::vector<std::string>> encode_delta(
    Strings names, at::TensorList old, at::TensorList changed, const std::string& encoding, const std::string& checksum,
    const OptionalCheckpoint& old_files, const OptionalCheckpoint& changed_files);

}  // namespace fst
