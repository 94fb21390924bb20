#include "delta.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "cast.h"
#include "error.h"
#include "load.h"
#include "loader.h"
#include "memory.h"
#include "views.h"

namespace fst {

namespace {

// Upper bound for the frames that are decoded at the same time and for the copies of old values, in bytes. The next
// ones are copied meanwhile. Large, because one thread decodes a tensor.
constexpr uint64_t kDecodedBytes = 2ull << 30;

MemoryRange host_range_of(const at::Tensor& tensor) {
  const auto bytes = bytes_of(tensor);
  return MemoryRange{reinterpret_cast<uint64_t>(bytes.data()), bytes.size()};
}

// Returns whether the core can read the values of a tensor where they are.
bool is_read_in_place(const at::Tensor& tensor) { return tensor.is_cpu() && is_plain(tensor) && !is_mapped(tensor); }

// Returns the values of a tensor in contiguous memory of the host. The copy of a tensor on a GPU may still be in flight
// on its current stream.
at::Tensor old_on_host(const std::string& name, const at::Tensor& tensor) {
  if (!has_memory(tensor)) {
    throw_invalid_argument("tensor \"" + name + "\": " + describe_missing_memory(tensor));
  }
  if (is_read_in_place(tensor)) {
    return tensor;
  }
  auto copy =
      at::empty(tensor.sizes(), at::device(at::kCPU).dtype(tensor.scalar_type()).pinned_memory(tensor.is_cuda()));
  copy_elements(copy, in_memory(name, tensor));
  return copy;
}

// DeltaFrames of one delta, which are read in the background.
class DeltaFrames {
 public:
  DeltaFrames(const Deltas& chain, size_t delta, rust::Slice<const rust::String> names) {
    auto selection = call_core([&] { return chain.select_frames(delta, names); });
    for (const auto& spec : specs_of(*selection)) {
      left_.emplace(spec.name, spec.bytes);
    }
    if (!left_.empty()) {
      const auto window = kWindowBytes / static_cast<int64_t>(chain.count());
      loader_ = c10::make_intrusive<Loader>(std::move(selection), LoadOptions{at::kCPU, {}, false}, window, "file");
    }
  }

  // Returns the size of the frame of a tensor.
  uint64_t frame_bytes(const std::string& name) const {
    const auto found = left_.find(name);
    return found == left_.end() ? 0 : found->second;
  }

  // Returns the frame of a tensor, or nothing if the delta does not change the tensor. Each is returned once.
  std::optional<at::Tensor> take(const std::string& name) {
    if (left_.erase(name) == 0) {
      return std::nullopt;
    }
    if (auto found = read_.extract(name)) {
      return found.mapped();
    }
    while (auto item = loader_->next()) {
      auto& [position, next, frame] = *item;
      if (next == name) {
        return std::move(frame);
      }
      read_.emplace(std::move(next), std::move(frame));
    }
    return std::nullopt;
  }

 private:
  // Sizes of the frames that were not taken yet.
  std::map<std::string, uint64_t> left_;
  // DeltaFrames that were read before they are used: another delta has the tensors in another order.
  std::map<std::string, at::Tensor> read_;
  c10::intrusive_ptr<Loader> loader_;
};

// Old values of tensors whose changes are computed at the same time.
class OldValues {
 public:
  explicit OldValues(size_t first) : begin(first) {}

  // Index of the first tensor.
  size_t begin;
  std::vector<at::Tensor> old;

  // Waits for copies from GPUs.
  void wait() const {
    for (const auto& event : events_) {
      event.synchronize();
    }
  }

  // Marks the copies that were queued.
  void record() {
    std::set<c10::Device, DeviceOrder> devices;
    for (const auto& device : devices_) {
      if (devices.insert(device).second) {
        events_.emplace_back(device.type()).record(current_stream(device));
      }
    }
  }

  void add(const std::string& name, const at::Tensor& tensor) {
    old.push_back(old_on_host(name, tensor));
    if (!tensor.is_cpu()) {
      devices_.push_back(tensor.device());
    }
  }

