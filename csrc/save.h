// Tensors to a file: fst::save_file.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "select.h"

namespace fst {

using Texts = std::optional<c10::Dict<std::string, std::string>>;

// What the core needs to know of a tensor to write it; throws for one that cannot be saved.
NewTensor described(const std::string& name, const at::Tensor& tensor);

std::vector<MetadataEntry> metadata_entries_of(const Texts& metadata);

// Where a tensor lies, with the current stream there.
DeviceStream device_stream_of(const at::Tensor& tensor);

inline rust::Slice<const MetadataEntry> slice_of(const std::vector<MetadataEntry>& entries) {
  return {entries.data(), entries.size()};
}

// Writes a safetensors file that takes the place of what is at `path` once it is whole and on the disk.
void save_file(at::TensorList tensors, Strings names, const std::string& path, const Texts& metadata);

}  // namespace fst
