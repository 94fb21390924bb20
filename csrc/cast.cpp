#include "cast.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/safe_numerics.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>

#include "error.h"
#include "memory.h"
#include "tensors.h"

namespace fst {

namespace {

// Returns the address of the elements. Programs without the Python package also pass tensors on meta.
uint64_t source_address(const at::Tensor& tensor) { return tensor.is_meta() ? 0 : address_of(tensor); }

int8_t number_of(c10::ScalarType type) { return static_cast<int8_t>(type); }

void split_from(const at::Tensor& tensor, uint64_t element_bytes, uint64_t begin,
                const std::function<void(const at::Tensor&, uint64_t)>& use, uint64_t bytes_max) {
  const uint64_t elements = tensor.numel();
  if (elements == 0) {
    return;
  }
  if (elements * element_bytes <= bytes_max) {
    use(tensor, begin);
    return;
  }
  const int64_t rows = tensor.size(0);
  const uint64_t row_elements = elements / rows;
  const uint64_t row_bytes = row_elements * element_bytes;
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(bytes_max / row_bytes));
  for (int64_t row = 0; row < rows; row += step) {
    const auto part = row_bytes > bytes_max ? tensor.select(0, row) : tensor.narrow(0, row, std::min(step, rows - row));
    split_from(part, element_bytes, begin + row * row_elements, use, bytes_max);
  }
}

// Returns whether the core has an implementation.
bool run_in_core(rust::Slice<const Conversion> conversions, c10::Device device) {
  if (!device.is_cpu() && !device.is_cuda()) {
    return false;
  }
  const auto stream = current_stream_handle(device);
  const int ordinal = device.is_cuda() ? device.index() : -1;
  return call_core([&] { return convert(conversions, ordinal, stream, at::get_num_threads()); });
}

// Differentiable cast, as in `Tensor.to`.
class CastFunction : public torch::autograd::Function<CastFunction> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, at::TensorList tensors,
                                                c10::ScalarType dtype) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("fst::cast", "")
                        .typed<std::vector<at::Tensor>(at::TensorList, c10::ScalarType)>();
    auto results = op.call(tensors, dtype);
    torch::autograd::variable_list constants;
    std::vector<int64_t> dtypes;
    for (size_t index = 0; index < results.size(); ++index) {
      dtypes.push_back(number_of(tensors[index].scalar_type()));
      if (!tensors[index].requires_grad()) {
        constants.push_back(results[index]);
      }
    }
    context->mark_non_differentiable(constants);
    context->set_materialize_grads(false);
    context->saved_data["dtypes"] = dtypes;
    return results;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto dtypes = context->saved_data["dtypes"].toIntVector();
    torch::autograd::variable_list results;
    for (size_t index = 0; index < gradients.size(); ++index) {
      const auto& gradient = gradients[index];
      results.push_back(gradient.defined() ? gradient.to(static_cast<c10::ScalarType>(dtypes[index])) : gradient);
    }
    // The dtype has no gradient.
    results.emplace_back();
    return results;
  }
};

// Result of `scatter`.
struct Output {
  c10::IntArrayRef shape;
  c10::ScalarType from;
  c10::ScalarType to;
  int64_t begin;
  int64_t bytes;
};

