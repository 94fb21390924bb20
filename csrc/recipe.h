// Loads outputs of recipes: tensors that rules make of the tensors of a checkpoint.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <string>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "load.h"
#include "select.h"

namespace fst {

// Requested outputs of rules: whole ones, or, with starts, lengths and steps, index regions of them.
struct RecipeRequest {
  Strings names;
  Strings rules;
  c10::IntArrayRef starts = {};
  c10::IntArrayRef lengths = {};
  c10::IntArrayRef steps = {};
};

// Loads outputs into new, contiguous tensors, in the order of the names. Outputs on the CPU that are one contiguous
// region of a tensor may be views of a mapped file.
std::vector<at::Tensor> load_recipe(const Checkpoint& checkpoint, const RecipeRequest& request,
                                    const LoadOptions& options);

// Loads outputs into existing tensors. Checks all tensors before it writes any.
void load_recipe_into(const Checkpoint& checkpoint, const RecipeRequest& request, at::TensorList out,
                      OutputDtype dtype);

// Loads recorded views, in JSON as rust/recipe/recorded.rs has them, into existing tensors of any dtypes. `held` are
// tensors in memory that they show.
void load_views_into(const Checkpoint& checkpoint, const std::string& views, at::TensorList held, at::TensorList out);

}  // namespace fst
