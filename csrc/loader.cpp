#include "loader.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "error.h"
#include "load.h"
#include "select.h"

namespace fst {

namespace {

rust::Box<Selection> select(Strings paths, const Loader::Names& names, const Loader::Numbers& dims,
                            const Loader::Numbers& starts, const Loader::Numbers& lengths) {
  const auto checkpoint = open_checkpoint(paths);
  if (dims || starts || lengths) {
    const std::vector<int64_t> none;
    return select_sliced(*checkpoint, names.value_or(c10::List<std::string>()), dims.value_or(none),
                         starts.value_or(none), lengths.value_or(none));
  }
  return names ? select_named(*checkpoint, *names) : select_all(*checkpoint);
}

uint64_t checked_window(int64_t bytes) {
  if (bytes < 1) {
    throw_invalid_argument("window_bytes is " + std::to_string(bytes) + ", but must be at least 1");
  }
  return bytes;
}

Order checked_order(const std::string& order) {
  if (order != "file" && order != "landed") {
    throw_invalid_argument("order is \"" + order + "\", but must be \"file\" or \"landed\"");
  }
  return order == "file" ? Order::Submitted : Order::Ready;
}

uint64_t bytes_as(const Spec& spec, c10::ScalarType type) {
  return spec.bytes / c10::elementSize(stored_type(spec)) * c10::elementSize(type);
}

}  // namespace

Loader::Loader(Strings paths, c10::Device device, const Names& names, std::optional<c10::ScalarType> dtype,
               int64_t window_bytes, const std::string& order, const Numbers& dims, const Numbers& starts,
               const Numbers& lengths)
    : selection_(select(paths, names, dims, starts, lengths)),
      specs_(specs_of(*selection_)),
      device_(resolve_device(device)),
      types_(target_types(specs_, dtype)),
      window_bytes_(checked_window(window_bytes)),
      order_(checked_order(order)),
      recording_(selection_->record(rust::String(device_.str()))) {
  if (device_.is_cpu()) {
    mapped_.emplace(*selection_, types_);
  }
  const auto in_file_order = selection_->in_file_order();
  queue_.assign(in_file_order.begin(), in_file_order.end());
  const auto is_here = [&](size_t index) { return !is_read(index); };
  if (order_ == Order::Ready) {
    std::stable_partition(queue_.begin(), queue_.end(), is_here);
  }
  if (!std::all_of(queue_.begin(), queue_.end(), is_here)) {
    stream_.emplace(call_core([&] {
      return device_.is_cpu()
                 ? selection_->stream_to_host(order_)
                 : selection_->stream_to_cuda(device_.index(), native_handle(current_stream(device_)), order_);
    }));
  }
  look_ahead();
}

Loader::~Loader() {
  if (getpid() != process_ && stream_) {
    // A forked child has no such thread, for which it would wait for ever.
    (void)std::move(*stream_).into_raw();
  }
}

std::optional<Loader::Item> Loader::next() {
  const auto locked = lock();
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  try {
    return hand_over();
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
  for (size_t index = 0; index < specs_.size(); ++index) {
    total += bytes_as(specs_[index], static_cast<c10::ScalarType>(types_[index]));
  }
  return static_cast<int64_t>(total);
}

std::unique_lock<std::mutex> Loader::lock() {
  if (getpid() != process_) {
    throw_invalid_argument("this loader belongs to the process that made it; make another one after a fork");
  }
  return std::unique_lock(mutex_);
}

std::optional<Loader::Item> Loader::hand_over() {
  if (handed_over_ == queue_.size()) {
    recording_.reset();
    if (stream_) {
      auto stream = std::move(*stream_);
      stream_.reset();
      call_core([&] { finish_stream(std::move(stream)); });
      release();
    }
    return std::nullopt;
  }
  look_ahead();
  size_t index = queue_[handed_over_];
  at::Tensor tensor;
  if (is_read(index)) {
    if (ahead_.empty()) {
      std::rethrow_exception(shortage_);
    }
    follow_current_stream();
    index = call_core([&] { return (*stream_)->take(); });
    tensor = take(index);
  } else if (mapped_) {
    tensor = mapped_->view(index, specs_[index]);
  } else {
    tensor = allocate(index, static_cast<c10::ScalarType>(types_[index]));
  }
  ++handed_over_;
  look_ahead();
  return Item(static_cast<int64_t>(index), std::string(specs_[index].name), std::move(tensor));
}

// Whether the tensor has bytes that must be moved.
bool Loader::is_read(size_t index) const { return !device_.is_meta() && !(mapped_ && mapped_->is_view(index)); }

at::Tensor Loader::allocate(size_t index, c10::ScalarType type) const {
  return at::empty(shape_of(specs_[index]), at::device(device_).dtype(type));
}

// Fillings are of half a window or more, so that tensors share reads, and so that the core has another filling at hand
// when it ends one.
void Loader::look_ahead() {
  if (bytes_ahead_ > window_bytes_ / 2) {
    return;
  }
  shortage_ = nullptr;
  std::vector<Destination> destinations;
  for (; allocated_ < queue_.size(); ++allocated_) {
    const size_t index = queue_[allocated_];
    if (!is_read(index)) {
      continue;
    }
    const Spec& spec = specs_[index];
    // What the core cannot cast is cast when it is handed over.
    const bool is_direct = types_[index] == spec.scalar_type || (*stream_)->can_cast(spec.scalar_type, types_[index]);
    const int8_t type = is_direct ? types_[index] : spec.scalar_type;
    const uint64_t bytes = bytes_as(spec, static_cast<c10::ScalarType>(type));
    if (bytes_ahead_ > 0 && bytes > window_bytes_ - std::min(bytes_ahead_, window_bytes_)) {
      break;
    }
    at::Tensor tensor;
    try {
      tensor = allocate(index, static_cast<c10::ScalarType>(type));
    } catch (const c10::OutOfMemoryError&) {
      // By the time that this tensor is asked for, those before it may have been freed.
      shortage_ = std::current_exception();
      break;
    }
    destinations.push_back(Destination{index, 0, spec.bytes, reinterpret_cast<uint64_t>(tensor.data_ptr()), type});
    ahead_.emplace(index, Ahead{std::move(tensor), {}, current_stream(device_)});
    bytes_ahead_ += bytes;
  }
  if (!destinations.empty()) {
    submit(destinations);
  }
}

void Loader::submit(const std::vector<Destination>& destinations) {
  const auto stream = follow_current_stream();
  const uint64_t bytes = call_core(
      [&] { return (*stream_)->prepare(rust::Slice<const Destination>(destinations.data(), destinations.size())); });
  if (!scratch_.defined() || scratch_.nbytes() < bytes) {
    scratch_ = at::empty({static_cast<int64_t>(bytes)}, at::device(device_).dtype(at::kByte));
  }
  for (const Destination& destination : destinations) {
    ahead_.at(destination.tensor).scratch = scratch_;
  }
  call_core([&] { (*stream_)->submit(reinterpret_cast<uint64_t>(scratch_.data_ptr()), bytes); });
}

// Of a tensor that has landed. The current stream is behind its copies, which are the last use of its scratch.
at::Tensor Loader::take(size_t index) {
  const Ahead ahead = std::move(ahead_.extract(index).mapped());
  bytes_ahead_ -= ahead.tensor.nbytes();
  const auto current = current_stream(device_);
  if (current != ahead.stream) {
    // The allocator must not hand them out again on their own stream before this one is done with them.
    const c10::impl::VirtualGuardImpl guard(device_.type());
    for (const auto& tensor : {ahead.tensor, ahead.scratch}) {
      guard.recordDataPtrOnStream(tensor.storage().data_ptr(), current);
    }
  }
  return ahead.tensor.to(static_cast<c10::ScalarType>(types_[index]));
}

c10::Stream Loader::follow_current_stream() {
  const auto stream = current_stream(device_);
  call_core([&] { (*stream_)->set_stream(native_handle(stream)); });
  return stream;
}

void Loader::release() {
  // First of all, so that nothing is filled any more.
  stream_.reset();
  ahead_.clear();
  scratch_.reset();
  shortage_ = nullptr;
  mapped_.reset();
  queue_.clear();
  handed_over_ = 0;
  recording_.reset();
}

}  // namespace fst
