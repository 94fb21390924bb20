#include "load.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "elements.h"
#include "error.h"
#include "views.h"

namespace fst {

namespace {

// Pieces in the scratch begin at multiples of this, which suits every dtype and the copy engine.
constexpr uint64_t kScratchAlignment = 512;

uint64_t address_of(const at::Tensor& tensor) { return reinterpret_cast<uint64_t>(tensor.data_ptr()); }

std::string describe(c10::ScalarType type, c10::IntArrayRef shape) {
  return c10::str(c10::toString(type), " of shape ", shape);
}

// Fills tensors of one device.
class Filler {
 public:
  Filler(const Selection& selection, const rust::Vec<Spec>& specs, c10::Device device)
      : selection_(selection), specs_(specs), device_(device) {}

  // `tensor` has the shape of the selection's tensor `index`, and any strides and dtype.
  void add(size_t index, const at::Tensor& tensor) {
    if (specs_[index].bytes > 0) {
      targets_.emplace_back(index, tensor);
    }
  }

  void run() {
    if (targets_.empty()) {
      return;
    }
    auto transfer = open();
    std::vector<Piece> pieces;
    for (const auto& [index, tensor] : targets_) {
      if (is_direct(*transfer, index, tensor)) {
        pieces.push_back(piece(index, 0, specs_[index].bytes, tensor));
      } else {
        const uint64_t element_bytes = c10::elementSize(stored_type(specs_[index]));
        split(tensor, element_bytes, [&, index = index](const at::Tensor& part, uint64_t begin) {
          converted_.push_back(Converted{index, begin * element_bytes, part});
        });
      }
    }
    fill(transfer, pieces);
    run_converted(transfer);
    call_core([&] { finish(std::move(transfer)); });
  }

 private:
  // A part of a tensor that goes through the scratch.
  struct Converted {
    size_t index;
    uint64_t begin;
    at::Tensor target;
  };

  // Whether the core can bring the bytes where they belong by itself.
  bool is_direct(const AnyTransfer& transfer, size_t index, const at::Tensor& tensor) const {
    const auto from = stored_type(specs_[index]);
    const auto to = tensor.scalar_type();
    return is_plain(tensor) && (from == to || transfer.can_cast(static_cast<int8_t>(from), static_cast<int8_t>(to)));
  }

  static Piece piece(size_t index, uint64_t begin, uint64_t end, const at::Tensor& tensor) {
    return Piece{index, begin, end, address_of(tensor), static_cast<int8_t>(tensor.scalar_type())};
  }

  uint64_t stored_bytes(size_t index, const at::Tensor& target) const {
    return target.numel() * c10::elementSize(stored_type(specs_[index]));
  }

  // Fills the scratch as often as it takes. The core orders each filling behind what is queued on the current stream,
  // and so behind the last use of the scratch.
  void run_converted(rust::Box<AnyTransfer>& transfer) {
    const auto aligned = [](uint64_t bytes) { return (bytes + kScratchAlignment - 1) & ~(kScratchAlignment - 1); };
    uint64_t needed = 0;
    for (const auto& part : converted_) {
      needed += aligned(stored_bytes(part.index, part.target));
    }
    if (needed == 0) {
      return;
    }
    const auto scratch_bytes = static_cast<int64_t>(std::min(needed, kScratchBytes));
    const auto scratch = at::empty({scratch_bytes}, at::device(device_).dtype(at::kByte));
    std::vector<Piece> pieces;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
    uint64_t used = 0;
    const auto flush = [&] {
      fill(transfer, pieces);
      for (const auto& [target, source] : copies) {
        copy_elements(target, source);
      }
      pieces.clear();
      copies.clear();
      used = 0;
    };
    for (const auto& part : converted_) {
      const uint64_t bytes = stored_bytes(part.index, part.target);
      if (used + bytes > static_cast<uint64_t>(scratch_bytes)) {
        flush();
      }
      const auto source =
          scratch.narrow(0, used, bytes).view(stored_type(specs_[part.index])).view(part.target.sizes());
      pieces.push_back(piece(part.index, part.begin, part.begin + bytes, source));
      copies.emplace_back(part.target, source);
      used += aligned(bytes);
    }
    flush();
  }

  rust::Box<AnyTransfer> open() const {
    if (device_.is_cpu()) {
      return call_core([&] { return selection_.transfer_to_host(); });
    }
    const auto stream = native_handle(current_stream(device_));
    return call_core([&] { return selection_.transfer_to_cuda(device_.index(), stream); });
  }

  void fill(rust::Box<AnyTransfer>& transfer, const std::vector<Piece>& pieces) const {
    if (pieces.empty()) {
      return;
    }
    const uint64_t bytes =
        call_core([&] { return transfer->prepare(rust::Slice<const Piece>(pieces.data(), pieces.size())); });
    // What uses the scratch is ordered before whatever the current stream does next, and so before its next owner.
    const auto scratch = at::empty({static_cast<int64_t>(bytes)}, at::device(device_).dtype(at::kByte));
    call_core([&] { transfer->fill(address_of(scratch), bytes); });
  }

