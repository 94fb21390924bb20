#include "delta.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "cast.h"
#include "error.h"
#include "load.h"
#include "loader.h"
#include "memory.h"
#include "save.h"
#include "version.h"
#include "views.h"

namespace fst {

namespace {

// Upper bound for the copies of old values that exist at the same time, in bytes, unless one tensor is larger.
constexpr uint64_t kOldCopyBytes = 2ull << 30;

MemoryRange host_range_of(const at::Tensor& tensor) {
  const auto bytes = bytes_of(tensor);
  return MemoryRange{reinterpret_cast<uint64_t>(bytes.data()), bytes.size()};
}

// Returns whether the core can read the values of a tensor where they are.
bool is_read_in_place(const at::Tensor& tensor) { return tensor.is_cpu() && is_plain(tensor) && !is_mapped(tensor); }

// Returns the values of a tensor in contiguous memory of the host. The copy of a tensor on a GPU may still be in flight
// on its current stream.
at::Tensor old_on_host(const std::string& name, const at::Tensor& tensor) {
  describe(name, tensor);
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
      left_.emplace(spec.name);
    }
    if (!left_.empty()) {
      const auto window = kWindowBytes / static_cast<int64_t>(chain.count());
      loader_ = c10::make_intrusive<Loader>(std::move(selection), LoadOptions{at::kCPU, {}, false}, window, "file");
    }
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
  std::set<std::string> left_;
  // DeltaFrames that were read before they are used: another delta has the tensors in another order.
  std::map<std::string, at::Tensor> read_;
  c10::intrusive_ptr<Loader> loader_;
};

// Tensors whose changes are computed, each by one of several threads.
class DeltaWork {
 public:
  // Old values and frames of a tensor. Copies from a GPU may be in flight until the event.
  struct Item {
    size_t index;
    at::Tensor old;
    std::vector<at::Tensor> frames;
    std::optional<c10::Event> copied;
    uint64_t copied_bytes;
  };

  DeltaWork(const Deltas& chain, Strings names, const std::vector<at::Tensor>& old) : names_(names), old_(old) {
    const auto converted = to_rust(names);
    deltas_.reserve(chain.count());
    for (size_t delta = 0; delta < chain.count(); ++delta) {
      deltas_.emplace_back(chain, delta, slice_of(converted));
    }
  }

  // Returns the next tensor, or nothing after the last and after a failure. Waits until there is memory for a copy.
  std::optional<Item> take() {
    std::unique_lock lock(mutex_);
    while (!failure_ && next_ < names_.size()) {
      const auto& tensor = old_[next_];
      const uint64_t bytes = is_read_in_place(tensor) ? 0 : tensor.nbytes();
      if (bytes > 0 && copied_bytes_ > 0 && copied_bytes_ + bytes > kOldCopyBytes) {
        released_.wait(lock);
        continue;
      }
      const std::string name = names_.get(next_);
      Item item{next_, old_on_host(name, tensor), {}, std::nullopt, bytes};
      if (!tensor.is_cpu()) {
        item.copied.emplace(tensor.device().type()).record(current_stream(tensor.device()));
      }
      // The frames are read in the background meanwhile.
      for (auto& delta : deltas_) {
        if (auto frame = delta.take(name)) {
          item.frames.push_back(std::move(*frame));
        }
      }
      if (item.frames.empty()) {
        throw_invalid_argument("tensor \"" + name + "\": no delta changes it; give each name of names() once");
      }
      copied_bytes_ += bytes;
      ++next_;
      return item;
    }
    return std::nullopt;
  }

  void release(const Item& item) {
    const std::scoped_lock lock(mutex_);
    copied_bytes_ -= item.copied_bytes;
    released_.notify_all();
  }

  // Keeps the first failure, which ends the work of all threads.
  void fail(std::exception_ptr failure) {
    const std::scoped_lock lock(mutex_);
    if (!failure_) {
      failure_ = std::move(failure);
    }
    released_.notify_all();
  }

  void rethrow() const {
    if (failure_) {
      std::rethrow_exception(failure_);
    }
  }

