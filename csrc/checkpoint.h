// Script class for a checkpoint that stays open.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "load.h"
#include "recipe.h"
#include "select.h"

namespace fst {

// `torch.classes.fst.Checkpoint`: open files with parsed headers. Files that replace them under the same paths later
// have no effect. All methods may be called concurrently.
class OpenCheckpoint : public torch::CustomClassHolder {
 public:
  using Entry = std::tuple<std::string, std::vector<int64_t>, int64_t, int64_t, int64_t>;

  explicit OpenCheckpoint(Strings paths, const OpenOptions& options = {});
  OpenCheckpoint(rust::Box<Checkpoint> checkpoint, bool is_verified);

  // Exports the headers as uint8, for another process that opens the same files.
  at::Tensor headers() const;

  // Returns the names of all tensors, in the order of the files and of the bytes in each file, or, while files of a
  // remote index are not open, in the order of the index.
  std::vector<std::string> names() const;

  // Returns the metadata of the only file. Throws if there are several.
  c10::Dict<std::string, std::string> metadata() const;

  // Returns the dtype and the shape of a tensor as stored, its size in bytes, its first byte in its file, and
  // its kind in a `.tensors` file, or -1.
  Entry entry(const std::string& name) const;

  // Loads what is selected into new tensors, in its order.
  std::vector<at::Tensor> load(const Selected& selected, const LoadOptions& options) const;

  // Loads all tensors by name, in the order of the files.
  c10::Dict<std::string, at::Tensor> load_all(const LoadOptions& options) const;

  // Loads one tensor, or an index region of it: `ranges` is empty, or has a start, a length and a step for each
  // dimension. A result on the CPU that is not to be mapped is never a view of a file.
  at::Tensor load_region(const std::string& name, c10::IntArrayRef ranges, c10::Device device, bool is_mapped) const;

  // Overwrites tensors of the selected shapes. For outputs of the stored dtypes, all data is verified before anything
  // is written, if digests were requested.
  void load_into(const Selected& selected, at::TensorList out, OutputDtype dtype) const;

  // Loads outputs of a recipe into new tensors, in the order of the names.
  std::vector<at::Tensor> load_recipe(const RecipeRequest& request, const LoadOptions& options) const;

  // Overwrites tensors with outputs of a recipe. For outputs of the recipe's dtypes, all data is verified before
  // anything is written, if digests were requested.
  void load_recipe_into(const RecipeRequest& request, at::TensorList out, OutputDtype dtype) const;

  // Warns of the tensors that loads have not verified, which only a request to verify can permit.
  void warn_of_unverified() const;

  const Checkpoint& core() const { return *checkpoint_; }

 private:
  void verify_before_writes(OutputDtype dtype) const;

  const rust::Box<Checkpoint> checkpoint_;
  const bool is_verified_;
};

}  // namespace fst
