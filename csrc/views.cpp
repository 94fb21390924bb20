#include "views.h"

#include <ATen/ops/from_blob.h>

#include <memory>

#include "error.h"
#include "load.h"

namespace fst {

MappedFiles::MappedFiles(const Selection& selection, const std::vector<int8_t>& types)
    : views_(call_core([&] { return selection.views(rust::Slice<const int8_t>(types.data(), types.size())); })) {}

void MappedFiles::verify() const {
  call_core([&] { views_->verify(); });
}

at::Tensor MappedFiles::view(size_t index, const Spec& spec) const {
  if (!is_view(index)) {
    return {};
  }
  // PyTorch copies the deleter, so the guard is shared.
  const auto guard = std::make_shared<rust::Box<ViewGuard>>(call_core([&] { return views_->guard(index); }));
  return at::from_blob(
      reinterpret_cast<void*>(views_->address(index)), shape_of(spec), [guard](void*) {},
      at::device(at::kCPU).dtype(stored_type(spec)));
}

}  // namespace fst
