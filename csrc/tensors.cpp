#include "tensors.h"

#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "error.h"
#include "memory.h"

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11
#define FST_STREAM_OF_SHIM
// c10 returns handles of streams since 2.11. A PyTorch without CUDA lacks this function of libtorch_cuda: the weak
// reference is then null, and there is no CUDA device to pass.
extern "C" [[gnu::weak]] int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace fst {

namespace {

// Scratch memory for which PyTorch takes the smallest segment of a GPU, of 2 MiB.
constexpr uint64_t kSmallScratchBytes = uint64_t{1} << 20;

// Smallest tensor that gets huge pages, as in NumPy.
constexpr size_t kHugePagesBytesMin = size_t{4} << 20;

// Returns a tensor without values. PyTorch's error for a lack of host memory is neither an OutOfMemoryError nor names
// the tensor and its file. Other errors, such as an error of a GPU after an illegal access, keep their classes.
at::Tensor empty(const Spec& spec, c10::Device device, c10::ScalarType type, const Selection* selection, size_t index) {
  try {
    return at::empty(shape_of(spec), at::device(device).dtype(type));
  } catch (const c10::Error& error) {
    if (!device.is_cpu() ||
        std::string_view(error.what_without_backtrace()).find("you tried to allocate") == std::string_view::npos) {
      throw;
    }
    // The core has checked that the size in bits fits 63 bits, and a cast makes it 8 times as large at most.
    const auto bytes = static_cast<uint64_t>(c10::multiply_integers(shape_of(spec))) * c10::elementSize(type);
    throw_out_of_memory(spec, device, bytes, selection, index);
  }
}

}  // namespace

c10::Device resolve_device(c10::Device device) {
  if (device.is_cpu() && device.index() > 0) {
    throw_invalid_argument(device.str() + " is not available: all processors are the device \"cpu\"; load to \"cpu\"");
  }
  if (device.is_cpu() || device.is_meta()) {
    return {device.type()};
  }
  if (!device.is_cuda()) {
    throw_invalid_argument("tensors can be loaded to cpu, cuda and meta devices, not to " + device.str() +
                           "; load to \"cpu\", and move them with Tensor.to");
  }
  if (device.index() < -1) {
    throw_invalid_argument("a CUDA device is not available: PyTorch counts devices from 0 to " +
                           std::to_string(std::numeric_limits<c10::DeviceIndex>::max()));
  }
  if (!at::hasCUDA()) {
    throw_invalid_argument(device.str() + " is not available: PyTorch finds no CUDA device; `fst doctor` says why");
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::DeviceIndex count = guard.deviceCount();
  if (device.index() >= count || count == 0) {
    throw_invalid_argument(device.str() + " is not available: PyTorch finds " + std::to_string(count) +
                           " CUDA devices");
  }
  at::globalContext().lazyInitDevice(device.type());
  return device.has_index() ? device : guard.getDevice();
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

uint64_t current_stream_handle(c10::Device device) {
  if (!device.is_cuda()) {
    return 0;
  }
  void* handle = nullptr;
#ifdef FST_STREAM_OF_SHIM
  TORCH_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &handle) == 0, "no current CUDA stream of ", device);
#else
  handle = c10::impl::VirtualGuardImpl(device.type()).getStreamNativeHandle(current_stream(device));
#endif
  return reinterpret_cast<uint64_t>(handle);
}

std::string describe_unwritable(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    return "is on " + tensor.device().str() + ", but only cpu and cuda tensors can be overwritten";
  }
  if (!tensor.defined() || !has_memory(tensor)) {
    return "is not a dense tensor with memory of its own; for a DTensor, pass the local tensor";
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    return "is a conjugate or negative view";
  }
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    return "has several elements that share memory";
  }
  return "";
}

void fill_with_zeros(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return;
  }
  // zero_() is not implemented for every dtype, so it fills the bytes.
  if (tensor.is_contiguous()) {
    tensor.view({-1}).view(at::kByte).zero_();
  } else {
    tensor.zero_();
  }
}

void mark_changed(at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && !tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

at::Tensor allocate(const Spec& spec, c10::Device device, c10::ScalarType type, const Selection* selection,
                    size_t index) {
  auto tensor = empty(spec, device, type, selection, index);
  if (device.is_cpu() && tensor.nbytes() >= kHugePagesBytesMin) {
    advise_huge_pages(mutable_address_of(tensor), tensor.nbytes());
  }
  if (!has_data(spec)) {
    fill_with_zeros(tensor);
  }
  return tensor;
}

at::Tensor allocate_scratch(c10::Device device, const std::function<uint64_t(uint64_t)>& prepare) {
  const auto options = at::device(device).dtype(at::kByte);
  std::optional<int64_t> refused;
  for (const uint64_t most : {kScratchBytes, kSmallScratchBytes}) {
    const auto bytes = static_cast<int64_t>(prepare(most));
    if (bytes == refused) {
      break;
    }
    try {
      return at::empty({bytes}, options);
    } catch (const c10::OutOfMemoryError&) {
      refused = bytes;  // Less memory may be free.
    }
  }
  return at::empty({0}, options);
}

void throw_out_of_memory(const Spec& spec, c10::Device device, uint64_t bytes, const Selection* selection,
                         size_t index) {
  const auto path = selection != nullptr ? selection->path(index) : rust::String("data");
  const auto message =
      c10::str("needs ", bytes, " bytes on ", device, ", which could not be allocated; load other tensors only");
  throw_as_torch_error(std::string(error_text("out-of-memory", message, spec.name, path)));
}

void warn_of_missing_kernels(c10::Device device) {
  if (!device.is_cuda()) {
    return;
  }
  const auto reason = missing_kernels(device.index());
  if (!reason.empty()) {
    TORCH_WARN_ONCE("fst: no device kernels for ", device.str(),
                    ", so small tensors are copied one by one, PyTorch casts and the CPU dequantizes: ",
                    std::string(reason), "; `fst doctor` says what to change");
  }
}

}  // namespace fst
