#include "views.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <memory>

#include "error.h"
#include "memory.h"
#include "tensors.h"

namespace fst {

namespace {

// Deleter of all views, which tells them from other tensors.
void release_view(void* guard) { delete static_cast<rust::Box<ViewGuard>*>(guard); }

}  // namespace

MappedFiles::MappedFiles(const Selection& selection, const rust::Vec<Spec>& specs, bool is_verified)
    : mapped_(call_core([&] { return selection.views(slice_of(specs), is_verified); })) {}

at::Tensor MappedFiles::view(size_t index, const Spec& spec) const {
  if (!is_view(index)) {
    return {};
  }
  auto guard = std::make_unique<rust::Box<ViewGuard>>(call_core([&] { return mapped_.views->guard(index); }));
  return at::for_blob(reinterpret_cast<void*>(mapped_.addresses[index]), shape_of(spec))
      .context(guard.release(), release_view)
      .options(at::device(at::kCPU).dtype(stored_type(spec)))
      .make_tensor();
}

bool is_mapped(const at::Tensor& tensor) {
  return has_memory(tensor) && tensor.is_cpu() && tensor.storage().data_ptr().get_deleter() == &release_view;
}

at::Tensor in_memory(const std::string& name, const at::Tensor& tensor) {
  if (!is_mapped(tensor)) {
    return tensor;
  }
  const auto bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  const auto copy = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  call_core([&] { read_mapped(to_rust(name), address_of(tensor), mutable_bytes_of(copy)); });
  auto elements = copy.view(tensor.scalar_type()).as_strided(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) {
    elements = at::_conj(elements);
  }
  return tensor.is_neg() ? at::_neg_view(elements) : elements;
}

}  // namespace fst
