#include "load.h"

#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "transfer.h"
#include "version.h"
#include "views.h"

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

thread_local std::vector<std::string> unverified;

std::string describe_type(c10::ScalarType type, c10::IntArrayRef shape) {
  return c10::str(name_of(type), " of shape ", shape);
}

void check_output(const Spec& spec, const at::Tensor& out, OutputDtype dtype) {
  const std::string name(spec.name);
  const auto refuse = [&](const std::string& message) {
    throw_invalid_argument("tensor \"" + name + "\": " + message + "; nothing was written");
  };
  const auto refusal = describe_unwritable(out);
  if (!refusal.empty()) {
    refuse("the output " + refusal);
  }
  const bool has_dtype = dtype == OutputDtype::kAny || out.scalar_type() == stored_type(spec);
  if (!has_dtype || out.sizes() != shape_of(spec)) {
    refuse("the file holds " + describe_type(stored_type(spec), shape_of(spec)) + ", but the output is " +
           describe_type(out.scalar_type(), out.sizes()) + ", which must be equal");
  }
}

// Returns a tensor without values. PyTorch's error for a lack of host memory is neither an OutOfMemoryError nor names
// the tensor and its file. Other errors, such as that of a GPU after an illegal access, keep their classes.
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
    const auto path = selection != nullptr ? selection->path(index) : rust::String("data");
    throw_as_torch_error(std::string(out_of_memory(path, spec.name, bytes, rust::String(device.str()))));
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

void prepare(c10::Device device) {
  const auto resolved = resolve_device(device);
  if (resolved.is_cuda()) {
    const auto stream = current_stream_handle(resolved);
    call_core([&] { prepare_cuda(resolved.index(), stream); });
    warn_of_missing_kernels(resolved);
  }
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

std::vector<at::Tensor> load(const Selection& selection, const rust::Vec<Spec>& specs, const LoadOptions& options) {
  const auto device = resolve_device(options.device);
  const auto recording = selection.record(rust::String(device.str()));
  const auto types = target_types(selection, specs, options.dtypes);
  check_coverage(selection, device);
  std::optional<MappedFiles> mapped;
  if (device.is_cpu() && options.is_mapped) {
    mapped.emplace(selection, types);
    mapped->verify();
  }
  DeviceTransfer transfer(selection, specs, device);
  size_t windows = 1;
  if (device.is_cuda() && std::ranges::any_of(specs, has_data)) {
    // Streams and readers are refused, and memory of theirs is taken, before the tensors take memory.
    transfer.open();
    windows = transfer.windows();
  }
  std::vector<at::Tensor> tensors(specs.size());
  const size_t window_tensors = (specs.size() + windows - 1) / windows;
  // Only windows need an order, in which the tensors of each are neighbours in the file.
  const auto order = windows > 1 ? selection.in_file_order() : rust::Vec<size_t>();
  for (size_t turn = 0; turn < specs.size(); ++turn) {
    const size_t index = windows > 1 ? order[turn] : turn;
    const Spec& spec = specs[index];
    auto tensor = mapped ? mapped->view(index, spec) : at::Tensor();
    if (!tensor.defined()) {
      tensor = allocate(spec, device, static_cast<c10::ScalarType>(types[index]), &selection, index);
      if (!device.is_meta() && has_data(spec)) {
        transfer.add(index, 0, tensor);
      }
    }
    tensors[index] = std::move(tensor);
    if (windows > 1 && ((turn + 1) % window_tensors == 0 || turn + 1 == specs.size())) {
      transfer.start();
    }
  }
  transfer.run();
  transfer.finish();
  return tensors;
}

std::tuple<std::vector<std::string>, std::vector<at::Tensor>> load_bytes(const at::Tensor& file) {
  const auto bytes = bytes_of(file);
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  for (const auto& [spec, begin] : call_core([&] { return tensors_of_bytes(bytes); })) {
    names.emplace_back(spec.name);
    const auto& tensor = tensors.emplace_back(allocate(spec, c10::kCPU, stored_type(spec)));
    if (has_data(spec)) {
      std::copy_n(bytes.data() + begin, spec.bytes, mutable_bytes_of(tensor).data());
    }
  }
  return {std::move(names), std::move(tensors)};
}

void warn_of_missing_kernels(c10::Device device) {
  if (!device.is_cuda()) {
    return;
  }
  const auto reason = missing_kernels(device.index());
  if (!reason.empty()) {
    TORCH_WARN_ONCE("fst: no device kernels for ", device.str(),
                    ", so small tensors are copied one by one and PyTorch casts: ", std::string(reason),
                    "; `fst doctor` says what to change");
  }
}

void check_coverage(const Selection& selection, c10::Device device) {
  unverified.clear();
  if (!device.is_meta()) {
    const auto names = call_core([&] { return selection.without_digests(); });
    unverified = std::vector<std::string>(names.begin(), names.end());
  }
}

std::vector<std::string> take_unverified() { return std::exchange(unverified, {}); }

void check_outputs(const rust::Vec<Spec>& specs, at::TensorList out, OutputDtype dtype) {
  if (out.size() != specs.size()) {
    throw_invalid_argument(c10::str(specs.size(), " names, but ", out.size(), " outputs; give one for every name"));
  }
  for (size_t index = 0; index < specs.size(); ++index) {
    check_output(specs[index], out[index], dtype);
  }
}

void load_into(const Selection& selection, const rust::Vec<Spec>& specs, at::TensorList out, OutputDtype dtype) {
  check_outputs(specs, out, dtype);
  check_coverage(selection, c10::kCPU);
  call_core([&] { selection.check_digests(); });
  const auto recording = selection.record(rust::String(out.empty() ? "cpu" : out[0].device().str()));
  const auto mark_written = [&] {
    mark_changed(out);
    forget_version(out);
  };
  // Autograd does not record the writes, as under torch.no_grad().
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::map<c10::Device, DeviceTransfer, DeviceOrder> transfers;
  for (size_t index = 0; index < specs.size(); ++index) {
    if (!has_data(specs[index])) {
      fill_with_zeros(out[index]);
      continue;
    }
    const auto device = out[index].device();
    transfers.try_emplace(device, selection, specs, device).first->second.add(index, 0, out[index]);
  }
  try {
    for (auto& [device, transfer] : transfers) {
      transfer.run();
      transfer.finish();
    }
  } catch (...) {
    // Some elements may have changed.
    mark_written();
    throw;
  }
  mark_written();
}

}  // namespace fst
