// A checkpoint that stays open between loads.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "select.h"

namespace fst {

// `torch.classes.fst.Checkpoint`. The files are those that were opened, whatever stands under their names by now. Any
// number of threads may call it at once.
class OpenCheckpoint : public torch::CustomClassHolder {
 public:
  using Dtype = std::optional<c10::ScalarType>;
  using Texts = std::tuple<std::string, c10::Dict<std::string, std::string>>;
  using Entry = std::tuple<std::string, std::vector<int64_t>, int64_t>;

  // With the headers that another process has read of the same files, none is read here.
  OpenCheckpoint(Strings paths, const std::optional<at::Tensor>& headers);

  // What another process needs to open the same files without reading headers: bytes.
  at::Tensor headers() const;

  // In the order of the files and of the bytes in each.
  std::vector<std::string> names() const;

  // The path and the metadata of each file that has any.
  std::vector<Texts> texts() const;

  // The dtype and the shape of a tensor as the file has them, and its bytes.
  Entry entry(const std::string& name) const;

  // The file that holds a tensor.
  std::string path(const std::string& name) const;

  // The readers that loads to a device would use, joined by "+".
  std::string reader(c10::Device device) const;

  // As the operators of these names.
  std::vector<at::Tensor> load_tensors(Strings names, c10::Device device, Dtype dtype) const;
  std::vector<at::Tensor> load_boxes(Strings names, const std::vector<int64_t>& starts,
                                     const std::vector<int64_t>& lengths, const std::vector<int64_t>& steps,
                                     c10::Device device, Dtype dtype) const;
  void load_into(Strings names, const std::vector<at::Tensor>& out) const;

  // The same boxes, into tensors of their shapes and dtypes.
  void load_boxes_into(Strings names, const std::vector<int64_t>& starts, const std::vector<int64_t>& lengths,
                       const std::vector<int64_t>& steps, const std::vector<at::Tensor>& out) const;

  const Checkpoint& files() const { return *checkpoint_; }

 private:
  const rust::Box<Checkpoint> checkpoint_;
};

}  // namespace fst
