#include "save.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "tensors.h"
#include "views.h"

namespace fst {

namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& message) {
  throw_invalid_argument("tensor \"" + name + "\": " + message);
}

template <typename Describe>
std::vector<NewTensor> describe_all(at::TensorList tensors, Strings names, Describe&& describe) {
  check_counts(tensors.size(), "tensors", names.size(), "names; give one for each");
  std::vector<NewTensor> described;
  described.reserve(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    described.push_back(describe(names.get(index), tensors[index]));
  }
  return described;
}

std::vector<MetadataEntry> metadata_entries_of(const Metadata& metadata) {
  std::vector<MetadataEntry> entries;
  if (metadata) {
    for (const auto& entry : *metadata) {
      entries.push_back(MetadataEntry{to_rust(entry.key()), to_rust(entry.value())});
    }
  }
  return entries;
}

// Passes the bytes of tensors to the core in the order of the file.
class Appender {
 public:
  Appender(AnySave& save, const DeviceStreams& streams) : save_(save), streams_(streams) {}

  void add(const std::string& name, const at::Tensor& tensor) {
    if (is_plain(tensor)) {
      push(tensor);
      return;
    }
    split(in_memory(name, tensor), tensor.element_size(), [&](const at::Tensor& part, uint64_t) {
      if (copied_bytes_ + part.nbytes() > kScratchBytes) {
        flush();
      }
      auto copy = contiguous_copy(part);
      push(copy);
      copied_bytes_ += copy.nbytes();
      copies_.push_back(std::move(copy));
    });
  }

  void flush() {
    const auto extents = slice_of(extents_);
    // The core has read the memory when `append` returns.
    std::vector<at::Tensor> memory;
    std::vector<MemoryRange> scratch;
    for (const uint64_t bytes : save_.scratch_bytes(extents)) {
      memory.push_back(allocate_scratch(streams_.device(scratch.size()), [&](uint64_t) { return bytes; }));
      scratch.push_back(MemoryRange{mutable_address_of(memory.back()), memory.back().nbytes()});
    }
    call_core([&] { save_.append(extents, slice_of(scratch)); });
    extents_.clear();
    copies_.clear();
    copied_bytes_ = 0;
  }

 private:
  void push(const at::Tensor& tensor) {
    if (tensor.nbytes() > 0) {
      extents_.push_back(Extent{streams_.index_of(tensor), address_of(tensor), tensor.nbytes()});
    }
  }

  AnySave& save_;
  const DeviceStreams& streams_;
  std::vector<Extent> extents_;
  // Contiguous copies of parts of tensors, until they are written.
  std::vector<at::Tensor> copies_;
  uint64_t copied_bytes_ = 0;
};

}  // namespace

NewTensor describe_dense(const std::string& name, const at::Tensor& tensor) {
  if (!is_dense(tensor)) {
    refuse(name, describe_missing_memory(tensor));
  }
  rust::Vec<int64_t> shape;
  std::ranges::copy(tensor.sizes(), std::back_inserter(shape));
  NewTensor described{to_rust(name), static_cast<int8_t>(tensor.scalar_type()), std::move(shape)};
  if (tensor.is_quantized()) {
    // PyTorch allocates no memory for a copy from its options alone, but ends the process.
    call_core([&] { lay_out_file({&described, 1}, {}, false); });
  }
  return described;
}

NewTensor describe(const std::string& name, const at::Tensor& tensor) {
  auto described = describe_dense(name, tensor);
  if (tensor.is_meta()) {
    refuse(name, describe_missing_memory(tensor));
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    refuse(name, "is on " + tensor.device().str() + ", but only cpu and cuda tensors can be saved");
  }
  return described;
}

void Memory::check(const std::string& name, const at::Tensor& tensor) { describe(name, tensor); }

bool Memory::is_mapped(const at::Tensor& tensor) { return fst::is_mapped(tensor); }

at::Tensor Memory::copy(const std::string& name, const at::Tensor& tensor) {
  // Autograd does not record the copy.
  const at::AutoDispatchBelowADInplaceOrView guard;
  describe(name, tensor);
  auto held = in_memory(name, tensor);
  if (is_read_mapped(tensor)) {
    return held;
  }
  return contiguous_copy(held, /*non_blocking=*/false);
}

