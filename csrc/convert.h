// Tensors of one dtype made tensors of another, many at once: fst::cast and fst::scatter.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <vector>

namespace fst {

// New tensors with the values of `tensors` as `dtype`, each on its tensor's device.
std::vector<at::Tensor> cast(at::TensorList tensors, c10::ScalarType dtype);

// The same for autograd: gradients are cast back.
std::vector<at::Tensor> cast_with_gradients(at::TensorList tensors, c10::ScalarType dtype);

// New tensors from the raw bytes of `bytes`: tensor i begins at byte `offsets[i]`, has the dtype whose c10::ScalarType
// has the value `dtypes[i]`, and takes the next `ranks[i]` numbers of `sizes` for its shape. Floating-point tensors of
// 16 bits and more are cast to `dtype` if it is given.
std::vector<at::Tensor> scatter(const at::Tensor& bytes, c10::IntArrayRef offsets, c10::IntArrayRef dtypes,
                                c10::IntArrayRef sizes, c10::IntArrayRef ranks, std::optional<c10::ScalarType> dtype);

}  // namespace fst
