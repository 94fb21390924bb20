// Tensors of one device, filled with bytes of a selection.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "fst/rust/bridge.rs.h"

namespace fst {

// What is added is filled together, as often as there is more to add. It is ready on the current stream once `finish`
// has returned.
class Filler {
 public:
  Filler(const Selection& selection, const rust::Vec<Spec>& specs, c10::Device device)
      : selection_(selection), specs_(specs), device_(device) {}

  // The elements of the selection's tensor `index` from byte `begin` on, as many as `tensor` has. Its strides and its
  // dtype may be any.
  void add(size_t index, uint64_t begin, const at::Tensor& tensor);

  // The stored bytes `begin` to `end` of a tensor, as they are.
  void add_bytes(size_t index, uint64_t begin, uint64_t end, uint64_t address);

  void fill();

  void finish();

 private:
  // Elements of a tensor of the selection, and where they go.
  struct Target {
    size_t index;
    uint64_t begin;
    at::Tensor tensor;
  };

  bool is_direct(const Target& target) const;
  uint64_t stored_bytes(const Target& target) const;
  Destination destination(const Target& target) const;
  void fill_converted(const std::vector<Target>& converted);
  rust::Box<AnyTransfer> open() const;
  void fill(const std::vector<Destination>& destinations);

  const Selection& selection_;
  const rust::Vec<Spec>& specs_;
  const c10::Device device_;
  std::optional<rust::Box<AnyTransfer>> transfer_;
  std::vector<Target> targets_;
  std::vector<Destination> bytes_;
};

}  // namespace fst
