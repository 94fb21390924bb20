#include "delta.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "save.h"
#include "tensors.h"
#include "views.h"

namespace fst {

namespace {

// Returns whether the core reads the values of a tensor in place. It reads mapped files with system calls, since they
// may have become shorter.
bool is_read_by_core(const at::Tensor& tensor) { return tensor.is_cpu() && is_plain(tensor); }

// Returns the values of a tensor in contiguous memory of the host. The copy of a tensor on a GPU may still be in flight
// on its current stream.
at::Tensor old_on_host(const std::string& name, const at::Tensor& tensor) {
  describe(name, tensor);
  if (is_read_by_core(tensor) && !is_mapped(tensor)) {
    return tensor;
  }
  auto copy =
      at::empty(tensor.sizes(), at::device(at::kCPU).dtype(tensor.scalar_type()).pinned_memory(tensor.is_cuda()));
  copy_elements(copy, in_memory(name, tensor));
  return copy;
}

// Values of tensors in host memory. Copies from GPUs may be in flight until the events. The core reads tensors on meta
// from files.
struct HostValues {
  std::vector<at::Tensor> held;
  std::vector<MemoryRange> memory;
  std::map<c10::Device, c10::Event, DeviceOrder> copied;

  // Begins to copy the values of a tensor, unless they are in host memory. Events must be recorded afterwards.
  void add(const std::string& name, const at::Tensor& tensor, bool is_mapping_read, bool is_meta_read = false) {
    if (is_meta_read && tensor.is_meta()) {
      memory.push_back({0, tensor.nbytes()});
      return;
    }
    const bool is_direct = is_mapping_read && is_read_by_core(tensor);
    memory.push_back(range_of(held.emplace_back(is_direct ? tensor : old_on_host(name, tensor))));
    if (tensor.is_cuda()) {
      copied.try_emplace(tensor.device(), tensor.device().type());
    }
  }

  void record() {
    for (auto& [device, event] : copied) {
      event.record(current_stream(device));
    }
  }

