#include "elements.h"

#include <algorithm>

namespace fst {

namespace {

// The same bits as integers, which every device can copy whatever the dtype means, without changing a NaN.
at::Tensor as_bits(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kShort);
    case 4:
      return tensor.view(at::kInt);
    default:
      return tensor.view(at::kLong);
  }
}

void split_from(const at::Tensor& tensor, uint64_t element_bytes, uint64_t begin,
                const std::function<void(const at::Tensor&, uint64_t)>& use) {
  const uint64_t elements = tensor.numel();
  if (elements == 0) {
    return;
  }
  if (elements * element_bytes <= kScratchBytes) {
    use(tensor, begin);
    return;
  }
  const int64_t rows = tensor.size(0);
  const uint64_t row_elements = elements / rows;
  const uint64_t row_bytes = row_elements * element_bytes;
  const int64_t step = std::max<int64_t>(1, kScratchBytes / row_bytes);
  for (int64_t row = 0; row < rows; row += step) {
    const auto part =
        row_bytes > kScratchBytes ? tensor.select(0, row) : tensor.narrow(0, row, std::min(step, rows - row));
    split_from(part, element_bytes, begin + row * row_elements, use);
  }
}

}  // namespace

bool has_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.key_set().has(c10::DispatchKey::Python);
}

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

void copy_elements(const at::Tensor& target, const at::Tensor& source) {
  const auto is_lazy = [](const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); };
  if (target.scalar_type() == source.scalar_type() && !is_lazy(target) && !is_lazy(source)) {
    as_bits(target).copy_(as_bits(source), /*non_blocking=*/true);
  } else {
    const_cast<at::Tensor&>(target).copy_(source, /*non_blocking=*/true);
  }
}

void split(const at::Tensor& tensor, uint64_t element_bytes,
           const std::function<void(const at::Tensor&, uint64_t)>& use) {
  split_from(tensor, element_bytes, 0, use);
}

}  // namespace fst
