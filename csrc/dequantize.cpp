#include "dequantize.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <array>
#include <string>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "tensors.h"

namespace fst {

namespace {

// Codes, scales and global scale of a tensor, with arguments for the core.
struct Quantized {
  const at::Tensor& codes;
  const std::string& scheme;
  const at::Tensor& scales;
  const at::Tensor& global_scale;
  c10::IntArrayRef block;
  c10::IntArrayRef begin;
};

// Views a tensor for the core. Tensors on meta have no address.
StridedTensor strided(const at::Tensor& tensor, c10::ScalarType type, bool is_written = false) {
  if (!tensor.defined()) {
    return {0, -1, {}, {}};
  }
  const auto address = tensor.is_meta() ? 0 : is_written ? mutable_address_of(tensor) : address_of(tensor);
  return {address, static_cast<int8_t>(type), slice_of(tensor.sizes()), slice_of(tensor.strides())};
}

StridedTensor strided(const at::Tensor& tensor) {
  return strided(tensor, tensor.defined() ? tensor.scalar_type() : at::kByte);
}

QuantizedTensor to_core(const Quantized& quantized, const at::Tensor& codes) {
  return {rust::Str(quantized.scheme), strided(codes, quantized.codes.scalar_type()),
          strided(quantized.scales),   strided(quantized.global_scale),
          slice_of(quantized.block),   slice_of(quantized.begin)};
}

c10::IntArrayRef to_list(const rust::Vec<int64_t>& sizes) { return {sizes.data(), sizes.size()}; }

c10::IntArrayRef to_list(c10::OptionalIntArrayRef list) { return list ? *list : c10::IntArrayRef(); }

// Checks the tensors, and returns their shapes.
QuantizedLayout lay_out(const Quantized& quantized) {
  const auto check = [&](const char* name, const at::Tensor& tensor) {
    if (!is_dense(tensor)) {
      throw_invalid_argument(c10::str("`", name, "` ", describe_missing_memory(tensor)));
    }
    if (tensor.device() != quantized.codes.device()) {
      throw_invalid_argument(c10::str("`", name, "` is on ", tensor.device(), ", but the codes are on ",
                                      quantized.codes.device(), "; move it with Tensor.to"));
    }
  };
  check("codes", quantized.codes);
  check("scales", quantized.scales);
  if (quantized.global_scale.defined()) {
    check("global_scale", quantized.global_scale);
  }
  return call_core([&] { return lay_out_quantized(to_core(quantized, quantized.codes)); });
}

void check_dtype(c10::ScalarType dtype) {
  if (!is_castable(static_cast<int8_t>(dtype))) {
    throw_invalid_argument("numbers of " + name_of(dtype) +
                           " were requested, but must be float64, float32, float16 or bfloat16");
  }
}

// Computes in the core, and returns whether it has an implementation for the device.
bool run_in_core(const Quantized& quantized, const at::Tensor& codes, const at::Tensor& out) {
  const auto device = out.device();
  const auto stream = current_stream_handle(device);
  const auto target = strided(out, out.scalar_type(), /*is_written=*/true);
  const auto tensor = to_core(quantized, codes);
  const int ordinal = device.is_cuda() ? device.index() : -1;
  return call_core([&] { return dequantize(tensor, target, ordinal, stream, at::get_num_threads()); });
}

void run(const Quantized& quantized, const QuantizedLayout& layout, const at::Tensor& out) {
  const auto device = out.device();
  if (out.numel() == 0 || device.is_meta()) {
    return;
  }
  const auto codes = as_bits(quantized.codes).reshape(to_list(layout.code_shape));
  if ((device.is_cpu() || device.is_cuda()) && run_in_core(quantized, codes, out)) {
    return;
  }
  // Devices without kernels of fst get the numbers of the CPU, so that each scheme has one definition.
  warn_of_missing_kernels(device);
  const auto scales = quantized.scales.cpu();
  const auto global_scale = quantized.global_scale.defined() ? quantized.global_scale.cpu() : at::Tensor();
  const auto numbers = at::empty(out.sizes(), at::device(at::kCPU).dtype(out.scalar_type()));
  run_in_core({quantized.codes, quantized.scheme, scales, global_scale, quantized.block, quantized.begin}, codes.cpu(),
              numbers);
  copy_elements(out, numbers);
}

void run_into(const Quantized& quantized, const at::Tensor& out) {
  const auto layout = lay_out(quantized);
  if (const auto reason = describe_unwritable(out); !reason.empty()) {
    throw_invalid_argument("`out` " + reason);
  }
  check_dtype(out.scalar_type());
  if (out.device() != quantized.codes.device() || out.sizes() != to_list(layout.shape)) {
    throw_invalid_argument(c10::str("`out` has shape ", out.sizes(), " on ", out.device(), ", but needs shape ",
                                    to_list(layout.shape), " on ", quantized.codes.device()));
  }
  try {
    run(quantized, layout, out);
  } catch (...) {
    // Some elements may have changed.
    mark_changed({out});
    throw;
  }
  mark_changed({out});
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> quantize_tensor(const at::Tensor& tensor, const std::string& scheme,
                                                   c10::OptionalIntArrayRef block) {
  if (!is_dense(tensor)) {
    throw_invalid_argument("`tensor` " + describe_missing_memory(tensor));
  }
  if (!is_castable(static_cast<int8_t>(tensor.scalar_type()))) {
    throw_invalid_argument("`tensor` is " + name_of(tensor.scalar_type()) +
                           ", but must be float64, float32, float16 or bfloat16");
  }
  const auto layout =
      call_core([&] { return lay_out_codes(rust::Str(scheme), slice_of(tensor.sizes()), slice_of(to_list(block))); });
  auto codes = at::empty(tensor.sizes(), tensor.options()
                                             .dtype(static_cast<c10::ScalarType>(layout.scalar_type))
                                             .memory_format(at::MemoryFormat::Contiguous));
  auto scales = at::zeros(to_list(layout.scales), tensor.options().dtype(at::kFloat));
  if (tensor.numel() == 0 || tensor.is_meta()) {
    return {codes, scales};
  }
  if (!tensor.is_cpu()) {
    // The CPU computes for all devices, so that each scheme has one definition.
    const auto [host_codes, host_scales] = quantize_tensor(tensor.cpu(), scheme, block);
    copy_elements(codes, host_codes);
    copy_elements(scales, host_scales);
    return {codes, scales};
  }
  call_core([&] {
    quantize(strided(tensor), rust::Str(scheme), slice_of(to_list(block)), mutable_address_of(codes),
             mutable_address_of(scales), at::get_num_threads());
  });
  return {codes, scales};
}

void dequantize_into(const at::Tensor& codes, const Dequantization& dequantization, int64_t row, int64_t column,
                     const at::Tensor& out) {
  const std::array<int64_t, 2> block = {dequantization.block_rows, dequantization.block_columns};
  const std::array<int64_t, 2> begin = {row, column};
  const bool is_implied = dequantization.block_rows < 0;
  run_into({codes, dequantization.scheme, dequantization.scales, dequantization.global_scale,
            is_implied ? c10::IntArrayRef() : block, begin},
           out);
}

at::Tensor dequantize_tensor(const at::Tensor& codes, const at::Tensor& scales, const std::string& scheme,
                             c10::OptionalIntArrayRef block, const std::optional<at::Tensor>& global_scale,
                             c10::OptionalIntArrayRef begin, std::optional<c10::ScalarType> dtype) {
  const auto type = dtype.value_or(at::kBFloat16);
  check_dtype(type);
  const auto factor = global_scale.value_or(at::Tensor());
  const Quantized quantized{codes, scheme, scales, factor, to_list(block), to_list(begin)};
  const auto layout = lay_out(quantized);
  const Spec spec{{}, 0, 0, layout.shape, 1, false};
  auto out = allocate(spec, codes.device(), type);
  run(quantized, layout, out);
  return out;
}

void dequantize_tensor_into(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& out,
                            const std::string& scheme, c10::OptionalIntArrayRef block,
                            const std::optional<at::Tensor>& global_scale, c10::OptionalIntArrayRef begin) {
  const auto factor = global_scale.value_or(at::Tensor());
  run_into({codes, scheme, scales, factor, to_list(block), to_list(begin)}, out);
}

}  // namespace fst
