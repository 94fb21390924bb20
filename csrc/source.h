// Script class for the bytes of a file.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <string>

#include "fst/rust/bridge.rs.h"

namespace fst {

// `torch.classes.fst.Source`: open local file or remote object of one version. All methods may be called concurrently.
class OpenSource : public torch::CustomClassHolder {
 public:
  explicit OpenSource(const std::string& path);

  // Returns the length in bytes.
  int64_t length() const { return static_cast<int64_t>(file_.bytes); }

  // Fills a contiguous uint8 tensor on the CPU with the bytes from `begin`.
  void read(int64_t begin, const at::Tensor& out) const;

 private:
  const OpenedFile file_;
};

}  // namespace fst