  // Waits for the copies. Ctrl-C ends the wait.
  void wait() const {
    for (const auto& [device, event] : copied) {
      call_core([&] { wait_for_event(reinterpret_cast<size_t>(event.eventId()), device.index()); });
    }
  }
};

// Returns the changes of a tensor, in the memory of the core or on the GPU of the tensor.
Change change_of(ElementChanges computed, const at::Tensor& target) {
  const auto changes = std::make_shared<ElementChanges>(std::move(computed));
  const auto tensor_of = [&](auto& elements, c10::IntArrayRef sizes, c10::ScalarType type) {
    const auto tensor = at::from_blob(elements.data(), sizes, [changes](void*) {}, at::device(at::kCPU).dtype(type));
    return target.is_cpu() ? tensor : tensor.to(target.device());
  };
  if (changes->is_whole) {
    return {target, {}, tensor_of(changes->values, target.sizes(), target.scalar_type())};
  }
  const auto count = static_cast<int64_t>(changes->positions.size());
  return {target, tensor_of(changes->positions, {count}, at::kUInt32),
          tensor_of(changes->values, {count}, target.scalar_type())};
}

bool have_equal_bits(const Change& one, const Change& other) {
  const auto are_equal = [](const at::Tensor& one, const at::Tensor& other) {
    return one.defined() == other.defined() &&
           (!one.defined() || (one.sizes() == other.sizes() && as_bits(one).equal(as_bits(other))));
  };
  return are_equal(one.positions, other.positions) && are_equal(one.values, other.values);
}

// Throws if the changes of one index region of a tensor that has several names differ.
void check_ties(Strings names, const std::vector<Change>& changes, const OpenUpdateSource::Numbers& ranges) {
  std::map<std::tuple<TensorMemory, std::vector<int64_t>>, size_t> first;
  for (size_t index = 0; index < changes.size(); ++index) {
    const auto& target = changes[index].target;
    if (target.numel() == 0) {
      continue;
    }
    const auto [found, is_first] = first.try_emplace({memory_of(target), ranges[index]}, index);
    if (!is_first && !have_equal_bits(changes[found->second], changes[index])) {
      throw_mismatch("tensors \"" + names.get(found->second) + "\" and \"" + names.get(index) +
                     "\" are one tensor in the target, but the deltas give them different values; nothing was "
                     "written. Give each a tensor of its own first, and load a full checkpoint");
    }
  }
}

}  // namespace

OpenUpdateSource::OpenUpdateSource(Strings paths, const OpenOptions& options)
    : opened_(call_core([&] { return open_update(slice_of(to_rust(paths)), *request_of(options)); })),
      is_verified_(!options.verify.empty()) {}

c10::intrusive_ptr<OpenUpdateSource> OpenUpdateSource::after(const c10::intrusive_ptr<OpenUpdateSource>& older) const {
  return c10::make_intrusive<OpenUpdateSource>(call_core([&] { return join_deltas(older->core(), core()); }));
}

c10::intrusive_ptr<OpenCheckpoint> OpenUpdateSource::checkpoint() const {
  return c10::make_intrusive<OpenCheckpoint>(call_core([&] { return core().checkpoint(); }), is_verified_);
}

std::vector<Change> OpenUpdateSource::changes(Strings names, const std::vector<at::Tensor>& old, const Numbers& shapes,
                                              const Numbers& ranges, int64_t limit_bytes) const {
  check_counts(names.size(), "names", old.size(), "tensors; give one for each");
  check_counts(names.size(), "names", shapes.size(), "shapes; give one for each");
  check_counts(names.size(), "names", ranges.size(), "index regions; give one for each");
  std::vector<HeldTensor> tensors;
  for (size_t index = 0; index < names.size(); ++index) {
    const auto& tensor = old[index];
    if (!has_memory(tensor)) {
      throw_invalid_argument("tensor \"" + names.get(index) + "\": " + describe_missing_memory(tensor));
    }
    const bool is_copied = !is_read_by_core(tensor);
    HeldTensor held{to_rust(names.get(index)),
                    static_cast<int8_t>(tensor.scalar_type()),
                    static_cast<size_t>(tensor.element_size()),
                    tensor.nbytes(),
                    {},
                    {},
                    is_copied,
                    !is_copied && is_mapped(tensor)};
    std::ranges::copy(shapes[index], std::back_inserter(held.shape));
    std::ranges::copy(ranges[index], std::back_inserter(held.ranges));
    tensors.push_back(std::move(held));
  }
  auto work = call_core([&] { return core().changes(slice_of(tensors), limit_bytes); });
  std::vector<Change> changes(names.size());
  // Autograd does not record the copies.
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto next = [&] {
    auto batch = std::pair(work->next_batch(), HostValues());
    for (const size_t index : batch.first) {
      batch.second.add(names.get(index), old[index], true);
    }
    batch.second.record();
    return batch;
  };
  for (auto batch = next(); !batch.first.empty();) {
    // Copies of the next batch are in flight while this one is decoded.
    auto following = next();
    batch.second.wait();
    auto computed = call_core(
        [&] { return work->compute(slice_of(batch.second.memory), static_cast<size_t>(at::get_num_threads())); });
    for (auto& each : computed) {
      const size_t index = each.tensor;
      changes[index] = change_of(std::move(each), old[index]);
    }
    batch = std::move(following);
  }
  check_ties(names, changes, ranges);
  return changes;
}

std::tuple<std::vector<at::Tensor>, std::vector<std::string>> encode_delta(
    Strings names, at::TensorList old, at::TensorList changed, const std::string& encoding, const std::string& checksum,
    const OptionalCheckpoint& old_files, const OptionalCheckpoint& changed_files) {
  check_counts(names.size(), "names", old.size(), "old tensors; give one for each");
  check_counts(names.size(), "names", changed.size(), "new tensors; give one for each");
  HostValues old_values;
  HostValues new_values;
  for (size_t index = 0; index < names.size(); ++index) {
    const auto& name = names.get(index);
    if (old[index].sizes() != changed[index].sizes() || old[index].scalar_type() != changed[index].scalar_type()) {
      throw_invalid_argument(c10::str("tensor \"", name, "\": was ", name_of(old[index].scalar_type()), " ",
                                      old[index].sizes(), ", but is ", name_of(changed[index].scalar_type()), " ",
                                      changed[index].sizes(), "; a delta changes values only. Save a full checkpoint"));
    }
    old_values.add(name, old[index], false, old_files.has_value());
    new_values.add(name, changed[index], false, changed_files.has_value());
  }
  for (HostValues* values : {&old_values, &new_values}) {
    values->record();
    values->wait();
  }
  const auto converted = to_rust(names);
  const auto threads = static_cast<size_t>(at::get_num_threads());
  const auto none = empty_checkpoint();
  const auto values_of = [&](const HostValues& values, const OptionalCheckpoint& files) {
    return VersionValues{slice_of(values.memory), files ? (*files)->core() : *none};
  };
  auto encoded = call_core([&] {
    return encode_changes(slice_of(converted), values_of(old_values, old_files), values_of(new_values, changed_files),
                          to_rust(encoding), to_rust(checksum), threads);
  });
  std::vector<at::Tensor> frames;
  std::vector<std::string> checksums;
  for (auto& frame : encoded) {
    checksums.emplace_back(frame.checksum);
    const auto bytes = std::make_shared<rust::Vec<uint8_t>>(std::move(frame.bytes));
    frames.push_back(at::from_blob(
        bytes->data(), {static_cast<int64_t>(bytes->size())}, [bytes](void*) {},
        at::device(at::kCPU).dtype(at::kByte)));
  }
  return {std::move(frames), std::move(checksums)};
}

}  // namespace fst