 private:
  std::vector<c10::Device> devices_;
  std::vector<c10::Event> events_;
};

rust::Box<Deltas> open_chain(Strings paths, const OpenEncryptionKey::Optional& key) {
  const auto converted = to_rust(paths);
  auto request = call_core([&] { return open_request(""); });
  if (key) {
    request->set_key((*key)->key());
  }
  return call_core([&] { return open_deltas(slice_of(converted), *request); });
}

// Returns the changes of one tensor of a list, in the memory of the list, or on the GPU of the tensor.
Change change_of(const std::shared_ptr<rust::Box<ChangeList>>& list, size_t index, const at::Tensor& target) {
  const auto tensor_of = [&](const auto& slice, c10::IntArrayRef sizes, c10::ScalarType type) {
    auto* address = const_cast<void*>(static_cast<const void*>(slice.data()));
    const auto tensor = at::from_blob(address, sizes, [list](void*) {}, at::device(at::kCPU).dtype(type));
    return target.is_cpu() ? tensor : tensor.to(target.device());
  };
  const auto values = (*list)->values(index);
  if ((*list)->is_whole(index)) {
    return {target, {}, tensor_of(values, target.sizes(), target.scalar_type())};
  }
  const auto positions = (*list)->positions(index);
  const auto count = static_cast<int64_t>(positions.size());
  return {target, tensor_of(positions, {count}, at::kUInt32), tensor_of(values, {count}, target.scalar_type())};
}

void check_delta_count(const char* what, size_t count, size_t expected) {
  if (count != expected) {
    throw_invalid_argument(c10::str(expected, " names, but ", count, " ", what, "; give one for each"));
  }
}

}  // namespace

c10::Dict<std::string, std::string> index_metadata_of(const std::string& path) {
  c10::Dict<std::string, std::string> metadata;
  for (const auto& entry : call_core([&] { return index_metadata(to_rust(path)); })) {
    metadata.insert(std::string(entry.key), std::string(entry.value));
  }
  return metadata;
}

DeltaChain::DeltaChain(Strings paths, const OpenEncryptionKey::Optional& key) : chain_(open_chain(paths, key)) {}

std::vector<std::string> DeltaChain::names() const {
  const auto names = chain_->names();
  return {names.begin(), names.end()};
}

std::vector<Change> DeltaChain::changes(Strings names, const std::vector<at::Tensor>& old, const Numbers& shapes,
                                        const Numbers& ranges) const {
  // Autograd does not record the copies.
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_delta_count("tensors", old.size(), names.size());
  check_delta_count("shapes", shapes.size(), names.size());
  check_delta_count("index regions", ranges.size(), names.size());
  const auto converted = to_rust(names);
  std::vector<DeltaFrames> deltas;
  deltas.reserve(chain_->count());
  for (size_t delta = 0; delta < chain_->count(); ++delta) {
    deltas.emplace_back(*chain_, delta, slice_of(converted));
  }
  // Begins to copy the old values of the next tensors, where the core cannot read them.
  const auto copy_old = [&](size_t begin) {
    OldValues batch{begin};
    uint64_t bytes = 0;
    for (size_t index = begin; index < names.size(); ++index) {
      const auto& name = names.get(index);
      bytes += is_read_in_place(old[index]) ? 0 : old[index].nbytes();
      for (const auto& delta : deltas) {
        bytes += delta.frame_bytes(name);
      }
      if (index > begin && bytes > kDecodedBytes) {
        break;
      }
      batch.add(name, old[index]);
    }
    batch.record();
    return batch;
  };
  std::vector<Change> changes;
  changes.reserve(names.size());
  auto next = copy_old(0);
  while (changes.size() < names.size()) {
    const auto batch = std::exchange(next, copy_old(next.begin + next.old.size()));
    std::vector<HeldTensor> tensors;
    std::vector<at::Tensor> held;
    std::vector<MemoryRange> frames;
    for (size_t item = 0; item < batch.old.size(); ++item) {
      const size_t index = batch.begin + item;
      const auto& name = names.get(index);
      const size_t before = held.size();
      for (auto& delta : deltas) {
        if (auto frame = delta.take(name)) {
          frames.push_back(host_range_of(held.emplace_back(std::move(*frame))));
        }
      }
      if (held.size() == before) {
        throw_invalid_argument("tensor \"" + name + "\": no delta changes it; give each name of names() once");
      }
      HeldTensor tensor{
          to_rust(name), host_range_of(batch.old[item]), static_cast<size_t>(old[index].element_size()), {}, {}};
      std::ranges::copy(shapes[index], std::back_inserter(tensor.shape));
      std::ranges::copy(ranges[index], std::back_inserter(tensor.ranges));
      tensors.push_back(std::move(tensor));
    }
    batch.wait();
    const auto list = std::make_shared<rust::Box<ChangeList>>(call_core([&] {
      return chain_->changes(slice_of(tensors), slice_of(frames), static_cast<size_t>(at::get_num_threads()));
    }));
    for (size_t item = 0; item < batch.old.size(); ++item) {
      changes.push_back(change_of(list, item, old[batch.begin + item]));
    }
  }
  const std::scoped_lock lock(mutex_);
  for (size_t index = 0; index < names.size(); ++index) {
    if (c10::multiply_integers(shapes[index]) != old[index].numel()) {
      unverified_.insert(names.get(index));
    }
  }
  return changes;
}

std::vector<std::string> DeltaChain::unverified() const {
  const std::scoped_lock lock(mutex_);
  return {unverified_.begin(), unverified_.end()};
}

std::tuple<std::vector<at::Tensor>, std::vector<std::string>> encode_delta(Strings names, at::TensorList old,
                                                                           at::TensorList changed,
                                                                           const std::string& encoding,
                                                                           const std::string& checksum) {
  check_delta_count("old tensors", old.size(), names.size());
  check_delta_count("new tensors", changed.size(), names.size());
  std::vector<at::Tensor> held;
  std::vector<MemoryRange> old_values;
  std::vector<MemoryRange> new_values;
  for (size_t index = 0; index < names.size(); ++index) {
    const auto& name = names.get(index);
    if (old[index].sizes() != changed[index].sizes() || old[index].scalar_type() != changed[index].scalar_type()) {
      throw_invalid_argument(c10::str("tensor \"", name, "\": was ", old[index].scalar_type(), " ", old[index].sizes(),
                                      ", but is ", changed[index].scalar_type(), " ", changed[index].sizes(),
                                      "; a delta changes values only. Save a full checkpoint"));
    }
    old_values.push_back(host_range_of(held.emplace_back(old_on_host(name, old[index]))));
    new_values.push_back(host_range_of(held.emplace_back(old_on_host(name, changed[index]))));
  }
  for (const auto* tensors : {&old, &changed}) {
    for (const at::Tensor& tensor : *tensors) {
      if (tensor.is_cuda()) {
        current_stream(tensor.device()).synchronize();
      }
    }
  }
  const auto converted = to_rust(names);
  const auto threads = static_cast<size_t>(at::get_num_threads());
  const auto encoded = call_core([&] {
    return encode_changes(slice_of(converted), slice_of(old_values), slice_of(new_values), to_rust(encoding),
                          to_rust(checksum), threads);
  });
  std::vector<at::Tensor> frames;
  std::vector<std::string> checksums;
  for (size_t index = 0; index < names.size(); ++index) {
    const auto frame = encoded->frame(index);
    auto copy = at::empty({static_cast<int64_t>(frame.size())}, at::kByte);
    std::ranges::copy(frame, mutable_bytes_of(copy).begin());
    frames.push_back(std::move(copy));
    checksums.emplace_back(encoded->checksum(index));
  }
  return {std::move(frames), std::move(checksums)};
}

}  // namespace fst
