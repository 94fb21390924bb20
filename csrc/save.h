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

std::vector<Text> texts_of(const Texts& metadata);

// Where a tensor lies, with the current stream there.
Place place_of(const at::Tensor& tensor);

inline rust::Slice<const Text> slice_of(const std::vector<Text>& texts) { return {texts.data(), texts.size()}; }

// Writes a safetensors file that takes the place of what is at `path` once it is whole and on the disk.
void save_file(at::TensorList tensors, Strings names, const std::string& path, const Texts& metadata);

}  // namespace fst
