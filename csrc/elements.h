// What the core's own copies cannot do with the elements of a tensor, PyTorch does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace fst {

// Memory for bytes that PyTorch casts or spreads over strides, on their way to where they belong.
constexpr uint64_t kScratchBytes = 64ull << 20;

// Whether a tensor has its elements in memory of its own, which DTensors and other subclasses with a dispatch of their
// own have not.
bool has_memory(const at::Tensor& tensor);

// Whether the values of a tensor lie in memory as they are, one behind the other.
bool is_plain(const at::Tensor& tensor);

// Sets all elements of `target`. Where the dtypes are equal, no NaN changes.
void copy_elements(const at::Tensor& target, const at::Tensor& source);

// Calls `use` with parts of a tensor whose elements take at most kScratchBytes if each takes `element_bytes`, and with
// how many elements come before the part.
void split(const at::Tensor& tensor, uint64_t element_bytes,
           const std::function<void(const at::Tensor&, uint64_t)>& use);

}  // namespace fst
