#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "error.h"

namespace fst {

namespace {

void check_memory(const at::Tensor& tensor) {
  if (!has_memory(tensor)) {
    throw_invalid_argument("a tensor " + describe_missing_memory(tensor));
  }
}

void check_bytes(const at::Tensor& tensor) {
  check_memory(tensor);
  if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    throw_invalid_argument("a tensor is not contiguous on the CPU; pass tensor.cpu().contiguous()");
  }
}

}  // namespace

bool has_memory(const at::Tensor& tensor) {
  // Other layouts and nested tensors have neither strides nor always a storage.
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested() || !tensor.has_storage()) {
    return false;
  }
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return false;
  }
  if (tensor.numel() == 0) {
    return !tensor.is_meta();
  }
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  // Wrappers have a storage without memory. A storage may also have become too small for its tensors.
  return storage._mutable_data_ptr_no_checks().get() != nullptr &&
         at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                          tensor.storage_offset()) <= storage.nbytes();
}

bool is_dense(const at::Tensor& tensor) {
  return has_memory(tensor) || (tensor.is_meta() && tensor.layout() == at::kStrided && !tensor.is_nested());
}

std::string describe_missing_memory(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "is undefined";
  }
  if (tensor.layout() != at::kStrided) {
    return c10::str("is not dense, but has the layout ", tensor.layout(), "; pass that of to_dense()");
  }
  if (tensor.is_meta()) {
    return "is on meta and has no values; load or initialize it first";
  }
  return "has no memory of its own: it wraps other tensors, as a DTensor or FakeTensor does, or its storage was freed; "
         "pass a tensor that holds the values, such as that of DTensor.to_local(), DTensor.full_tensor() or clone()";
}

uint64_t address_of(const at::Tensor& tensor) {
  check_memory(tensor);
  return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
}

uint64_t mutable_address_of(const at::Tensor& tensor) {
  check_memory(tensor);
  return reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
}

uint64_t address_in(const at::Tensor& buffer, uint64_t offset, uint64_t bytes) {
  const auto length = static_cast<uint64_t>(buffer.numel());
  if (offset > length || bytes > length - offset) {
    throw_invalid_argument(c10::str("the buffer has ", length, " bytes, too few for ", bytes, " bytes at byte ", offset,
                                    "; allocate the sum of the plan's splits"));
  }
  return mutable_address_of(buffer) + offset;
}

TensorMemory memory_of(const at::Tensor& tensor) {
  if (!has_memory(tensor)) {
    return {};
  }
  return {address_of(tensor), tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()};
}

void check_vector(const std::string& argument, const at::Tensor& tensor, c10::ScalarType dtype, c10::Device device,
                  std::optional<int64_t> elements) {
  const auto refuse = [&](const std::string& found) {
    throw_invalid_argument(c10::str(argument, " ", found, ", but must be a contiguous 1-d ", name_of(dtype),
                                    " tensor on ", device, elements ? c10::str(" of ", *elements, " elements") : ""));
  };
  if (!has_memory(tensor)) {
    refuse(describe_missing_memory(tensor));
  }
  if (tensor.scalar_type() != dtype || tensor.dim() != 1 || !tensor.is_contiguous() || tensor.device() != device ||
      tensor.numel() != elements.value_or(tensor.numel())) {
    refuse(c10::str("is ", name_of(tensor.scalar_type()), " of shape ", tensor.sizes(), " on ", tensor.device()));
  }
}

rust::Slice<const int64_t> numbers_of(const std::string& argument, const at::Tensor& tensor) {
  check_vector(argument, tensor, at::kLong);
  return {static_cast<const int64_t*>(tensor.const_data_ptr()), static_cast<size_t>(tensor.numel())};
}

rust::Slice<const uint8_t> bytes_of(const at::Tensor& tensor) {
  check_bytes(tensor);
  return {static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes()};
}

rust::Slice<uint8_t> mutable_bytes_of(const at::Tensor& tensor) {
  check_bytes(tensor);
  return {static_cast<uint8_t*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

MemoryRange range_of(const at::Tensor& tensor) {
  const auto bytes = bytes_of(tensor);
  return {reinterpret_cast<uint64_t>(bytes.data()), bytes.size()};
}

at::Tensor to_tensor(const rust::Vec<uint8_t>& bytes) {
  auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::ranges::copy(bytes, mutable_bytes_of(tensor).begin());
  return tensor;
}

}  // namespace fst
