// Devices, streams and memory of new and existing tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <string>

#include "fst/rust/bridge.rs.h"

namespace fst {

// Upper bound for scratch memory in which PyTorch casts elements or rearranges strides, in bytes.
constexpr uint64_t kScratchBytes = 64ull << 20;

// Validates a device for loads and returns it with its index. "cuda" becomes the current CUDA device.
c10::Device resolve_device(c10::Device device);

c10::Stream current_stream(c10::Device device);

// Returns the driver's handle of the current stream of a CUDA device, and zero for other devices.
uint64_t current_stream_handle(c10::Device device);

inline c10::ScalarType stored_type(const Spec& spec) { return static_cast<c10::ScalarType>(spec.scalar_type); }

inline c10::ScalarType target_type(const Spec& spec) { return static_cast<c10::ScalarType>(spec.target_type); }

inline c10::IntArrayRef shape_of(const Spec& spec) { return {spec.shape.data(), spec.shape.size()}; }

// Returns whether the region has bytes in its file. Otherwise it has no elements, or all of them are zero: the tensor
// is stored without data.
inline bool has_data(const Spec& spec) { return spec.bytes > 0; }

// Returns why the elements of a tensor cannot be overwritten, after its name, or an empty text if they can.
std::string describe_unwritable(const at::Tensor& tensor);

// Sets all elements of a region without data to zero.
void fill_with_zeros(const at::Tensor& tensor);

// Increases the versions of tensors, by which autograd detects that one it saved has changed. Some may be undefined.
void mark_changed(at::TensorList tensors);

// Returns scratch memory of the size that `prepare` returns for a plan of which it takes at most a number of bytes. A
// device with too little memory gets a plan that needs little, and at last none, with which the core copies piece by
// piece.
at::Tensor allocate_scratch(c10::Device device, const std::function<uint64_t(uint64_t)>& prepare);

// Returns a new tensor for a region, which is complete if the region has no data.
at::Tensor allocate(const Spec& spec, c10::Device device, c10::ScalarType type, const Selection* selection = nullptr,
                    size_t index = 0);

// Throws c10::OutOfMemoryError for bytes of the tensor `index` of a selection, or of a file in memory if that is null.
[[noreturn]] void throw_out_of_memory(const Spec& spec, c10::Device device, uint64_t bytes, const Selection* selection,
                                      size_t index);

// Warns once of a GPU that was used and for which the library has no kernels.
void warn_of_missing_kernels(c10::Device device);

}  // namespace fst
