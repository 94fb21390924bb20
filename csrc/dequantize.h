// Quantization and dequantization of tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/OptionalArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace fst {

// Scheme by which codes become numbers, with the scales of a whole tensor. All tensors are on the device of the codes.
struct Dequantization {
  std::string scheme;
  at::Tensor scales;
  at::Tensor global_scale;  // undefined if the scheme has none
  // Rows and columns of a block in numbers: 0 for all, negative for the block that scheme and scales imply.
  int64_t block_rows = -1;
  int64_t block_columns = -1;
};

// Writes the numbers of codes of shape [..., rows, stored bytes] to `out`, which has the shape of the numbers, a float
// dtype of 16 bits or more, and any strides. `row` and `column` are the position of the first number in the tensor to
// which the scales belong. Two codes in a byte are two columns. Throws c10::ValueError before the first write.
void dequantize_into(const at::Tensor& codes, const Dequantization& dequantization, int64_t row, int64_t column,
                     const at::Tensor& out);

// Operator fst::dequantize. Returns a new tensor, of bfloat16 by default.
at::Tensor dequantize_tensor(const at::Tensor& codes, const at::Tensor& scales, const std::string& scheme,
                             c10::OptionalIntArrayRef block, const std::optional<at::Tensor>& global_scale,
                             c10::OptionalIntArrayRef begin, std::optional<c10::ScalarType> dtype);

// Operator fst::dequantize_into.
void dequantize_tensor_into(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& out,
                            const std::string& scheme, c10::OptionalIntArrayRef block,
                            const std::optional<at::Tensor>& global_scale, c10::OptionalIntArrayRef begin);

// Operator fst::quantize. Returns new codes and scales.
std::tuple<at::Tensor, at::Tensor> quantize_tensor(const at::Tensor& tensor, const std::string& scheme,
                                                   c10::OptionalIntArrayRef block);

}  // namespace fst