// Validated arguments of `scatter`.
class ScatterLayout {
 public:
  ScatterLayout(int64_t length, c10::IntArrayRef offsets, c10::IntArrayRef dtypes, c10::IntArrayRef sizes,
                c10::IntArrayRef ranks, std::optional<c10::ScalarType> dtype) {
    const size_t count = offsets.size();
    if (dtypes.size() != count || ranks.size() != count) {
      throw_invalid_argument(c10::str(count, " offsets, but ", dtypes.size(), " dtypes and ", ranks.size(),
                                      " ranks; give one of each for every tensor"));
    }
    outputs.reserve(count);
    size_t next = 0;
    for (size_t index = 0; index < count; ++index) {
      const int64_t rank = ranks[index];
      if (rank < 0 || static_cast<uint64_t>(rank) > sizes.size() - next) {
        refuse(index, c10::str("rank ", rank, " exceeds the ", sizes.size() - next, " sizes left of ", sizes.size()));
      }
      const auto shape = sizes.slice(next, rank);
      next += rank;
      const auto from = stored_type(dtypes[index]);
      if (!from) {
        refuse(index, c10::str(dtypes[index],
                               " is not the number of a dtype for raw bytes; use the numbers of c10::ScalarType"));
      }
      const int64_t begin = offsets[index];
      auto bytes = static_cast<int64_t>(c10::elementSize(*from));
      for (const int64_t size : shape) {
        if (size < 0 || c10::mul_overflows(bytes, size, &bytes)) {
          refuse(index, c10::str("shape ", shape, " has a negative size or overflows a 64-bit size"));
        }
      }
      if (begin < 0 || begin > length || bytes > length - begin) {
        refuse(index, c10::str(name_of(*from), " of shape ", shape, " needs ", bytes, " bytes from byte ", begin,
                               " on, but `bytes` has ", length));
      }
      outputs.push_back(Output{shape, *from, dtype && is_castable(number_of(*from)) ? *dtype : *from, begin, bytes});
    }
    if (next != sizes.size()) {
      throw_invalid_argument(c10::str("the ranks add up to ", next, ", but there are ", sizes.size(),
                                      " sizes; give each tensor as many sizes as its rank"));
    }
  }

  std::vector<Output> outputs;

 private:
  [[noreturn]] static void refuse(size_t index, const std::string& message) {
    throw_invalid_argument(c10::str("tensor ", index, ": ", message));
  }

  static std::optional<c10::ScalarType> stored_type(int64_t number) {
    if (number < 0 || number >= static_cast<int64_t>(c10::ScalarType::NumOptions)) {
      return std::nullopt;
    }
    const auto type = static_cast<c10::ScalarType>(number);
    const bool is_stored = type != c10::ScalarType::Undefined && !c10::isQIntType(type) && !c10::isBitsType(type);
    return is_stored ? std::optional(type) : std::nullopt;
  }
};

}  // namespace

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

at::Tensor as_bits(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kShort);
    case 4:
      return tensor.view(at::kInt);
    case 8:
      return tensor.view(at::kLong);
    default:
      return tensor;
  }
}

void copy_elements(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const auto is_lazy = [](const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); };
  if (target.scalar_type() == source.scalar_type() && !is_lazy(target) && !is_lazy(source)) {
    as_bits(target).copy_(as_bits(source), non_blocking);
  } else {
    const_cast<at::Tensor&>(target).copy_(source, non_blocking);
  }
}

at::Tensor contiguous_copy(const at::Tensor& tensor, bool non_blocking) {
  auto copy = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  copy_elements(copy, tensor, non_blocking);
  return copy;
}

void split(const at::Tensor& tensor, uint64_t element_bytes,
           const std::function<void(const at::Tensor&, uint64_t)>& use, uint64_t bytes_max) {
  split_from(tensor, element_bytes, 0, use, bytes_max);
}

void CastBatch::add(size_t index, uint64_t source, c10::ScalarType from, const at::Tensor& target) {
  const auto elements = static_cast<uint64_t>(target.numel());
  if (elements == 0 || target.is_meta()) {
    return;
  }
  const auto address = mutable_address_of(target);
  if (from == target.scalar_type()) {
    // The core does not know all dtypes of PyTorch, but copies bytes.
    const auto byte = number_of(at::kByte);
    push(index, target.device(), Conversion{source, address, elements * target.element_size(), byte, byte, 0, 0});
  } else {
    push(index, target.device(),
         Conversion{source, address, elements, number_of(from), number_of(target.scalar_type()), 0, 0});
  }
}

void CastBatch::add_put(size_t index, const at::Tensor& positions, const at::Tensor& values, const at::Tensor& target) {
  if (values.numel() == 0) {
    return;
  }
  const auto bits = number_of(as_bits(target).scalar_type());
  push(index, target.device(),
       Conversion{address_of(values), mutable_address_of(target), static_cast<uint64_t>(values.numel()), bits, bits,
                  address_of(positions), static_cast<uint64_t>(target.numel())});
}

