// Elements that lie somewhere and are wanted elsewhere, maybe as another dtype.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "fst/rust/bridge.rs.h"

namespace fst {

// Conversions into contiguous tensors, which are carried out together for each device.
class Converter {
 public:
  // `source` is where the elements of `target` lie as `from`, on the device of `target`, at any alignment.
  void add(size_t index, uint64_t source, c10::ScalarType from, const at::Tensor& target);

  // `copy` has PyTorch convert the tensor with this index, where the core cannot.
  void run(const std::function<void(size_t)>& copy) const;

 private:
  struct Work {
    std::vector<Conversion> conversions;
    std::vector<size_t> indices;
  };

  struct Order {
    bool operator()(c10::Device a, c10::Device b) const {
      return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
    }
  };
  std::map<c10::Device, Work, Order> works_;
};

}  // namespace fst
