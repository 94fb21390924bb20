#include "views.h"

#include <ATen/Functions.h>

#include "error.h"

namespace fst {

MappedFiles::MappedFiles(const Selection& selection, const std::vector<int8_t>& types)
    : views_(call_core([&] { return selection.views(rust::Slice<const int8_t>(types.data(), types.size())); })) {}

at::Tensor MappedFiles::view(size_t index, const Spec& spec) {
  if (!is_view(index)) {
    return {};
  }
  auto& hold = holds_[views_->source(index)];
  if (!hold) {
    hold = std::make_shared<rust::Box<Hold>>(call_core([&] { return views_->hold(views_->source(index)); }));
  }
  return at::from_blob(
      reinterpret_cast<void*>(views_->address(index)), {spec.shape.data(), spec.shape.size()}, [hold](void*) {},
      at::device(at::kCPU).dtype(static_cast<c10::ScalarType>(spec.scalar_type)));
}

}  // namespace fst
