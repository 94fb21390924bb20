#include "recipe.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cast.h"
#include "dequantize.h"
#include "error.h"
#include "memory.h"
#include "tensors.h"
#include "transfer.h"
#include "version.h"
#include "views.h"

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

// Loads codes of quantized tensors part by part, and writes their numbers to tensors on this device. `indices` are
// those of the parts. Codes that are not mapped are copied, at most kScratchBytes at once, unless one part has more.
void fill_numbers(const RecipePlan& plan, const std::vector<at::Tensor>& tensors, c10::Device device,
                  const std::vector<size_t>& indices, Target target) {
  const auto scales = load(*plan.scales, specs_of(*plan.scales), {device, {}});
  const auto specs = specs_of(*plan.codes);
  std::optional<MappedFiles> mapped;
  if (device.is_cpu()) {
    mapped.emplace(*plan.codes, specs, /*is_verified=*/target == Target::New);
  }
  DeviceTransfer transfer(*plan.codes, specs, device);
  for (auto begin = indices.begin(); begin != indices.end();) {
    std::vector<at::Tensor> codes;
    auto end = begin;
    for (uint64_t bytes = 0; end != indices.end(); ++end) {
      const Spec& spec = specs[*end];
      auto tensor = mapped ? mapped->view(*end, spec) : at::Tensor();
      if (!tensor.defined()) {
        bytes += spec.bytes;
        if (bytes > kScratchBytes && bytes > spec.bytes) {
          break;
        }
        tensor = allocate(spec, device, stored_type(spec), &*plan.codes, *end);
        if (has_data(spec)) {
          transfer.add(*end, 0, tensor);
        }
      }
      codes.push_back(std::move(tensor));
    }
    transfer.run();
    for (const auto& tensor : codes) {
      const NumbersPart& part = plan.numbers[*begin++];
      const auto global_scale = part.global_scale < 0 ? at::Tensor() : scales[part.global_scale];
      // Codes of blocks may have a dimension for the bytes of a block, of which there may be fewer here.
      std::vector<int64_t> code_shape(part.target.sizes.begin(), part.target.sizes.end());
      if (!code_shape.empty()) {
        code_shape.back() = -1;
      }
      std::vector<int64_t> scales_shape(part.scales_shape.begin(), part.scales_shape.end());
      auto part_scales = scales[part.scales].view(scales_shape);
      if (scales_shape.size() > 2 && scales_shape.size() == code_shape.size()) {
        // All matrices share the scales of one.
        std::copy(code_shape.begin(), code_shape.end() - 2, scales_shape.begin());
        part_scales = part_scales.expand(scales_shape);
      }
      const Dequantization dequantization{std::string(part.scheme), std::move(part_scales), global_scale, part.block[0],
                                          part.block[1]};
      dequantize_into(tensor.view(code_shape), dequantization, part.begin[0], part.begin[1],
                      elements_of(tensors, part.target));
    }
  }
  transfer.finish();
}

// Loads the parts of a plan into the outputs, and copies what temporary tensors hold of them.
void fill_part(const RecipePlan& plan, std::vector<at::Tensor> tensors, Target target) {
  for (const auto& temporary : plan.temporaries) {
    const auto device = tensors[temporary.output].device();
    tensors.push_back(temporary.is_result ? at::Tensor()
                                          : allocate(temporary.spec, device, stored_type(temporary.spec)));
  }
  std::vector<at::Tensor> parts;
  parts.reserve(plan.targets.size());
  for (const auto& elements : plan.targets) {
    parts.push_back(elements_of(tensors, elements));
  }
  std::map<c10::Device, std::vector<size_t>, DeviceOrder> numbers;
  for (size_t index = 0; index < plan.numbers.size(); ++index) {
    numbers[tensors[plan.numbers[index].target.tensor].device()].push_back(index);
  }
  if (!parts.empty()) {
    load_into(*plan.parts, specs_of(*plan.parts), parts, OutputDtype::kAny, target);
  }
  for (const auto& [device, indices] : numbers) {
    fill_numbers(plan, tensors, device, indices, target);
  }
  auto quantization = plan.quantizations.begin();
  for (size_t index = 0; index < plan.copies.size(); ++index) {
    for (; quantization != plan.quantizations.end() && quantization->copies_before == index; ++quantization) {
      auto& input = tensors[quantization->input];
      std::tie(tensors[quantization->codes], tensors[quantization->codes + 1]) = quantize_tensor(
          std::exchange(input, {}), std::string(quantization->scheme), c10::IntArrayRef(quantization->block));
    }
    const auto& copy = plan.copies[index];
    copy_elements(elements_of(tensors, copy.target), elements_of(tensors, copy.source));
  }
}

