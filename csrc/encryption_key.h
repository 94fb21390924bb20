// Script classes for keys of encrypted files, in the formats of safetensors and of tensorizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>

#include "fst/rust/bridge.rs.h"

namespace fst {

// `torch.classes.fst.EncryptionKey`: a secret key, which is overwritten in memory when the object is freed. It cannot
// be serialized. Bytes are contiguous uint8 tensors on the CPU, which the caller overwrites.
class OpenEncryptionKey : public torch::CustomClassHolder {
 public:
  using Optional = std::optional<c10::intrusive_ptr<OpenEncryptionKey>>;

  // Copies 32 bytes. New files show the label to everybody.
  OpenEncryptionKey(const at::Tensor& key, const std::string& label);
  explicit OpenEncryptionKey(rust::Box<EncryptionKey> key);

  // Copies a passphrase, from which keys are derived when files are opened or written. The limits are Argon2id's
  // for new files.
  static c10::intrusive_ptr<OpenEncryptionKey> of_passphrase(const at::Tensor& passphrase, int64_t passes,
                                                             int64_t memory_bytes, const std::string& label);

  // Reads a key from a local file: 32 bytes, or as many hexadecimal numbers.
  static c10::intrusive_ptr<OpenEncryptionKey> of_file(const std::string& path, const std::string& label);

  // Returns the key for the files of one save, which share one salt if the key is from a passphrase.
  c10::intrusive_ptr<OpenEncryptionKey> for_save() const;

  // Makes all loads without a key use this one for encrypted files, and saves whose metadata name its label, until
  // `unregister_key`.
  void register_key() const { key_->register_key(); }
  void unregister_key() const { key_->unregister_key(); }

  // Makes the local files that a path leads to open with another key, without encrypting their data again.
  // Returns false if one stays locked for so long. A negative limit is none.
  bool rotate(const std::string& path, const c10::intrusive_ptr<OpenEncryptionKey>& key, int64_t limit_ms) const;

  const EncryptionKey& key() const { return *key_; }

 private:
  const rust::Box<EncryptionKey> key_;
};

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
