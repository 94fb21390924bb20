#include "transfer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "tensors.h"

namespace fst {

namespace {

// Alignment of tensors in the scratch memory, in bytes. Suits every dtype and the copy engine.
constexpr uint64_t kScratchAlignment = 512;

}  // namespace

void DeviceTransfer::add(size_t index, uint64_t begin, const at::Tensor& tensor) {
  if (tensor.numel() > 0) {
    outputs_.push_back(Output{index, begin, tensor});
  }
}

void DeviceTransfer::add_bytes(size_t index, uint64_t begin, uint64_t end, uint64_t address) {
  byte_outputs_.push_back(Destination{index, begin, end, address, specs_[index].scalar_type});
}

rust::Vec<size_t> DeviceTransfer::window_ends(const rust::Vec<size_t>& order) {
  return open().window_ends(rust::Slice<const size_t>(order.data(), order.size()));
}

void DeviceTransfer::start() {
  AnyTransfer& transfer = open();
  std::vector<Destination> destinations;
  std::vector<Output> rest;
  for (auto& output : std::exchange(outputs_, {})) {
    if (is_direct(transfer, output)) {
      destinations.push_back(destination(output));
      in_flight_.push_back(std::move(output.tensor));
    } else {
      rest.push_back(std::move(output));
    }
  }
  outputs_ = std::move(rest);
  if (destinations.empty()) {
    return;
  }
  // A block that is too small remains in use. All of them together have less than twice the bytes of the last one.
  const auto missing = [&](uint64_t most) {
    const uint64_t bytes = std::bit_ceil(prepare(transfer, destinations, most));
    return scratch_.defined() && scratch_.nbytes() >= bytes ? 0 : bytes;
  };
  const auto grown = allocate_scratch(device_, missing);
  if (!scratch_.defined() || grown.nbytes() > scratch_.nbytes()) {
    scratch_ = grown;
    in_flight_.push_back(scratch_);
  }
  call_core([&] { transfer.submit(mutable_address_of(scratch_), scratch_.nbytes()); });
}

void DeviceTransfer::run() {
  if (outputs_.empty() && byte_outputs_.empty()) {
    return;
  }
  AnyTransfer& transfer = open();
  std::vector<Destination> destinations = std::exchange(byte_outputs_, {});
  std::vector<Output> indirect;
  for (const auto& output : outputs_) {
    if (is_direct(transfer, output)) {
      destinations.push_back(destination(output));
    } else {
      indirect.push_back(output);
    }
  }
  outputs_.clear();
  fill(transfer, destinations);
  fill_through_scratch(transfer, indirect);
}

void DeviceTransfer::finish() {
  if (transfer_) {
    auto transfer = std::move(*transfer_);
    transfer_.reset();
    call_core([&] { fst::finish(std::move(transfer)); });
  }
}

// Returns whether the core can write the output itself.
bool DeviceTransfer::is_direct(const AnyTransfer& transfer, const Output& output) const {
  const auto from = stored_type(specs_[output.index]);
  const auto to = output.tensor.scalar_type();
  const bool can_cast = from == to || transfer.can_cast(static_cast<int8_t>(from), static_cast<int8_t>(to));
  return is_plain(output.tensor) && can_cast;
}

uint64_t DeviceTransfer::stored_bytes(const Output& output) const {
  return output.tensor.numel() * c10::elementSize(stored_type(specs_[output.index]));
}

Destination DeviceTransfer::destination(const Output& output) const {
  return Destination{output.index, output.begin, output.begin + stored_bytes(output), mutable_address_of(output.tensor),
                     static_cast<int8_t>(output.tensor.scalar_type())};
}

// Loads outputs into scratch memory, from which PyTorch copies them. Reuses the scratch memory if it is too small for
// all outputs: the core orders each fill after the work queued on the current stream, which includes these copies.
void DeviceTransfer::fill_through_scratch(AnyTransfer& transfer, const std::vector<Output>& outputs) const {
  const auto aligned = [](uint64_t bytes) { return (bytes + kScratchAlignment - 1) & ~(kScratchAlignment - 1); };
  std::vector<Output> parts;
  const auto split_all = [&](uint64_t most) {
    parts.clear();
    uint64_t needed = 0;
    for (const auto& output : outputs) {
      const uint64_t element_bytes = c10::elementSize(stored_type(specs_[output.index]));
      split(
          output.tensor, element_bytes,
          [&](const at::Tensor& part, uint64_t elements_before) {
            parts.push_back(Output{output.index, output.begin + elements_before * element_bytes, part});
            needed += aligned(stored_bytes(parts.back()));
          },
          most);
    }
    return std::min(needed, most);
  };
  const auto scratch = allocate_scratch(device_, split_all);
  if (parts.empty()) {
    return;
  }
  const uint64_t scratch_bytes = scratch.nbytes();
  if (scratch_bytes == 0) {
    const size_t index = parts.front().index;
    throw_out_of_memory(specs_[index], device_, stored_bytes(parts.front()), &selection_, index);
  }
  std::vector<Destination> destinations;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  uint64_t used = 0;
  const auto flush = [&] {
    fill(transfer, destinations);
    for (const auto& [target, source] : copies) {
      copy_elements(target, source);
    }
    destinations.clear();
    copies.clear();
    used = 0;
  };
  for (const auto& output : parts) {
    const uint64_t bytes = stored_bytes(output);
    if (used + bytes > scratch_bytes) {
      flush();
    }
    const auto stored = stored_type(specs_[output.index]);
    const auto source = scratch.narrow(0, static_cast<int64_t>(used), static_cast<int64_t>(bytes))
                            .view(stored)
                            .view(output.tensor.sizes());
    destinations.push_back(destination(Output{output.index, output.begin, source}));
    copies.emplace_back(output.tensor, source);
    used += aligned(bytes);
  }
  flush();
}

AnyTransfer& DeviceTransfer::open() {
  if (!transfer_) {
    const auto stream = current_stream_handle(device_);
    transfer_.emplace(call_core([&] { return selection_.transfer(device_.index(), stream); }));
  }
  return **transfer_;
}

// Plans a batch. Returns the bytes of scratch memory that it needs, at most this number if that is possible.
uint64_t DeviceTransfer::prepare(AnyTransfer& transfer, const std::vector<Destination>& destinations,
                                 uint64_t scratch_bytes_max) const {
  const uint64_t bytes = call_core([&] { return transfer.prepare(slice_of(destinations), scratch_bytes_max); });
  warn_of_missing_kernels(device_);
  return bytes;
}

void DeviceTransfer::fill(AnyTransfer& transfer, const std::vector<Destination>& destinations) const {
  if (destinations.empty()) {
    return;
  }
  // The core orders its use of the scratch memory before later work on the current stream, so PyTorch's allocator may
  // reuse the memory at once.
  const auto scratch = allocate_scratch(device_, [&](uint64_t most) { return prepare(transfer, destinations, most); });
  call_core([&] { transfer.fill(mutable_address_of(scratch), scratch.nbytes()); });
}

}  // namespace fst
