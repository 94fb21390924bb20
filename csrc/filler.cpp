#include "filler.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "elements.h"
#include "error.h"
#include "load.h"

namespace fst {

namespace {

// Pieces in the scratch begin at multiples of this, which suits every dtype and the copy engine.
constexpr uint64_t kScratchAlignment = 512;

uint64_t address_of(const at::Tensor& tensor) { return reinterpret_cast<uint64_t>(tensor.data_ptr()); }

}  // namespace

void Filler::add(size_t index, uint64_t begin, const at::Tensor& tensor) {
  if (tensor.numel() > 0) {
    targets_.push_back(Target{index, begin, tensor});
  }
}

void Filler::add_bytes(size_t index, uint64_t begin, uint64_t end, uint64_t address) {
  bytes_.push_back(Destination{index, begin, end, address, specs_[index].scalar_type});
}

void Filler::fill() {
  if (targets_.empty() && bytes_.empty()) {
    return;
  }
  if (!transfer_) {
    transfer_.emplace(open());
  }
  std::vector<Destination> destinations = std::move(bytes_);
  std::vector<Target> converted;
  for (const auto& target : targets_) {
    if (is_direct(target)) {
      destinations.push_back(destination(target));
    } else {
      const uint64_t element_bytes = c10::elementSize(stored_type(specs_[target.index]));
      split(target.tensor, element_bytes, [&](const at::Tensor& part, uint64_t begin) {
        converted.push_back(Target{target.index, target.begin + begin * element_bytes, part});
      });
    }
  }
  targets_.clear();
  bytes_.clear();
  fill(destinations);
  fill_converted(converted);
}

void Filler::finish() {
  if (transfer_) {
    auto transfer = std::move(*transfer_);
    transfer_.reset();
    call_core([&] { fst::finish(std::move(transfer)); });
  }
}

// Whether the core can bring the bytes where they belong by itself.
bool Filler::is_direct(const Target& target) const {
  const auto from = stored_type(specs_[target.index]);
  const auto to = target.tensor.scalar_type();
  const bool can_convert = from == to || (*transfer_)->can_cast(static_cast<int8_t>(from), static_cast<int8_t>(to));
  return is_plain(target.tensor) && can_convert;
}

uint64_t Filler::stored_bytes(const Target& target) const {
  return target.tensor.numel() * c10::elementSize(stored_type(specs_[target.index]));
}

Destination Filler::destination(const Target& target) const {
  return Destination{target.index, target.begin, target.begin + stored_bytes(target), address_of(target.tensor),
                     static_cast<int8_t>(target.tensor.scalar_type())};
}

// Fills the scratch as often as it takes. The core orders each filling behind what is queued on the current stream,
// and so behind the last use of the scratch.
void Filler::fill_converted(const std::vector<Target>& converted) {
  const auto aligned = [](uint64_t bytes) { return (bytes + kScratchAlignment - 1) & ~(kScratchAlignment - 1); };
  uint64_t needed = 0;
  for (const auto& part : converted) {
    needed += aligned(stored_bytes(part));
  }
  if (needed == 0) {
    return;
  }
  const auto scratch_bytes = static_cast<int64_t>(std::min(needed, kScratchBytes));
  const auto scratch = at::empty({scratch_bytes}, at::device(device_).dtype(at::kByte));
  std::vector<Destination> destinations;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  uint64_t used = 0;
  const auto flush = [&] {
    fill(destinations);
    for (const auto& [target, source] : copies) {
      copy_elements(target, source);
    }
    destinations.clear();
    copies.clear();
    used = 0;
  };
  for (const auto& part : converted) {
    const uint64_t bytes = stored_bytes(part);
    if (used + bytes > static_cast<uint64_t>(scratch_bytes)) {
      flush();
    }
    const auto source = scratch.narrow(0, used, bytes).view(stored_type(specs_[part.index])).view(part.tensor.sizes());
    destinations.push_back(destination(Target{part.index, part.begin, source}));
    copies.emplace_back(part.tensor, source);
    used += aligned(bytes);
  }
  flush();
}

rust::Box<AnyTransfer> Filler::open() const {
  if (device_.is_cpu()) {
    return call_core([&] { return selection_.transfer_to_host(); });
  }
  const auto stream = native_handle(current_stream(device_));
  return call_core([&] { return selection_.transfer_to_cuda(device_.index(), stream); });
}

void Filler::fill(const std::vector<Destination>& destinations) {
  if (destinations.empty()) {
    return;
  }
  auto& transfer = *transfer_;
  const uint64_t bytes = call_core(
      [&] { return transfer->prepare(rust::Slice<const Destination>(destinations.data(), destinations.size())); });
  // What uses the scratch is ordered before whatever the current stream does next, and so before its next owner.
  const auto scratch = at::empty({static_cast<int64_t>(bytes)}, at::device(device_).dtype(at::kByte));
  call_core([&] { transfer->fill(address_of(scratch), bytes); });
}

}  // namespace fst
