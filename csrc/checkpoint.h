// Script class for a checkpoint that stays open.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "load.h"
#include "select.h"

namespace fst {

// `torch.classes.fst.Checkpoint`: open files with parsed headers. Files that replace them under the same paths later
// have no effect. All methods may be called concurrently.
class OpenCheckpoint : public torch::CustomClassHolder {
 public:
  using Names = std::optional<c10::List<std::string>>;
  // Starts, lengths and steps of index regions: one of each for every dimension of every tensor.
  using Regions = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>;
  using Texts = std::tuple<std::string, c10::Dict<std::string, std::string>>;
  using Entry = std::tuple<std::string, std::vector<int64_t>, int64_t, int64_t, int64_t, int64_t>;
  using DifferingHash = std::tuple<std::string, std::string>;

  explicit OpenCheckpoint(Strings paths, const OpenOptions& options = {});
  OpenCheckpoint(rust::Box<Checkpoint> checkpoint, bool is_verified);

  // Exports the headers as uint8, for another process that opens the same files.
  at::Tensor headers() const;

  // Returns the names of all tensors, in the order of the files and of the bytes in each file.
  std::vector<std::string> names() const;

  // Returns the number of distinct shapes, the number of dimensions and the sizes of each, and for each tensor, in the
  // order of `names`, the index of its shape.
  std::vector<int64_t> shapes() const;

  // Returns the metadata of the only file. Throws if there are several.
  c10::Dict<std::string, std::string> metadata() const;

  // Returns the path and the metadata of each file that has metadata.
  std::vector<Texts> texts() const;

  // Returns the dtype and the shape of a tensor as stored, its size in bytes, its first byte in its file, in a
  // `.tensors` file the first byte of its own header and its kind, or otherwise the first byte again and -1.
  Entry entry(const std::string& name) const;

  // Compares contiguous tensors on the CPU with the hashes in `.tensors` files. Returns the names of those that differ,
  // each with the algorithm of the hash. The hashes of tensors that are stored without data cover none.
  std::vector<DifferingHash> differing_hashes(Strings names, const std::vector<at::Tensor>& tensors) const;

  // Returns the readers for loads to a device, joined by "+".
  std::string reader(c10::Device device) const;

  // Implement the operators of the same names.
  c10::Dict<std::string, at::Tensor> load_files(const LoadOptions& options) const;
  std::vector<at::Tensor> load_tensors(const LoadOptions& options, Strings names) const;
  std::vector<at::Tensor> load_slices(const LoadOptions& options, Strings names, c10::IntArrayRef dims,
                                      c10::IntArrayRef starts, c10::IntArrayRef lengths) const;
  std::vector<at::Tensor> load_boxes(const LoadOptions& options, Strings names, c10::IntArrayRef starts,
                                     c10::IntArrayRef lengths, c10::IntArrayRef steps) const;
  // Loads one tensor, or an index region of it: `ranges` is empty, or has a start, a length and a step for each
  // dimension. A result on the CPU that is not to be mapped is never a view of a file.
  at::Tensor load_region(const std::string& name, c10::IntArrayRef ranges, c10::Device device, bool is_mapped) const;
  // Loads tensors into memory of their own: none is a view of a mapped file.
  std::vector<at::Tensor> load_copies(Strings names, c10::Device device) const;
  // Overwrites tensors of the stored shapes and dtypes, like the operator `load_into`. Reads and verifies the data
  // before anything is written, if digests were requested.
  void overwrite(Strings names, at::TensorList out) const;

  // Overwrites tensors of the stored shapes, with the casts of `Tensor.copy_`.
  void load_into(Strings names, const std::vector<at::Tensor>& out) const;

  // Selects all tensors, or the named ones, or an index region of each of these.
  rust::Box<Selection> select(const Names& names, const std::optional<Regions>& regions) const;

  // Overwrites tensors of the shapes of index regions, with the casts of `Tensor.copy_`.
  void load_boxes_into(Strings names, const std::vector<int64_t>& starts, const std::vector<int64_t>& lengths,
                       const std::vector<int64_t>& steps, const std::vector<at::Tensor>& out) const;

  const Checkpoint& core() const { return *checkpoint_; }

 private:
  const rust::Box<Checkpoint> checkpoint_;
  const bool is_verified_;
};

}  // namespace fst
