#include "checkpoint.h"

#include <c10/util/Exception.h>

#include <utility>

#include "error.h"
#include "memory.h"
#include "tensors.h"
#include "views.h"

namespace fst {

OpenCheckpoint::OpenCheckpoint(Strings paths, const OpenOptions& options)
    : OpenCheckpoint(call_core([&] { return open(slice_of(to_rust(paths)), *request_of(options)); }),
                     !options.verify.empty()) {}

OpenCheckpoint::OpenCheckpoint(rust::Box<Checkpoint> checkpoint, bool is_verified)
    : checkpoint_(std::move(checkpoint)), is_verified_(is_verified) {}

at::Tensor OpenCheckpoint::headers() const {
  return to_tensor(call_core([&] { return checkpoint_->export_headers(); }));
}

std::vector<std::string> OpenCheckpoint::names() const {
  const auto names = checkpoint_->tensor_names();
  return {names.begin(), names.end()};
}

c10::Dict<std::string, std::string> OpenCheckpoint::metadata() const {
  c10::Dict<std::string, std::string> texts;
  for (const auto& entry : call_core([&] { return checkpoint_->metadata(); })) {
    texts.insert(std::string(entry.key), std::string(entry.value));
  }
  return texts;
}

OpenCheckpoint::Entry OpenCheckpoint::entry(const std::string& name) const {
  const auto info = call_core([&] { return checkpoint_->tensor_info(to_rust(name)); });
  std::vector<int64_t> shape(info.shape.begin(), info.shape.end());
  return {std::string(info.dtype), std::move(shape), static_cast<int64_t>(info.bytes), static_cast<int64_t>(info.begin),
          info.kind};
}

std::vector<at::Tensor> OpenCheckpoint::load(const Selected& selected, const LoadOptions& options) const {
  const auto selection = select(*checkpoint_, selected);
  return fst::load(*selection, specs_of(*selection, options.dtypes), options);
}

c10::Dict<std::string, at::Tensor> OpenCheckpoint::load_all(const LoadOptions& options) const {
  const auto selection = select(*checkpoint_, {});
  const auto specs = specs_of(*selection, options.dtypes);
  auto tensors = fst::load(*selection, specs, options);
  c10::Dict<std::string, at::Tensor> named;
  named.reserve(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    named.insert(std::string(specs[index].name), std::move(tensors[index]));
  }
  return named;
}

at::Tensor OpenCheckpoint::load_region(const std::string& name, c10::IntArrayRef ranges, c10::Device device,
                                       bool is_mapped) const {
  const auto rust_name = to_rust(name);
  const auto selection =
      call_core([&] { return checkpoint_->select(Parts::Region, {&rust_name, 1}, slice_of(ranges), {}, {}); });
  const auto specs = specs_of(*selection);
  if (device.is_cpu() && specs[0].is_small) {
    const auto recording = selection->record("cpu", kAllBytes);
    auto tensor = allocate(specs[0], device, stored_type(specs[0]), &*selection);
    if (call_core([&] { return selection->read_small(mutable_address_of(tensor)); })) {
      return tensor;
    }
  }
  return std::move(fst::load(*selection, specs, {device, {}, is_mapped}).front());
}

void OpenCheckpoint::load_into(const Selected& selected, at::TensorList out, OutputDtype dtype) const {
  const auto selection = select(*checkpoint_, selected);
  verify_before_writes(dtype);
  fst::load_into(*selection, specs_of(*selection), out, dtype);
}

std::vector<at::Tensor> OpenCheckpoint::load_recipe(const RecipeRequest& request, const LoadOptions& options) const {
  return fst::load_recipe(*checkpoint_, request, options);
}

void OpenCheckpoint::load_recipe_into(const RecipeRequest& request, at::TensorList out, OutputDtype dtype) const {
  verify_before_writes(dtype);
  fst::load_recipe_into(*checkpoint_, request, out, dtype);
}

void OpenCheckpoint::verify_before_writes(OutputDtype dtype) const {
  if (is_verified_ && dtype == OutputDtype::kStored) {
    // Data is decrypted in place. The load compares the digests of other files itself.
    call_core([&] { checkpoint_->call("verify_encrypted", ""); });
  }
}

void OpenCheckpoint::warn_of_unverified() const {
  const auto warning = is_verified_ ? checkpoint_->take_unverified() : rust::String();
  if (!warning.empty()) {
    TORCH_WARN("fst: ", std::string(warning));
  }
}

}  // namespace fst
