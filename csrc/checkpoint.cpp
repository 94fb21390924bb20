#include "checkpoint.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "error.h"
#include "load.h"
#include "memory.h"
#include "views.h"

namespace fst {

namespace {

rust::Box<Checkpoint> open(Strings paths, const std::optional<at::Tensor>& headers, const std::string& verify,
                           const OpenEncryptionKey::Optional& key) {
  if (!headers) {
    return open_checkpoint(paths, verify, key);
  }
  if (!has_memory(*headers) || headers->scalar_type() != at::kByte || headers->dim() != 1 || !headers->is_cpu()) {
    throw_invalid_argument("headers must be a 1-d uint8 tensor on the CPU, as Checkpoint.headers() returns it");
  }
  return open_checkpoint_with_headers(paths, headers->contiguous(), verify, key);
}

at::Tensor bytes_tensor(const rust::Vec<uint8_t>& bytes) {
  auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::ranges::copy(bytes, mutable_bytes_of(tensor).begin());
  return tensor;
}

}  // namespace

OpenCheckpoint::OpenCheckpoint(Strings paths, const std::optional<at::Tensor>& headers, const std::string& verify,
                               const OpenEncryptionKey::Optional& key)
    : OpenCheckpoint(open(paths, headers, verify, key)) {}

OpenCheckpoint::OpenCheckpoint(rust::Box<Checkpoint> checkpoint) : checkpoint_(std::move(checkpoint)) {}

at::Tensor OpenCheckpoint::headers() const {
  return bytes_tensor(call_core([&] { return checkpoint_->export_headers(); }));
}

std::vector<std::string> OpenCheckpoint::names() const {
  const auto names = checkpoint_->tensor_names();
  return {names.begin(), names.end()};
}

c10::Dict<std::string, std::string> OpenCheckpoint::metadata() const {
  c10::Dict<std::string, std::string> metadata;
  for (const auto& entry : call_core([&] { return checkpoint_->metadata(); })) {
    metadata.insert(std::string(entry.key), std::string(entry.value));
  }
  return metadata;
}

std::vector<OpenCheckpoint::Texts> OpenCheckpoint::texts() const {
  std::vector<Texts> files;
  for (const auto& file : checkpoint_->metadata_by_file()) {
    c10::Dict<std::string, std::string> texts;
    for (const auto& entry : file.entries) {
      texts.insert(std::string(entry.key), std::string(entry.value));
    }
    files.emplace_back(std::string(file.path), std::move(texts));
  }
  return files;
}

OpenCheckpoint::Entry OpenCheckpoint::entry(const std::string& name) const {
  const auto info = call_core([&] { return checkpoint_->tensor_info(to_rust(name)); });
  return {std::string(info.dtype),          {info.shape.begin(), info.shape.end()},  static_cast<int64_t>(info.bytes),
          static_cast<int64_t>(info.begin), static_cast<int64_t>(info.header_begin), info.kind};
}

std::vector<int64_t> OpenCheckpoint::module_indices(Strings names) const {
  const auto converted = to_rust(names);
  const auto indices = call_core([&] { return checkpoint_->module_indices({converted.data(), converted.size()}); });
  return {indices.begin(), indices.end()};
}

std::vector<OpenCheckpoint::DifferingHash> OpenCheckpoint::differing_hashes(
    Strings names, const std::vector<at::Tensor>& tensors) const {
  if (tensors.size() != names.size()) {
    throw_invalid_argument("there must be a tensor for each name");
  }
  std::vector<at::Tensor> held;
  std::vector<HostBytes> data;
  for (size_t index = 0; index < tensors.size(); ++index) {
    const auto bytes = bytes_of(held.emplace_back(in_memory(names.get(index), tensors[index])));
    data.push_back({reinterpret_cast<uintptr_t>(bytes.data()), bytes.size()});
  }
  const auto converted = to_rust(names);
  std::vector<DifferingHash> differing;
  for (const auto& hash : call_core([&] {
         return checkpoint_->differing_hashes({converted.data(), converted.size()}, {data.data(), data.size()},
                                              at::get_num_threads());
       })) {
    differing.emplace_back(names.get(hash.tensor), std::string(hash.algorithm));
  }
  return differing;
}

std::string OpenCheckpoint::path(const std::string& name) const {
  return std::string(call_core([&] { return checkpoint_->path(to_rust(name)); }));
}

std::string OpenCheckpoint::reader(c10::Device device) const {
  const int ordinal = resolve_device(device).index();
  return std::string(call_core([&] { return checkpoint_->reader_names(ordinal); }));
}

std::string OpenCheckpoint::page_cache() const {
  return std::string(call_core([&] { return checkpoint_->page_cache_name(); }));
}

std::string OpenCheckpoint::copy_name() const {
  return std::string(call_core([&] { return checkpoint_->copy_name(); }));
}

std::vector<at::Tensor> OpenCheckpoint::load_tensors(Strings names, c10::Device device, Dtype dtype,
                                                     const Patterns& patterns, const DtypeNumbers& dtypes) const {
  const auto selection = select_named(*checkpoint_, names);
  return load(*selection, specs_of(*selection), device, dtype_rules(dtype, patterns, dtypes));
}

std::vector<at::Tensor> OpenCheckpoint::load_boxes(Strings names, const std::vector<int64_t>& starts,
                                                   const std::vector<int64_t>& lengths,
                                                   const std::vector<int64_t>& steps, c10::Device device, Dtype dtype,
                                                   const Patterns& patterns, const DtypeNumbers& dtypes) const {
  const auto selection = select_regions(*checkpoint_, names, starts, lengths, steps);
  return load(*selection, specs_of(*selection), device, dtype_rules(dtype, patterns, dtypes));
}

void OpenCheckpoint::load_into(Strings names, const std::vector<at::Tensor>& out) const {
  const auto selection = select_named(*checkpoint_, names);
  fst::load_into(*selection, specs_of(*selection), out, OutputDtype::kAny);
}

void OpenCheckpoint::verify_whole_files() const {
  call_core([&] { checkpoint_->verify_whole_files(); });
}

void OpenCheckpoint::verify(int64_t part, int64_t parts, bool skips_groups) const {
  call_core([&] { checkpoint_->verify_part(static_cast<size_t>(part), static_cast<size_t>(parts), skips_groups); });
}

void OpenCheckpoint::load_boxes_into(Strings names, const std::vector<int64_t>& starts,
                                     const std::vector<int64_t>& lengths, const std::vector<int64_t>& steps,
                                     const std::vector<at::Tensor>& out) const {
  const auto selection = select_regions(*checkpoint_, names, starts, lengths, steps);
  fst::load_into(*selection, specs_of(*selection), out, OutputDtype::kAny);
}

}  // namespace fst
