#include "memory_streams.h"

#include "cast.h"
#include "error.h"
#include "tensors.h"
#include "views.h"

namespace fst {

bool is_read_mapped(const at::Tensor& tensor) { return is_plain(tensor) && is_mapped(tensor); }

DeviceStream device_stream_of(const at::Tensor& tensor) {
  const auto ordinal = tensor.is_cuda() ? tensor.device().index() : -1;
  return DeviceStream{ordinal, current_stream_handle(tensor.device()), is_read_mapped(tensor)};
}

DeviceStreams DeviceStreams::of_cpu() {
  DeviceStreams streams;
  for (const bool is_mapped : {false, true}) {
    streams.devices_.emplace_back(at::kCPU);
    streams.streams_.push_back(DeviceStream{-1, current_stream_handle(at::kCPU), is_mapped});
  }
  return streams;
}

size_t DeviceStreams::add(const at::Tensor& tensor) {
  const size_t index = index_of(tensor);
  if (index == devices_.size()) {
    devices_.push_back(tensor.device());
    streams_.push_back(device_stream_of(tensor));
  }
  return index;
}

size_t DeviceStreams::index_of(const at::Tensor& tensor) const {
  size_t index = 0;
  while (index < devices_.size() &&
         (devices_[index] != tensor.device() || streams_[index].is_mapped != is_read_mapped(tensor))) {
    ++index;
  }
  return index;
}

rust::Slice<const DeviceStream> DeviceStreams::all() const { return slice_of(streams_); }

}  // namespace fst
