// Script class for the cipher of tensorizer's format.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>

#include "fst/rust/bridge.rs.h"

namespace fst {

// `torch.classes.fst.Cipher`: a secret key, which is overwritten in memory when the object is freed. All arguments are
// contiguous tensors on the CPU, of uint8 except for the data.
class OpenCipher : public torch::CustomClassHolder {
 public:
  // Copies a key. `salt` is empty if the key was not derived from a string.
  OpenCipher(const at::Tensor& key, const at::Tensor& salt, int64_t opslimit, int64_t memlimit);
  explicit OpenCipher(rust::Box<Cipher> cipher);

  // Derives the key from a string, as the key of a tensor with this encryption was derived.
  static c10::intrusive_ptr<OpenCipher> of_string(const at::Tensor& string, const at::Tensor& encryption);

  // Derives a key from a string into `key`.
  static void derive(const at::Tensor& string, const at::Tensor& salt, int64_t opslimit, int64_t memlimit,
                     const at::Tensor& key);

  // Decrypts the data of a tensor in place. Throws if the data is not authentic, and overwrites it with zeros.
  void decrypt(const at::Tensor& encryption, const at::Tensor& data) const;

  const Cipher& cipher() const { return *cipher_; }

 private:
  const rust::Box<Cipher> cipher_;
};

}  // namespace fst
