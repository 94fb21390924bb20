#include "save.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "elements.h"
#include "error.h"
#include "load.h"

namespace fst {

namespace {

void check(const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](const std::string& message) {
    throw_invalid_argument("tensor \"" + name + "\": " + message + "; nothing was written");
  };
  if (!tensor.defined()) {
    refuse("is undefined");
  }
  if (tensor.layout() != at::kStrided) {
    refuse(c10::str("has the layout ", tensor.layout(), ", but only dense tensors can be saved; use to_dense()"));
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    refuse("is on " + tensor.device().str() + ", but only cpu and cuda tensors can be saved");
  }
}

// The devices that tensors lie on, each with its current stream.
class DeviceStreams {
 public:
  explicit DeviceStreams(at::TensorList tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (index_of(tensor.device()) == devices_.size()) {
        devices_.push_back(tensor.device());
        streams_.push_back(device_stream_of(tensor));
      }
    }
  }

  size_t index_of(c10::Device device) const {
    return std::find(devices_.begin(), devices_.end(), device) - devices_.begin();
  }

  rust::Slice<const DeviceStream> all() const { return {streams_.data(), streams_.size()}; }

 private:
  std::vector<c10::Device> devices_;
  std::vector<DeviceStream> streams_;
};

// Hands the bytes of tensors to the core in the order of the file.
class Appender {
 public:
  Appender(rust::Box<AnySave>& save, const DeviceStreams& streams) : save_(save), streams_(streams) {}

  void add(const at::Tensor& tensor) {
    if (is_plain(tensor)) {
      push(tensor);
      return;
    }
    split(tensor, tensor.element_size(), [&](const at::Tensor& part, uint64_t) {
      if (copied_bytes_ + part.nbytes() > kScratchBytes) {
        flush();
      }
      auto copy = at::empty(part.sizes(), part.options().memory_format(at::MemoryFormat::Contiguous));
      copy_elements(copy, part);
      push(copy);
      copied_bytes_ += copy.nbytes();
      copies_.push_back(std::move(copy));
    });
  }

  void flush() {
    call_core([&] { save_->append(rust::Slice<const Extent>(extents_.data(), extents_.size())); });
    extents_.clear();
    copies_.clear();
    copied_bytes_ = 0;
  }

 private:
  void push(const at::Tensor& tensor) {
    if (tensor.nbytes() > 0) {
      const auto address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
      extents_.push_back(Extent{streams_.index_of(tensor.device()), address, tensor.nbytes()});
    }
  }

  rust::Box<AnySave>& save_;
  const DeviceStreams& streams_;
  std::vector<Extent> extents_;
  // Of parts of tensors that do not lie in memory as they are. They live until they have been written.
  std::vector<at::Tensor> copies_;
  uint64_t copied_bytes_ = 0;
};

}  // namespace

NewTensor described(const std::string& name, const at::Tensor& tensor) {
  check(name, tensor);
  rust::Vec<int64_t> shape;
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), std::back_inserter(shape));
  return NewTensor{to_rust(name), static_cast<int8_t>(tensor.scalar_type()), std::move(shape)};
}

std::vector<MetadataEntry> metadata_entries_of(const Texts& metadata) {
  std::vector<MetadataEntry> entries;
  if (metadata) {
    for (const auto& entry : *metadata) {
      entries.push_back(MetadataEntry{to_rust(entry.key()), to_rust(entry.value())});
    }
  }
  return entries;
}

DeviceStream device_stream_of(const at::Tensor& tensor) {
  const auto ordinal = tensor.is_cuda() ? tensor.device().index() : -1;
  return DeviceStream{ordinal, native_handle(current_stream(tensor.device()))};
}

void save_file(at::TensorList tensors, Strings names, const std::string& path, const Texts& metadata) {
  if (tensors.size() != names.size()) {
    throw_invalid_argument(
        c10::str(tensors.size(), " tensors, but ", names.size(), " names; give one for each; nothing was written"));
  }
  std::vector<NewTensor> all;
  all.reserve(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    all.push_back(described(names.get(index), tensors[index]));
  }
  const auto entries = metadata_entries_of(metadata);
  const auto target = to_rust(path);
  const DeviceStreams streams(tensors);
  auto save = call_core([&] {
    return begin_save(target, rust::Slice<const NewTensor>(all.data(), all.size()), slice_of(entries),
                      metadata.has_value(), streams.all());
  });
  Appender appender(save, streams);
  for (const size_t index : save->order()) {
    appender.add(tensors[index]);
  }
  appender.flush();
  call_core([&] { finish_save(std::move(save)); });
}

}  // namespace fst