void CastBatch::push(size_t index, c10::Device device, const Conversion& conversion) {
  DeviceBatch& batch = batches_[device];
  batch.conversions.push_back(conversion);
  batch.indices.push_back(index);
}

void CastBatch::run(const std::function<void(size_t)>& fallback) const {
  for (const auto& [device, batch] : batches_) {
    if (!run_in_core(slice_of(batch.conversions), device)) {
      for (const size_t index : batch.indices) {
        fallback(index);
      }
    }
  }
}

void check_cast_target(c10::ScalarType dtype) {
  if (!can_convert(number_of(at::kFloat), number_of(dtype))) {
    throw_invalid_argument("dtype is " + name_of(dtype) + ", but must be a floating-point dtype of 8 bits or more");
  }
}

std::vector<at::Tensor> cast(at::TensorList tensors, c10::ScalarType dtype) {
  check_cast_target(dtype);
  for (size_t index = 0; index < tensors.size(); ++index) {
    const auto& tensor = tensors[index];
    if (!is_dense(tensor)) {
      throw_invalid_argument(c10::str("tensor ", index, " ", describe_missing_memory(tensor)));
    }
    if (!can_convert(number_of(tensor.scalar_type()), number_of(dtype))) {
      throw_invalid_argument(c10::str("tensor ", index, " is ", name_of(tensor.scalar_type()),
                                      ", which cannot be cast to ", name_of(dtype),
                                      "; only bools, integers and floats of 8 bits or more can be cast"));
    }
  }
  std::vector<at::Tensor> results;
  results.reserve(tensors.size());
  CastBatch batch;
  for (size_t index = 0; index < tensors.size(); ++index) {
    const auto& tensor = tensors[index];
    if (tensor.is_contiguous() && !tensor.is_neg()) {
      results.push_back(at::empty(tensor.sizes(), tensor.options().dtype(dtype)));
      batch.add(index, source_address(tensor), tensor.scalar_type(), results.back());
    } else {
      // PyTorch makes the tensor contiguous and casts it in one step.
      results.push_back(tensor.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous));
    }
  }
  batch.run([&](size_t index) { results[index].copy_(tensors[index]); });
  return results;
}

std::vector<at::Tensor> cast_with_gradients(at::TensorList tensors, c10::ScalarType dtype) {
  return CastFunction::apply(tensors, dtype);
}

std::vector<at::Tensor> scatter(const at::Tensor& bytes, c10::IntArrayRef offsets, c10::IntArrayRef dtypes,
                                c10::IntArrayRef sizes, c10::IntArrayRef ranks, std::optional<c10::ScalarType> dtype) {
  if (!is_dense(bytes)) {
    throw_invalid_argument("`bytes` " + describe_missing_memory(bytes));
  }
  if (bytes.scalar_type() != at::kByte || bytes.dim() != 1) {
    throw_invalid_argument(c10::str("`bytes` is ", name_of(bytes.scalar_type()), " of shape ", bytes.sizes(),
                                    ", but must be a dense 1-d uint8 tensor; view it as one"));
  }
  if (dtype) {
    check_cast_target(*dtype);
  }
  const ScatterLayout layout(bytes.numel(), offsets, dtypes, sizes, ranks, dtype);
  const auto source = bytes.contiguous();
  const auto address = source_address(source);
  std::vector<at::Tensor> results;
  results.reserve(layout.outputs.size());
  CastBatch batch;
  for (size_t index = 0; index < layout.outputs.size(); ++index) {
    const Output& output = layout.outputs[index];
    results.push_back(at::empty(output.shape, source.options().dtype(output.to)));
    batch.add(index, address + output.begin, output.from, results.back());
  }
  batch.run([&](size_t index) {
    const Output& output = layout.outputs[index];
    // The clone is aligned for any dtype.
    results[index].copy_(source.narrow(0, output.begin, output.bytes).clone().view(output.from).view(output.shape));
  });
  return results;
}

}  // namespace fst
