#include "load.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "tensors.h"
#include "transfer.h"
#include "version.h"
#include "views.h"

namespace fst {

namespace {

std::string describe_type(c10::ScalarType type, c10::IntArrayRef shape) {
  return c10::str(name_of(type), " of shape ", shape);
}

}  // namespace

void warm_up(c10::Device device) {
  const auto resolved = resolve_device(device);
  if (resolved.is_cuda()) {
    const auto stream = current_stream_handle(resolved);
    call_core([&] { prepare_cuda(resolved.index(), stream); });
    warn_of_missing_kernels(resolved);
  }
}

std::vector<at::Tensor> load(const Selection& selection, const rust::Vec<Spec>& specs, const LoadOptions& options) {
  const auto device = resolve_device(options.device);
  const auto recording = selection.record(rust::String(device.str()), kAllBytes);
  if (!device.is_meta()) {
    call_core([&] { selection.check(Target::New); });
  }
  std::optional<MappedFiles> mapped;
  if (device.is_cpu() && options.is_mapped) {
    mapped.emplace(selection, specs, /*is_verified=*/true);
  }
  DeviceTransfer transfer(selection, specs, device);
  // The tensors of a window are neighbours in the file.
  rust::Vec<size_t> order;
  rust::Vec<size_t> window_ends;
  if (device.is_cuda() && std::ranges::any_of(specs, has_data)) {
    // Acquires streams and readers first: if they fail, no tensor has been allocated.
    transfer.open();
    order = selection.in_file_order();
    window_ends = transfer.window_ends(order);
  }
  std::vector<at::Tensor> tensors(specs.size());
  const bool has_windows = window_ends.size() > 1;
  size_t window = 0;
  for (size_t turn = 0; turn < specs.size(); ++turn) {
    const size_t index = has_windows ? order[turn] : turn;
    const Spec& spec = specs[index];
    auto tensor = mapped ? mapped->view(index, spec) : at::Tensor();
    if (!tensor.defined()) {
      tensor = allocate(spec, device, target_type(spec), &selection, index);
      if (!device.is_meta() && has_data(spec)) {
        transfer.add(index, 0, tensor);
      }
    }
    tensors[index] = std::move(tensor);
    if (has_windows && turn + 1 == window_ends[window]) {
      transfer.start();
      ++window;
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

void check_outputs(const rust::Vec<Spec>& specs, at::TensorList out, OutputDtype dtype) {
  check_counts(specs.size(), "names", out.size(), "outputs; give one for every name");
  for (size_t index = 0; index < specs.size(); ++index) {
    check_output(specs[index], out[index], dtype);
  }
}

void load_into(const Selection& selection, const rust::Vec<Spec>& specs, at::TensorList out, OutputDtype dtype,
               Target target) {
  check_outputs(specs, out, dtype);
  call_core([&] { selection.check(target); });
  const auto recording = selection.record(rust::String(out.empty() ? "cpu" : out[0].device().str()), kAllBytes);
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