// Fills the outputs. Checks digests that were requested before.
void fill(const rust::Vec<RecipePlan>& plans, const std::vector<at::Tensor>& tensors, Target target) {
  call_core([&] {
    for (const auto& plan : plans) {
      if (!plan.numbers.empty()) {
        plan.codes->check(target);
        plan.scales->check(target);
      }
    }
    // Loads check the first ones.
    for (size_t index = 1; index < plans.size(); ++index) {
      plans[index].parts->check(target);
    }
  });
  fill_part(plans[0], tensors, target);
  for (size_t index = 1; index < plans.size(); ++index) {
    // Loads into new temporary tensors only.
    fill_part(plans[index], tensors, Target::New);
  }
}

// Fills existing tensors with outputs. `held` are the tensors in memory that recorded views show.
void fill_outputs(RecipeOutputs& outputs, at::TensorList held, at::TensorList out, OutputDtype dtype) {
  check_outputs(call_core([&] { return outputs.specs({}); }), out, dtype);
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
  const auto plans = call_core([&] { return outputs.plan(slice_of(targets)); });
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto mark_written = [&] {
    mark_changed(out);
    forget_version(out);
  };
  auto tensors = out.vec();
  tensors.insert(tensors.end(), held.begin(), held.end());
  try {
    fill(plans, tensors, Target::Existing);
  } catch (...) {
    // Some elements may have changed.
    mark_written();
    throw;
  }
  mark_written();
}

}  // namespace

std::vector<at::Tensor> load_recipe(const Checkpoint& checkpoint, const RecipeRequest& request,
                                    const LoadOptions& options) {
  const auto device = resolve_device(options.device);
  auto outputs = outputs_of(checkpoint, request);
  const auto specs = call_core([&] { return outputs->specs(slice_of(options.dtypes)); });
  // Results are no views for autograd.
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<at::Tensor> tensors(specs.size());
  rust::Vec<RecipePlan> plans;
  if (!device.is_meta()) {
    plans = call_core([&] { return outputs->plan({}); });
    const RecipePlan& plan = plans[0];
    auto whole_specs = specs_of(*plan.whole);
    for (size_t index = 0; index < whole_specs.size(); ++index) {
      whole_specs[index].target_type = specs[plan.whole_outputs[index]].target_type;
    }
    auto whole = load(*plan.whole, whole_specs, {device, {}, options.is_mapped});
    for (size_t index = 0; index < whole.size(); ++index) {
      const size_t output = plan.whole_outputs[index];
      tensors[output] = whole[index].view(shape_of(specs[output]));
    }
  }
  for (size_t index = 0; index < specs.size(); ++index) {
    if (!tensors[index].defined()) {
      tensors[index] = allocate(specs[index], device, target_type(specs[index]));
    }
  }
  if (!plans.empty()) {
    fill(plans, tensors, Target::New);
  }
  return tensors;
}

void load_recipe_into(const Checkpoint& checkpoint, const RecipeRequest& request, at::TensorList out,
                      OutputDtype dtype) {
  auto outputs = outputs_of(checkpoint, request);
  fill_outputs(*outputs, {}, out, dtype);
}

void load_views_into(const Checkpoint& checkpoint, const std::string& views, at::TensorList held, at::TensorList out) {
  for (const auto& tensor : held) {
    // Throws for a tensor without memory.
    address_of(tensor);
  }
  auto outputs = call_core([&] { return checkpoint.recorded_outputs(to_rust(views), held.size()); });
  fill_outputs(*outputs, held, out, OutputDtype::kAny);
}

}  // namespace fst
