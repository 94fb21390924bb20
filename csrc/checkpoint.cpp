#include "checkpoint.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "error.h"
#include "memory.h"
#include "tensors.h"
#include "views.h"

namespace fst {

namespace {

at::Tensor bytes_tensor(const rust::Vec<uint8_t>& bytes) {
  auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::ranges::copy(bytes, mutable_bytes_of(tensor).begin());
  return tensor;
}

c10::Dict<std::string, std::string> to_dict(const rust::Vec<MetadataEntry>& entries) {
  c10::Dict<std::string, std::string> texts;
  for (const auto& entry : entries) {
    texts.insert(std::string(entry.key), std::string(entry.value));
  }
  return texts;
}

}  // namespace

OpenCheckpoint::OpenCheckpoint(Strings paths, const OpenOptions& options)
    : OpenCheckpoint(open_checkpoint(paths, options), !options.verify.empty()) {}

OpenCheckpoint::OpenCheckpoint(rust::Box<Checkpoint> checkpoint, bool is_verified)
    : checkpoint_(std::move(checkpoint)), is_verified_(is_verified) {}

at::Tensor OpenCheckpoint::headers() const {
  return bytes_tensor(call_core([&] { return checkpoint_->export_headers(); }));
}

std::vector<std::string> OpenCheckpoint::names() const {
  const auto names = checkpoint_->tensor_names();
  return {names.begin(), names.end()};
}

c10::Dict<std::string, std::string> OpenCheckpoint::metadata() const {
  return to_dict(call_core([&] { return checkpoint_->metadata(); }));
}

std::vector<OpenCheckpoint::Texts> OpenCheckpoint::texts() const {
  std::vector<Texts> files;
  for (const auto& file : checkpoint_->metadata_by_file()) {
    files.emplace_back(std::string(file.path), to_dict(file.entries));
  }
  return files;
}

OpenCheckpoint::Entry OpenCheckpoint::entry(const std::string& name) const {
  const auto info = call_core([&] { return checkpoint_->tensor_info(to_rust(name)); });
  std::vector<int64_t> shape(info.shape.begin(), info.shape.end());
  return {std::string(info.dtype), std::move(shape), static_cast<int64_t>(info.bytes), static_cast<int64_t>(info.begin),
          info.kind};
}

std::vector<OpenCheckpoint::DifferingHash> OpenCheckpoint::differing_hashes(
    Strings names, const std::vector<at::Tensor>& tensors) const {
  if (tensors.size() != names.size()) {
    throw_invalid_argument("there must be a tensor for each name");
  }
  std::vector<at::Tensor> held;
  std::vector<MemoryRange> data;
  for (size_t index = 0; index < tensors.size(); ++index) {
    const auto bytes = bytes_of(held.emplace_back(in_memory(names.get(index), tensors[index])));
    data.push_back({reinterpret_cast<uintptr_t>(bytes.data()), bytes.size()});
  }
  const auto converted = to_rust(names);
  std::vector<DifferingHash> differing;
  for (const auto& hash : call_core(
           [&] { return checkpoint_->differing_hashes(slice_of(converted), slice_of(data), at::get_num_threads()); })) {
    differing.emplace_back(names.get(hash.tensor), std::string(hash.algorithm));
  }
  return differing;
}

std::string OpenCheckpoint::reader(c10::Device device) const {
  const int ordinal = resolve_device(device).index();
  return std::string(call_core([&] { return checkpoint_->reader_names(ordinal); }));
}

std::vector<at::Tensor> OpenCheckpoint::load(const Selected& selected, const LoadOptions& options) const {
  const auto selection = select(*checkpoint_, selected);
  return fst::load(*selection, specs_of(*selection), options);
}

c10::Dict<std::string, at::Tensor> OpenCheckpoint::load_all(const LoadOptions& options) const {
  const auto selection = select(*checkpoint_, {});
  const auto specs = specs_of(*selection);
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
  const auto selection = call_core([&] { return checkpoint_->select_region(to_rust(name), slice_of(ranges)); });
  const auto specs = specs_of(*selection);
  if (device.is_cpu() && selection->is_small()) {
    const auto recording = selection->record("cpu");
    auto tensor = allocate(specs[0], device, stored_type(specs[0]), &*selection);
    if (call_core([&] { return selection->read_small(mutable_address_of(tensor)); })) {
      return tensor;
    }
  }
  return std::move(fst::load(*selection, specs, {device, {}, is_mapped}).front());
}

void OpenCheckpoint::load_into(const Selected& selected, at::TensorList out, OutputDtype dtype) const {
  const auto selection = select(*checkpoint_, selected);
  if (is_verified_ && dtype == OutputDtype::kStored) {
    // Data is decrypted in place. The load compares the digests of other files itself.
    call_core([&] { checkpoint_->call("verify_encrypted", ""); });
  }
  fst::load_into(*selection, specs_of(*selection), out, dtype);
}

std::string OpenCheckpoint::take_unverified() const {
  return is_verified_ ? std::string(checkpoint_->take_unverified()) : std::string();
}

}  // namespace fst