rust::Box<NewFile> describe_file(const std::string& path, const Metadata& metadata, const std::string& permissions_from,
                                 const OpenEncryptionKey::Optional& key) {
  const auto entries = metadata_entries_of(metadata);
  auto file = new_file(to_rust(path), to_rust(permissions_from), slice_of(entries), metadata.has_value());
  if (key) {
    file->encrypt_with((*key)->key());
  }
  return file;
}

void save_file(at::TensorList tensors, Strings names, const std::string& path, const Metadata& metadata,
               const std::string& permissions_from, const OpenEncryptionKey::Optional& key) {
  const auto described = describe_all(tensors, names, describe);
  const auto file = describe_file(path, metadata, permissions_from, key);
  const DeviceStreams streams(tensors);
  auto save = call_core([&] { return begin_save(*file, slice_of(described), streams.all()); });
  Appender appender(*save.save, streams);
  for (const size_t index : save.order) {
    appender.add(names.get(index), tensors[index]);
  }
  appender.flush();
  call_core([&] { finish_save(std::move(save.save)); });
}

FileSave::FileSave(const std::string& path, Strings names, const std::vector<at::Tensor>& likes,
                   const Metadata& metadata, const std::string& permissions_from,
                   const OpenEncryptionKey::Optional& key) {
  const auto described = describe_all(likes, names, describe_dense);
  const auto file = describe_file(path, metadata, permissions_from, key);
  save_.emplace(call_core([&] { return begin_save(*file, slice_of(described), streams_.all()); }));
}

FileSave::~FileSave() {
  if (getpid() != process_ && save_) {
    // A forked child has none of the threads, and the file belongs to the parent.
    (void)std::move(save_->save).into_raw();
  }
}

void FileSave::append(const std::vector<at::Tensor>& parts) {
  for (const at::Tensor& part : parts) {
    if (!part.is_cpu() || !is_plain(part)) {
      throw_invalid_argument("the parts of a file must be contiguous on the CPU");
    }
  }
  Appender appender(*save().save, streams_);
  for (const at::Tensor& part : parts) {
    appender.add("", part);
  }
  appender.flush();
}

void FileSave::close(bool discards) {
  if (discards || !save_) {
    save_.reset();
    return;
  }
  auto save = std::move(this->save().save);
  save_.reset();
  call_core([&] { finish_save(std::move(save)); });
}

NewSave& FileSave::save() {
  if (!save_ || getpid() != process_) {
    throw_invalid_argument("the save has ended, or belongs to another process; begin a new one");
  }
  return *save_;
}

at::Tensor serialize(at::TensorList tensors, Strings names, const Metadata& metadata) {
  // Autograd does not record the copies.
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto described = describe_all(tensors, names, describe_dense);
  const auto entries = metadata_entries_of(metadata);
  auto layout = call_core([&] { return lay_out_file(slice_of(described), slice_of(entries), metadata.has_value()); });
  const bool is_meta = std::ranges::any_of(tensors, [](const at::Tensor& tensor) { return tensor.is_meta(); });
  const auto device = is_meta ? at::kMeta : at::kCPU;
  auto bytes = at::empty({static_cast<int64_t>(layout.bytes)}, at::device(device).dtype(at::kByte));
  if (is_meta) {
    return bytes;
  }
  // The header and the order of the dtypes align each tensor to its element.
  int64_t offset = bytes.numel();
  for (const at::Tensor& tensor : tensors) {
    offset -= static_cast<int64_t>(tensor.nbytes());
  }
  for (const size_t index : layout.order) {
    const at::Tensor& tensor = tensors[index];
    const auto length = static_cast<int64_t>(tensor.nbytes());
    const auto target = bytes.narrow(0, offset, length).view(tensor.scalar_type()).view(tensor.sizes());
    copy_elements(target, in_memory(names.get(index), tensor), /*non_blocking=*/false);
    offset += length;
  }
  call_core([&] { layout.layout->seal(mutable_bytes_of(bytes)); });
  return bytes;
}

}  // namespace fst
