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

  // Returns whether a file is encrypted.
  bool is_encrypted() const { return checkpoint_->is_encrypted(); }

  // Returns the names of all tensors, in the order of the files and of the bytes in each file.
  std::vector<std::string> names() const;

  // Returns the number of distinct shapes, the number of dimensions and the sizes of each, and for each tensor, in the
  // order of `names`, the index of its shape.
  std::vector<int64_t> shapes() const;

  // Returns the metadata of the only file. Throws if there are several.
  c10::Dict<std::string, std::string> metadata() const;

  // Returns the metadata of the index that the first path leads to. Empty if it leads to no index.
  c10::Dict<std::string, std::string> index_metadata() const;

  // Returns the path and the metadata of each file that has metadata.
  std::vector<Texts> texts() const;

  // Returns the dtype and the shape of a tensor as stored, its size in bytes, its first byte in its file, in a
  // `.tensors` file the first byte of its own header and its kind, or otherwise the first byte again and -1.
  Entry entry(const std::string& name) const;

  // Reads the indices of modules from the headers of tensors of `.tensors` files.
  std::vector<int64_t> module_indices(Strings names) const;

  // Compares contiguous tensors on the CPU with the hashes in `.tensors` files. Returns the names of those that differ,
  // each with the algorithm of the hash. The hashes of tensors that are stored without data cover none.
  std::vector<DifferingHash> differing_hashes(Strings names, const std::vector<at::Tensor>& tensors) const;

  // Returns the path of the file that contains the tensor.
  std::string path(const std::string& name) const;

  // Returns a name that is equal in all processes that map the same files on one machine. Empty if loads to the CPU do
  // not map the files.
  std::string page_cache() const;

  // Returns a name that is equal in two processes if they read the same bytes: of the same files through one kernel, or
  // of the same versions of objects. Empty if that cannot be told.
  std::string copy_name() const;

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

  // Returns the index regions of slices along one dimension of each named tensor.
  Regions regions_of_slices(Strings names, c10::IntArrayRef dims, c10::IntArrayRef starts,
                            c10::IntArrayRef lengths) const;

  // Reads one of several equal parts of the data and compares the digests, with `skips_groups` only those of files
  // without groups. Later loads of these files compare none, so the caller waits until all parts are verified.
  void verify(int64_t part, int64_t parts, bool skips_groups) const;
  // Does so for files that have one digest of all their bytes.
  void verify_whole_files() const;

  // Overwrites tensors of the shapes of index regions, with the casts of `Tensor.copy_`.
  void load_boxes_into(Strings names, const std::vector<int64_t>& starts, const std::vector<int64_t>& lengths,
                       const std::vector<int64_t>& steps, const std::vector<at::Tensor>& out) const;

  const Checkpoint& files() const { return *checkpoint_; }

 private:
  const rust::Box<Checkpoint> checkpoint_;
  const bool is_verified_;
};

}  // namespace fst
