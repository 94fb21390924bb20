// Loads selected bytes into tensors of one device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fst/rust/bridge.rs.h"

namespace fst {

// Transfer of bytes of a selection to tensors of one device. Collect outputs with `add` and load them with `run`, as
// often as needed. After `finish`, all outputs are ready on the current stream.
class DeviceTransfer {
 public:
  DeviceTransfer(const Selection& selection, const rust::Vec<Spec>& specs, c10::Device device)
      : selection_(selection), specs_(specs), device_(device) {}

  // Opens the device and the readers, unless they are open, and returns the transfer. The other functions do it
  // otherwise.
  AnyTransfer& open();

  // Returns the windows in which a transfer to a GPU is fastest, as the number of outputs before the end of each: the
  // caller adds the outputs of a window in this order, starts it, and allocates the outputs of the next one.
  rust::Vec<size_t> window_ends(const rust::Vec<size_t>& order);

  // Adds an output for the elements of the selection's tensor `index` that begin at byte `begin`. The output determines
  // their number. Its strides and dtype are arbitrary.
  void add(size_t index, uint64_t begin, const at::Tensor& tensor);

  // Adds an output address for the stored bytes `begin` to `end` of a tensor.
  void add_bytes(size_t index, uint64_t begin, uint64_t end, uint64_t address);

  // Starts to load the outputs that were added, except those that PyTorch casts or copies, which remain for `run`.
  void start();

  // Loads all outputs that were added since the last call.
  void run();

  void finish();

 private:
  struct Output {
    size_t index;
    uint64_t begin;
    at::Tensor tensor;
  };

  bool is_direct(const AnyTransfer& transfer, const Output& output) const;
  uint64_t stored_bytes(const Output& output) const;
  Destination destination(const Output& output) const;
  void fill_through_scratch(AnyTransfer& transfer, const std::vector<Output>& outputs) const;
  uint64_t prepare(AnyTransfer& transfer, const std::vector<Destination>& destinations,
                   uint64_t scratch_bytes_max) const;
  void fill(AnyTransfer& transfer, const std::vector<Destination>& destinations) const;

  const Selection& selection_;
  const rust::Vec<Spec>& specs_;
  const c10::Device device_;
  // Tensors of windows and the scratch memory that windows share. The transfer, which is destroyed before, waits for
  // the copies.
  std::vector<at::Tensor> in_flight_;
  at::Tensor scratch_;
  std::optional<rust::Box<AnyTransfer>> transfer_;
  std::vector<Output> outputs_;
  std::vector<Destination> byte_outputs_;
};

}  // namespace fst
