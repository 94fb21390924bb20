#include "recipe.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <cstddef>
#include <optional>
#include <utility>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "tensors.h"
#include "version.h"

namespace fst {

namespace {

rust::Box<RecipeOutputs> outputs_of(const Checkpoint& checkpoint, const RecipeRequest& request) {
  const auto rules = to_rust(request.rules);
  const auto names = to_rust(request.names);
  return call_core([&] {
    return checkpoint.recipe_outputs(slice_of(rules), slice_of(names), slice_of(request.starts),
                                     slice_of(request.lengths), slice_of(request.steps));
  });
}

c10::IntArrayRef list_of(const rust::Vec<int64_t>& numbers) { return {numbers.data(), numbers.size()}; }

at::Tensor elements_of(const std::vector<at::Tensor>& tensors, const StridedElements& elements) {
  const auto& tensor = tensors[elements.tensor];
  return tensor.as_strided(list_of(elements.sizes), list_of(elements.strides),
                           tensor.storage_offset() + elements.offset);
}

// Loads the parts of a plan into the outputs, and copies what temporary tensors hold of them.
void fill(const RecipePlan& plan, std::vector<at::Tensor> tensors, Target target) {
  for (const auto& temporary : plan.temporaries) {
    const auto device = tensors[temporary.output].device();
    tensors.push_back(allocate(temporary.spec, device, stored_type(temporary.spec)));
  }
  std::vector<at::Tensor> parts;
  parts.reserve(plan.targets.size());
  for (const auto& elements : plan.targets) {
    parts.push_back(elements_of(tensors, elements));
  }
  if (!parts.empty()) {
    load_into(*plan.parts, specs_of(*plan.parts), parts, OutputDtype::kAny, target);
  }
  for (const auto& copy : plan.copies) {
    copy_elements(elements_of(tensors, copy.target), elements_of(tensors, copy.source));
  }
}

}  // namespace

std::vector<at::Tensor> load_recipe(const Checkpoint& checkpoint, const RecipeRequest& request,
                                    const LoadOptions& options) {
  const auto device = resolve_device(options.device);
  auto outputs = outputs_of(checkpoint, request);
  call_core([&] { outputs->set_dtypes(slice_of(options.dtypes)); });
  const auto specs = call_core([&] { return outputs->specs(); });
  // Results are no views for autograd.
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<at::Tensor> tensors(specs.size());
  std::optional<RecipePlan> plan;
  if (!device.is_meta()) {
    plan = call_core([&] { return outputs->plan({}); });
    auto whole_specs = specs_of(*plan->whole);
    for (size_t index = 0; index < whole_specs.size(); ++index) {
      whole_specs[index].target_type = specs[plan->whole_outputs[index]].target_type;
    }
    auto whole = load(*plan->whole, whole_specs, {device, {}, options.is_mapped});
    for (size_t index = 0; index < whole.size(); ++index) {
      const size_t output = plan->whole_outputs[index];
      tensors[output] = whole[index].view(shape_of(specs[output]));
    }
  }
  for (size_t index = 0; index < specs.size(); ++index) {
    if (!tensors[index].defined()) {
      tensors[index] = allocate(specs[index], device, target_type(specs[index]));
    }
  }
  if (plan) {
    fill(*plan, tensors, Target::New);
  }
  return tensors;
}

void load_recipe_into(const Checkpoint& checkpoint, const RecipeRequest& request, at::TensorList out,
                      OutputDtype dtype) {
  auto outputs = outputs_of(checkpoint, request);
  check_outputs(call_core([&] { return outputs->specs(); }), out, dtype);
  if (out.empty()) {
    return;
  }
  std::vector<RecipeTarget> targets;
  targets.reserve(out.size());
  for (const auto& tensor : out) {
    rust::Vec<int64_t> strides;
    for (const int64_t stride : tensor.strides()) {
      strides.push_back(stride);
    }
    targets.push_back(RecipeTarget{static_cast<int8_t>(tensor.scalar_type()), std::move(strides)});
  }
  const auto plan = call_core([&] { return outputs->plan(slice_of(targets)); });
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto mark_written = [&] {
    mark_changed(out);
    forget_version(out);
  };
  try {
    fill(plan, out.vec(), Target::Existing);
  } catch (...) {
    // Some elements may have changed.
    mark_written();
    throw;
  }
  mark_written();
}

}  // namespace fst
