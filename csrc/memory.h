// Memory of tensors. No other file takes the address of elements, because many tensors have none.
#pragma once

#include <ATen/core/Tensor.h>
#include <rust/cxx.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fst/rust/bridge.rs.h"

namespace fst {

// Returns whether the elements of a tensor are in the memory of its storage. False for sparse, nested and meta tensors,
// for wrappers of other tensors, such as DTensor and FakeTensor, and for tensors whose storage was freed.
bool has_memory(const at::Tensor& tensor);

// Returns whether a tensor has memory, or is a dense tensor on meta.
bool is_dense(const at::Tensor& tensor);

// Returns the address of the first element, for reading. Throws c10::ValueError if the tensor has no memory.
uint64_t address_of(const at::Tensor& tensor);

// Returns the address of the first element, for writing. Throws c10::ValueError if the tensor has no memory.
uint64_t mutable_address_of(const at::Tensor& tensor);

// Returns the address of bytes of a send or receive buffer. Throws c10::ValueError if the buffer does not have them.
uint64_t address_in(const at::Tensor& buffer, uint64_t offset, uint64_t bytes);

// Address, dtype, sizes and strides of a tensor. Equal for tensors with the same elements. The address is 0 if a tensor
// has no memory.
using TensorMemory = std::tuple<uint64_t, c10::ScalarType, std::vector<int64_t>, std::vector<int64_t>>;
TensorMemory memory_of(const at::Tensor& tensor);

// Throws c10::ValueError, with the name of the argument, unless a tensor is contiguous, 1-d and of this dtype on this
// device, and has this number of elements, if it is given.
void check_vector(const std::string& argument, const at::Tensor& tensor, c10::ScalarType dtype,
                  c10::Device device = at::kCPU, std::optional<int64_t> elements = std::nullopt);

// Returns the elements of an int64 vector on the CPU. Throws c10::ValueError, with the name of the argument, for any
// other tensor.
rust::Slice<const int64_t> numbers_of(const std::string& argument, const at::Tensor& tensor);

// Return the bytes of a contiguous tensor on the CPU. Throw c10::ValueError for any other tensor.
rust::Slice<const uint8_t> bytes_of(const at::Tensor& tensor);
rust::Slice<uint8_t> mutable_bytes_of(const at::Tensor& tensor);

// Returns the range of bytes of a contiguous tensor on the CPU. Throws c10::ValueError for any other tensor.
MemoryRange range_of(const at::Tensor& tensor);

// Copies bytes of the core to a uint8 tensor on the CPU.
at::Tensor to_tensor(const rust::Vec<uint8_t>& bytes);

// Error text for a tensor without memory, which says what to pass instead.
std::string describe_missing_memory(const at::Tensor& tensor);

}  // namespace fst
