// Casts and copies of tensor elements.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "tensors.h"

namespace fst {

// Returns whether the values of the tensor are contiguous in memory, with no pending conjugation or negation.
bool is_plain(const at::Tensor& tensor);

// Views a tensor as integers of the same size, or returns it if there are none: complex numbers of 16 bytes. Every
// device can copy integers, and the copy preserves NaNs.
at::Tensor as_bits(const at::Tensor& tensor);

// Copies all elements. If the dtypes are equal, the copy preserves the bits of NaNs.
void copy_elements(const at::Tensor& target, const at::Tensor& source, bool non_blocking = true);

// Returns a contiguous copy on the device of the tensor.
at::Tensor contiguous_copy(const at::Tensor& tensor, bool non_blocking = true);

// Splits a tensor into views and calls `use` with each of them and the number of elements before it. A view takes at
// most this number of bytes, with `element_bytes` for each element.
void split(const at::Tensor& tensor, uint64_t element_bytes,
           const std::function<void(const at::Tensor&, uint64_t)>& use, uint64_t bytes_max = kScratchBytes);

// Orders devices, for use as keys of a map.
struct DeviceOrder {
  bool operator()(c10::Device a, c10::Device b) const {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  }
};

// Batch of casts and copies into contiguous tensors, and of writes by position. Runs one call per device.
class CastBatch {
 public:
  // Adds a cast. The elements of dtype `from` at `source` are on the device of `target`, with any alignment.
  void add(size_t index, uint64_t source, c10::ScalarType from, const at::Tensor& target);

  // Adds a write of elements to positions of the target. All three tensors are contiguous and on one device.
  void add_put(size_t index, const at::Tensor& positions, const at::Tensor& values, const at::Tensor& target);

  // Runs all of them. Where the core has no implementation, `fallback` does the work with the given index.
  void run(const std::function<void(size_t)>& fallback) const;

 private:
  struct DeviceBatch {
    std::vector<Conversion> conversions;
    std::vector<size_t> indices;
  };

  void push(size_t index, c10::Device device, const Conversion& conversion);

  std::map<c10::Device, DeviceBatch, DeviceOrder> batches_;
};

// Throws unless casts to `dtype` exist.
void check_cast_target(c10::ScalarType dtype);

// Operator fst::cast. Returns new tensors, each on the device of its source.
std::vector<at::Tensor> cast(at::TensorList tensors, c10::ScalarType dtype);

// Autograd kernel of fst::cast. Gradients are cast back to the dtypes of the inputs.
std::vector<at::Tensor> cast_with_gradients(at::TensorList tensors, c10::ScalarType dtype);

// Operator fst::scatter. Creates tensors from the raw bytes in `bytes`. Tensor i begins at byte `offsets[i]` and has
// the dtype with the c10::ScalarType number `dtypes[i]`. Its shape is the next `ranks[i]` entries of `sizes`.
// Floating-point tensors of 16 bits or more are cast to `dtype`, if it is given.
std::vector<at::Tensor> scatter(const at::Tensor& bytes, c10::IntArrayRef offsets, c10::IntArrayRef dtypes,
                                c10::IntArrayRef sizes, c10::IntArrayRef ranks, std::optional<c10::ScalarType> dtype);

}  // namespace fst