 private:
  Strings names_;
  const std::vector<at::Tensor>& old_;
  std::vector<DeltaFrames> deltas_;
  std::mutex mutex_;
  std::condition_variable released_;
  size_t next_ = 0;
  uint64_t copied_bytes_ = 0;
  std::exception_ptr failure_;
};

// Returns the current streams of the GPUs of tensors.
std::vector<c10::Stream> streams_of(const std::vector<at::Tensor>& tensors) {
  std::map<c10::Device, c10::Stream, DeviceOrder> streams;
  for (const auto& tensor : tensors) {
    if (tensor.is_cuda()) {
      streams.try_emplace(tensor.device(), current_stream(tensor.device()));
    }
  }
  std::vector<c10::Stream> found;
  found.reserve(streams.size());
  for (const auto& [device, stream] : streams) {
    found.push_back(stream);
  }
  return found;
}

// Runs `work` on several threads, of which the caller's is one, with the caller's current streams.
void run_on_threads(size_t threads, const std::vector<c10::Stream>& streams, const std::function<void()>& work) {
  std::vector<std::thread> started;
  try {
    while (started.size() + 1 < threads) {
      started.emplace_back([&] {
        const c10::MultiStreamGuard guard(streams);
        work();
      });
    }
    // NOLINTNEXTLINE(bugprone-empty-catch): a container may refuse more threads. Those that have started do the work.
  } catch (const std::system_error&) {
  }
  work();
  for (auto& thread : started) {
    thread.join();
  }
}

rust::Box<Deltas> open_chain(Strings paths, const OpenEncryptionKey::Optional& key) {
  const auto converted = to_rust(paths);
  auto request = call_core([&] { return open_request(""); });
  if (key) {
    request->set_key((*key)->key());
  }
  return call_core([&] { return open_deltas(slice_of(converted), *request); });
}

// Returns the changes of a tensor, in the memory of the core or on the GPU of the tensor.
Change change_of(rust::Box<ElementChanges> computed, const at::Tensor& target) {
  const auto changes = std::make_shared<rust::Box<ElementChanges>>(std::move(computed));
  const auto tensor_of = [&](const auto& slice, c10::IntArrayRef sizes, c10::ScalarType type) {
    auto* address = const_cast<void*>(static_cast<const void*>(slice.data()));
    const auto tensor = at::from_blob(address, sizes, [changes](void*) {}, at::device(at::kCPU).dtype(type));
    return target.is_cpu() ? tensor : tensor.to(target.device());
  };
  const auto values = (*changes)->values();
  if ((*changes)->is_whole()) {
    return {target, {}, tensor_of(values, target.sizes(), target.scalar_type())};
  }
  const auto positions = (*changes)->positions();
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

void DeltaChain::check_base(at::TensorList tensors, const std::optional<std::vector<std::string>>& names) const {
  rust::Vec<rust::String> held;
  if (const auto version = version_of(tensors, names)) {
    held.push_back(fst::to_rust(*version));
  }
  call_core([&] { chain_->check_base(slice_of(held)); });
}

std::vector<std::string> DeltaChain::names() const {
  const auto names = chain_->names();
  return {names.begin(), names.end()};
}

std::vector<Change> DeltaChain::changes(Strings names, const std::vector<at::Tensor>& old, const Numbers& shapes,
                                        const Numbers& ranges) const {
  check_delta_count("tensors", old.size(), names.size());
  check_delta_count("shapes", shapes.size(), names.size());
  check_delta_count("index regions", ranges.size(), names.size());
  DeltaWork work(*chain_, names, old);
  std::vector<Change> changes(names.size());
  const auto compute = [&](const DeltaWork::Item& item) {
    std::vector<MemoryRange> frames;
    frames.reserve(item.frames.size());
    std::ranges::transform(item.frames, std::back_inserter(frames), host_range_of);
    const auto item_bytes = static_cast<size_t>(item.old.element_size());
    HeldTensor tensor{to_rust(names.get(item.index)), host_range_of(item.old), item_bytes, {}, {}};
    std::ranges::copy(shapes[item.index], std::back_inserter(tensor.shape));
    std::ranges::copy(ranges[item.index], std::back_inserter(tensor.ranges));
    if (item.copied) {
      item.copied->synchronize();
    }
    return call_core([&] { return chain_->changes(tensor, slice_of(frames)); });
  };
  const size_t threads = std::min<size_t>(at::get_num_threads(), names.size());
  run_on_threads(threads, streams_of(old), [&] {
    // Autograd does not record the copies.
    const at::AutoDispatchBelowADInplaceOrView guard;
    try {
      while (auto item = work.take()) {
        auto computed = compute(*item);
        work.release(*item);
        changes[item->index] = change_of(std::move(computed), old[item->index]);
      }
    } catch (...) {
      work.fail(std::current_exception());
    }
  });
  work.rethrow();
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
