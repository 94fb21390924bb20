// Script class for the cipher of tensorizer's format.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>

#include "fst/rust/bridge.rs.h"

namespace fst {

// `torch.classes.fst.Cipher`: a secret key, which is overwritten in memory when the object is freed. All arguments are
// contiguous uint8 tensors on the CPU.
class OpenCipher : public torch::CustomClassHolder {
 public:
  // Copies a key. `salt` is empty if the key was not derived from a string.
  OpenCipher(const at::Tensor& key, const at::Tensor& salt, int64_t opslimit, int64_t memlimit);

  // Derives a key from a string into `key`.
  static void derive(const at::Tensor& string, const at::Tensor& salt, int64_t opslimit, int64_t memlimit,
                     const at::Tensor& key);

  const Cipher& cipher() const { return *cipher_; }

 private:
  const rust::Box<Cipher> cipher_;
};

}  // namespace fst
