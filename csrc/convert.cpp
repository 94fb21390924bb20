#include "convert.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/safe_numerics.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <utility>

#include "converter.h"
#include "error.h"

namespace fst {

namespace {

int8_t number_of(c10::ScalarType type) { return static_cast<int8_t>(type); }

std::string name_of(c10::ScalarType type) { return c10::toString(type); }

// The 4-bit floats are floating point to PyTorch too, but two of them share an element, which nothing casts.
bool is_cast_target(c10::ScalarType type) {
  return c10::isFloatingType(type) && can_convert(number_of(at::kFloat), number_of(type));
}

// What a load with `dtype=` casts.
bool is_castable(c10::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

void check_target(c10::ScalarType dtype) {
  if (!is_cast_target(dtype)) {
    throw_invalid_argument("dtype is " + name_of(dtype) +
                           ", but tensors are cast to floating-point dtypes of 8 bits and more only");
  }
}

// Casts are differentiable as `Tensor.to` is.
class CastFunction : public torch::autograd::Function<CastFunction> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, at::TensorList tensors,
                                                c10::ScalarType dtype) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = c10::Dispatcher::singleton()
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
    // One more for the dtype.
    results.emplace_back();
    return results;
  }
};

// One of the tensors that `scatter` makes.
struct Part {
  c10::IntArrayRef shape;
  c10::ScalarType from;
  c10::ScalarType to;
  int64_t begin;
  int64_t bytes;
};

class Layout {
 public:
  Layout(int64_t length, c10::IntArrayRef offsets, c10::IntArrayRef dtypes, c10::IntArrayRef sizes,
         c10::IntArrayRef ranks, std::optional<c10::ScalarType> dtype) {
    const size_t count = offsets.size();
    if (dtypes.size() != count || ranks.size() != count) {
      throw_invalid_argument(c10::str(count, " offsets, but ", dtypes.size(), " dtypes and ", ranks.size(),
                                      " ranks; give one of each for every tensor"));
    }
    parts.reserve(count);
    size_t next = 0;
    for (size_t index = 0; index < count; ++index) {
      const auto refuse = [&](const std::string& message) {
        throw_invalid_argument(c10::str("tensor ", index, ": ", message));
      };
      const int64_t rank = ranks[index];
      if (rank < 0 || static_cast<uint64_t>(rank) > sizes.size() - next) {
        refuse(c10::str("rank ", rank, " does not fit: ", sizes.size() - next, " of the ", sizes.size(),
                        " sizes are left for it"));
      }
      const auto shape = sizes.slice(next, rank);
      next += rank;
      const auto from = stored_type(dtypes[index]);
      if (!from) {
        refuse(c10::str(dtypes[index],
                        " is not the number of a dtype that raw bytes can hold; use the numbers of c10::ScalarType"));
      }
      const int64_t begin = offsets[index];
      int64_t bytes = c10::elementSize(*from);
      for (const int64_t size : shape) {
        if (size < 0 || c10::mul_overflows(bytes, size, &bytes)) {
          refuse(c10::str("shape ", shape, " has a negative size or more bytes than there can be"));
        }
      }
      if (begin < 0 || begin > length || bytes > length - begin) {
        refuse(c10::str(name_of(*from), " of shape ", shape, " needs ", bytes, " bytes from byte ", begin,
                        " on, but `bytes` has ", length));
      }
      parts.push_back(Part{shape, *from, dtype && is_castable(*from) ? *dtype : *from, begin, bytes});
    }
    if (next != sizes.size()) {
      throw_invalid_argument(c10::str("the ranks add up to ", next, ", but there are ", sizes.size(),
                                      " sizes; give each tensor as many as its rank"));
    }
  }

  std::vector<Part> parts;

 private:
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

std::vector<at::Tensor> cast(at::TensorList tensors, c10::ScalarType dtype) {
  check_target(dtype);
  for (size_t index = 0; index < tensors.size(); ++index) {
    const auto& tensor = tensors[index];
    if (!tensor.defined() || tensor.layout() != at::kStrided) {
      throw_invalid_argument(c10::str("tensor ", index, " is not a dense tensor; make it one with to_dense()"));
    }
    if (!can_convert(number_of(tensor.scalar_type()), number_of(dtype))) {
      throw_invalid_argument(c10::str("tensor ", index, " is ", name_of(tensor.scalar_type()),
                                      ", which cannot be cast to ", name_of(dtype),
                                      "; cast bools, integers and floats of 8 bits and more"));
    }
  }
  std::vector<at::Tensor> results;
  results.reserve(tensors.size());
  Converter converter;
  for (size_t index = 0; index < tensors.size(); ++index) {
    const auto& tensor = tensors[index];
    if (tensor.is_contiguous() && !tensor.is_neg()) {
      results.push_back(at::empty(tensor.sizes(), tensor.options().dtype(dtype)));
      converter.add(index, reinterpret_cast<uint64_t>(tensor.const_data_ptr()), tensor.scalar_type(), results.back());
    } else {
      // PyTorch gathers and converts in one step.
      results.push_back(tensor.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous));
    }
  }
  converter.run([&](size_t index) { results[index].copy_(tensors[index]); });
  return results;
}

std::vector<at::Tensor> cast_with_gradients(at::TensorList tensors, c10::ScalarType dtype) {
  return CastFunction::apply(tensors, dtype);
}

std::vector<at::Tensor> scatter(const at::Tensor& bytes, c10::IntArrayRef offsets, c10::IntArrayRef dtypes,
                                c10::IntArrayRef sizes, c10::IntArrayRef ranks, std::optional<c10::ScalarType> dtype) {
  if (bytes.scalar_type() != at::kByte || bytes.dim() != 1 || bytes.layout() != at::kStrided) {
    throw_invalid_argument(c10::str("`bytes` is ", name_of(bytes.scalar_type()), " of shape ", bytes.sizes(),
                                    ", but must be a dense 1-d uint8 tensor; view it as one"));
  }
  if (dtype) {
    check_target(*dtype);
  }
  const Layout layout(bytes.numel(), offsets, dtypes, sizes, ranks, dtype);
  const auto source = bytes.contiguous();
  const auto address = reinterpret_cast<uint64_t>(source.const_data_ptr());
  std::vector<at::Tensor> results;
  results.reserve(layout.parts.size());
  Converter converter;
  for (size_t index = 0; index < layout.parts.size(); ++index) {
    const Part& part = layout.parts[index];
    results.push_back(at::empty(part.shape, source.options().dtype(part.to)));
    converter.add(index, address + part.begin, part.from, results.back());
  }
  converter.run([&](size_t index) {
    const Part& part = layout.parts[index];
    // A copy begins where any dtype may.
    results[index].copy_(source.narrow(0, part.begin, part.bytes).clone().view(part.from).view(part.shape));
  });
  return results;
}

}  // namespace fst
