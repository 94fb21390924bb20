// Memory that a save reads: devices, each with its current stream, and mapped files.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <rust/cxx.h>

#include <cstddef>
#include <vector>

#include "fst/rust/bridge.rs.h"

namespace fst {

// Returns whether the core reads a tensor in a mapped file. One that is not plain is copied first.
bool is_read_mapped(const at::Tensor& tensor);

// Returns the memory of a tensor with its current stream.
DeviceStream device_stream_of(const at::Tensor& tensor);

// Memory of a list of tensors, each with its current stream.
class DeviceStreams {
 public:
  DeviceStreams() = default;

  explicit DeviceStreams(at::TensorList tensors) {
    for (const at::Tensor& tensor : tensors) {
      add(tensor);
    }
  }

  // Returns the memory of all tensors on the CPU, of which the core reads some in mapped files.
  static DeviceStreams of_cpu();

  // Adds the memory of a tensor. Returns its index.
  size_t add(const at::Tensor& tensor);

  // Returns the index of the memory in which the core reads a tensor, or the copies of one that is not plain.
  size_t index_of(const at::Tensor& tensor) const;

  c10::Device device(size_t index) const { return devices_[index]; }

  rust::Slice<const DeviceStream> all() const;

 private:
  std::vector<c10::Device> devices_;
  std::vector<DeviceStream> streams_;
};

}  // namespace fst