  const Selection& selection_;
  const rust::Vec<Spec>& specs_;
  const c10::Device device_;
  std::vector<std::pair<size_t, at::Tensor>> targets_;
  std::vector<Converted> converted_;
};

void check_output(const Spec& spec, const at::Tensor& out) {
  const std::string name(spec.name);
  const auto refuse = [&](const std::string& message) {
    throw_invalid_argument("tensor \"" + name + "\": " + message + "; nothing was written");
  };
  if (!out.defined() || out.layout() != at::kStrided) {
    refuse("the output is not a dense tensor");
  }
  if (!out.device().is_cpu() && !out.device().is_cuda()) {
    refuse("the output is on " + out.device().str() + ", and only cpu and cuda tensors can be filled");
  }
  if (out.scalar_type() != stored_type(spec) || out.sizes() != shape_of(spec)) {
    refuse("the file holds " + describe(stored_type(spec), shape_of(spec)) + ", but the output is " +
           describe(out.scalar_type(), out.sizes()));
  }
  if (at::has_internal_overlap(out) == at::MemOverlap::Yes) {
    refuse("several elements of the output share one place in memory");
  }
}

}  // namespace

c10::Device resolve_device(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) {
    return c10::Device(device.type());
  }
  if (!device.is_cuda()) {
    throw_invalid_argument("tensors can be loaded to cpu, cuda and meta devices, not to " + device.str());
  }
  if (!at::hasCUDA()) {
    throw_invalid_argument(device.str() + " was asked for, but PyTorch finds no CUDA device here");
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  const int count = guard.deviceCount();
  if (device.index() < -1 || device.index() >= count || count == 0) {
    throw_invalid_argument(device.str() + " was asked for, but PyTorch sees " + std::to_string(count) +
                           " CUDA devices");
  }
  at::globalContext().lazyInitDevice(device.type());
  return device.has_index() ? device : guard.getDevice();
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

uint64_t native_handle(const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  return stream.device_type() == c10::kCPU ? 0 : reinterpret_cast<uint64_t>(guard.getStreamNativeHandle(stream));
}

std::vector<int8_t> target_types(const rust::Vec<Spec>& specs, std::optional<c10::ScalarType> dtype) {
  if (dtype && !c10::isFloatingType(*dtype)) {
    throw_invalid_argument(std::string("dtype is ") + c10::toString(*dtype) +
                           ", but only floating-point tensors are cast, and only to floating-point dtypes");
  }
  std::vector<int8_t> types;
  types.reserve(specs.size());
  for (const Spec& spec : specs) {
    types.push_back(dtype && spec.is_castable ? static_cast<int8_t>(*dtype) : spec.scalar_type);
  }
  return types;
}

std::vector<at::Tensor> load(const Selection& selection, const rust::Vec<Spec>& specs, c10::Device device,
                             std::optional<c10::ScalarType> dtype) {
  device = resolve_device(device);
  const auto recording = selection.record(rust::String(device.str()));
  const auto types = target_types(specs, dtype);
  std::optional<MappedFiles> mapped;
  if (device.is_cpu()) {
    mapped.emplace(selection, types);
  }
  Filler filler(selection, specs, device);
  std::vector<at::Tensor> tensors;
  tensors.reserve(specs.size());
  for (size_t index = 0; index < specs.size(); ++index) {
    const Spec& spec = specs[index];
    auto tensor = mapped ? mapped->view(index, spec) : at::Tensor();
    if (!tensor.defined()) {
      tensor = at::empty(shape_of(spec), at::device(device).dtype(static_cast<c10::ScalarType>(types[index])));
      if (!device.is_meta()) {
        filler.add(index, tensor);
      }
    }
    tensors.push_back(std::move(tensor));
  }
  filler.run();
  return tensors;
}

void load_into(const Selection& selection, const rust::Vec<Spec>& specs, at::TensorList out) {
  if (out.size() != specs.size()) {
    throw_invalid_argument(c10::str(specs.size(), " names, but ", out.size(), " outputs; give one for every name"));
  }
  for (size_t index = 0; index < specs.size(); ++index) {
    check_output(specs[index], out[index]);
  }
  const auto recording = selection.record(rust::String(out.empty() ? "cpu" : out[0].device().str()));
  // The writes are no part of a differentiable program, as under torch.no_grad().
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto order = [](c10::Device a, c10::Device b) {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  };
  std::map<c10::Device, Filler, decltype(order)> fillers(order);
  for (size_t index = 0; index < specs.size(); ++index) {
    const auto device = out[index].device();
    fillers.try_emplace(device, selection, specs, device).first->second.add(index, out[index]);
  }
  for (auto& [device, filler] : fillers) {
    filler.run();
  }
  // Autograd must notice that a tensor it has saved is another one now.
  for (const auto& tensor : out) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace fst
