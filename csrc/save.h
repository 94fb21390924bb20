// Tensors to a file: fst::save_file.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "select.h"

namespace fst {

using Texts = std::optional<c10::Dict<std::string, std::string>>;

// Writes a safetensors file that takes the place of what is at `path` once it is whole and on the disk.
void save_file(at::TensorList tensors, Strings names, const std::string& path, const Texts& metadata);

}  // namespace fst
