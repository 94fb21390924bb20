#include "loader.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "error.h"
#include "memory.h"
#include "select.h"
#include "tensors.h"

namespace fst {

namespace {

// Upper bounds for the tensors of a batch, after which the next one begins, and for their size.
constexpr size_t kBatchTensors = 64;
constexpr uint64_t kBatchBytes = uint64_t{1} << 20;

uint64_t checked_window(int64_t bytes) {
  if (bytes < 1) {
    throw_invalid_argument("window_bytes is " + std::to_string(bytes) + ", but must be at least 1");
  }
  return bytes;
}

Order checked_order(const std::string& order) {
  if (order != "file" && order != "ready") {
    throw_invalid_argument("order is \"" + order + "\", but must be \"file\" or \"ready\"");
  }
  return order == "file" ? Order::Submitted : Order::Ready;
}

uint64_t bytes_as(const Spec& spec, c10::ScalarType type) {
  return spec.bytes / c10::elementSize(stored_type(spec)) * c10::elementSize(type);
}

}  // namespace

Loader::Loader(rust::Box<Selection> selection, const LoadOptions& options, int64_t window_bytes,
               const std::string& order)
    : selection_(std::move(selection)),
      specs_(specs_of(*selection_, options.dtypes)),
      device_(resolve_device(options.device)),
      window_bytes_(checked_window(window_bytes)),
      order_(checked_order(order)),
      recording_(selection_->record(rust::String(device_.str()), kAllBytes)) {
  if (!device_.is_meta()) {
    call_core([&] { selection_->check(Target::Streamed); });
  }
  if (device_.is_cpu() && options.is_mapped) {
    mapped_.emplace(*selection_, specs_, /*is_verified=*/false);
  }
  const auto in_file_order = selection_->in_file_order();
  queue_.assign(in_file_order.begin(), in_file_order.end());
  const auto needs_no_read = [&](size_t index) { return !is_read(index); };
  if (order_ == Order::Ready) {
    std::ranges::stable_partition(queue_, needs_no_read);
  }
  if (!std::ranges::all_of(queue_, needs_no_read)) {
    stream_.emplace(
        call_core([&] { return selection_->stream(device_.index(), current_stream_handle(device_), order_); }));
  }
  prefetch();
}

Loader::~Loader() {
  if (getpid() != process_ && stream_) {
    // A forked child does not have the loader's thread and would wait for it forever.
    (void)std::move(*stream_).into_raw();
    return;
  }
  try {
    release();
  } catch (const std::exception& error) {
    TORCH_WARN("fst: a loader could not be ended: ", error.what());
  }
}

std::optional<Loader::Item> Loader::next() {
  const auto locked = lock();
  return next_locked();
}

Loader::Items Loader::next_batch() {
  const auto locked = lock();
  Items items;
  auto& [positions, names, tensors] = items;
  uint64_t bytes = 0;
  do {
    std::optional<Item> item;
    try {
      item = next_locked();
    } catch (...) {
      // The tensors before are returned first. The next call throws the error again.
      if (tensors.empty()) {
        throw;
      }
    }
    if (!item) {
      break;
    }
    auto& [position, name, tensor] = *item;
    bytes += tensor.nbytes();
    positions.push_back(position);
    names.push_back(std::move(name));
    tensors.push_back(std::move(tensor));
  } while (tensors.size() < kBatchTensors && bytes < kBatchBytes && returned_ < queue_.size() &&
           !is_read(queue_[returned_]));
  return items;
}

std::optional<Loader::Item> Loader::next_locked() {
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  try {
    return advance();
  } catch (...) {
    failure_ = std::current_exception();
    release();
    throw;
  }
}

void Loader::close() {
  const auto locked = lock();
  release();
}

int64_t Loader::total_bytes() const {
  uint64_t total = 0;
  for (const Spec& spec : specs_) {
    total += bytes_as(spec, target_type(spec));
  }
  return static_cast<int64_t>(total);
}

std::unique_lock<std::mutex> Loader::lock() {
  if (getpid() != process_) {
    throw_invalid_argument("the loader belongs to the process that created it; create a new one after a fork");
  }
  return std::unique_lock(mutex_);
}

std::optional<Loader::Item> Loader::advance() {
  if (returned_ == queue_.size()) {
    recording_.reset();
    if (stream_) {
      auto stream = std::move(*stream_);
      stream_.reset();
      call_core([&] { finish_stream(std::move(stream)); });
      release();
    }
    return std::nullopt;
  }
  prefetch();
  size_t index = queue_[returned_];
  at::Tensor tensor;
  if (is_read(index)) {
    if (pending_.empty()) {
      std::rethrow_exception(allocation_failure_);
    }
    const auto handle = use_current_stream();
    index = call_core([&] { return stream().take(handle); });
    tensor = take(index);
  } else if (has_data(specs_[index]) && mapped_) {
    tensor = mapped_->view(index, specs_[index]);
  } else {
    tensor = allocate(specs_[index], device_, target_type(specs_[index]), &*selection_, index);
  }
  ++returned_;
  prefetch();
  return Item(static_cast<int64_t>(index), std::string(specs_[index].name), std::move(tensor));
}

// Returns whether bytes of the tensor must be read. False for tensors without data, for views of mapped files, and for
// the meta device.
bool Loader::is_read(size_t index) const {
  return has_data(specs_[index]) && !device_.is_meta() && !(mapped_ && mapped_->is_view(index));
}

// Allocates and submits the next batch, if less than half of the window is pending. Batches of half a window let
// tensors share reads, and the core has the next batch when it completes one.
void Loader::prefetch() {
  if (pending_bytes_ > window_bytes_ / 2) {
    return;
  }
  allocation_failure_ = nullptr;
  std::vector<Destination> destinations;
  for (; allocated_ < queue_.size(); ++allocated_) {
    const size_t index = queue_[allocated_];
    if (!is_read(index)) {
      continue;
    }
    const Spec& spec = specs_[index];
    // PyTorch casts the tensor in `take` if the core cannot.
    const bool is_direct =
        spec.target_type == spec.scalar_type || stream().can_cast(spec.scalar_type, spec.target_type);
    const auto type = is_direct ? target_type(spec) : stored_type(spec);
    const uint64_t bytes = bytes_as(spec, type);
    if (pending_bytes_ > 0 && bytes > window_bytes_ - std::min(pending_bytes_, window_bytes_)) {
      break;
    }
    at::Tensor tensor;
    try {
      tensor = allocate(spec, device_, type, &*selection_, index);
    } catch (const c10::OutOfMemoryError&) {
      // The caller may free earlier tensors before it requests this one.
      allocation_failure_ = std::current_exception();
      break;
    }
    destinations.push_back(Destination{index, 0, spec.bytes, mutable_address_of(tensor), static_cast<int8_t>(type)});
    pending_.emplace(index, Pending{std::move(tensor), {}, current_stream(device_)});
    pending_bytes_ += bytes;
  }
  if (!destinations.empty()) {
    submit(destinations);
  }
}

void Loader::submit(const std::vector<Destination>& destinations) {
  const auto handle = use_current_stream();
  const auto current = current_stream(device_);
  const bool is_kept = scratch_.defined() && scratch_stream_ == current;
  const auto grown = allocate_scratch(device_, [&](uint64_t most) {
    const uint64_t bytes = call_core([&] { return stream().prepare(slice_of(destinations), most); });
    return is_kept && scratch_.nbytes() >= bytes ? 0 : bytes;
  });
  warn_of_missing_kernels(device_);
  if (!is_kept || grown.nbytes() > scratch_.nbytes()) {
    scratch_ = grown;
    scratch_stream_ = current;
  }
  for (const Destination& destination : destinations) {
    pending_.at(destination.tensor).scratch = scratch_;
  }
  call_core([&] { stream().submit(mutable_address_of(scratch_), scratch_.nbytes(), handle); });
}

// Removes a tensor that is ready from the pending ones. The current stream waits for its copies, which are the last use
// of its scratch memory.
at::Tensor Loader::take(size_t index) {
  const Pending pending = std::move(pending_.extract(index).mapped());
  pending_bytes_ -= pending.tensor.nbytes();
  record_use(pending, current_stream(device_));
  return pending.tensor.to(target_type(specs_[index]));
}

// Lets the allocator reuse memory on its own stream only once another stream has completed the work queued on it.
void Loader::record_use(const Pending& pending, c10::Stream stream) const {
  if (stream == pending.stream) {
    return;
  }
  const c10::impl::VirtualGuardImpl guard(device_.type());
  for (const auto& tensor : {pending.tensor, pending.scratch}) {
    if (!tensor.defined()) {
      continue;  // The tensor waits for its batch.
    }
    guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

AnyStream& Loader::stream() {
  TORCH_INTERNAL_ASSERT(stream_.has_value());
  return **stream_;
}

// Returns the handle of the current stream, which the caller passes to the core.
uint64_t Loader::use_current_stream() {
  core_stream_ = current_stream(device_);
  return current_stream_handle(device_);
}

void Loader::release() {
  // The stream ends first, so that no memory is freed while the core writes to it. After an interrupt, only the stream
  // that the core knows waits for the copies in flight.
  stream_.reset();
  for (const auto& [index, pending] : pending_) {
    record_use(pending, core_stream_.value_or(pending.stream));
  }
  pending_.clear();
  scratch_.reset();
  allocation_failure_ = nullptr;
  mapped_.reset();
  queue_.clear();
  returned_ = 0;
  recording_.reset();
}

}  // namespace fst
