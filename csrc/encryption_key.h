// Script class for keys of encrypted files, in the formats of safetensors and of tensorizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fst/rust/bridge.rs.h"

namespace fst {

// `torch.classes.fst.EncryptionKey`: a secret key, which is overwritten in memory when the object is freed. It cannot
// be serialized. Bytes are contiguous uint8 tensors on the CPU, which the caller overwrites.
class OpenEncryptionKey : public torch::CustomClassHolder {
 public:
  using Optional = std::optional<c10::intrusive_ptr<OpenEncryptionKey>>;

  // Copies 32 bytes. Or, with limits of Argon2id, which are the passes and the memory in bytes, a passphrase, from
  // which keys are derived when files are opened or written. Or, with a salt, too, the 32 bytes that were derived with
  // them. New files show the label to everybody.
  OpenEncryptionKey(const at::Tensor& secret, const std::string& label, const std::vector<int64_t>& limits,
                    const std::optional<at::Tensor>& salt);
  explicit OpenEncryptionKey(rust::Box<EncryptionKey> key);

  // Reads a key from a local file: 32 bytes, or as many hexadecimal numbers.
  static c10::intrusive_ptr<OpenEncryptionKey> of_file(const std::string& path, const std::string& label);

  // Derives a key from a string into `key`.
  static void derive(const at::Tensor& string, const std::vector<int64_t>& limits, const at::Tensor& salt,
                     const at::Tensor& key);

  // Returns the key for the files of one save, which share one salt if the key is from a passphrase.
  c10::intrusive_ptr<OpenEncryptionKey> for_save() const;

  // Makes all loads without a key use this one for encrypted files, and saves whose metadata name its label, or ends
  // that.
  void set_registered(bool is_registered) const { key_->set_registered(is_registered); }

  // Makes the local files that a path leads to open with another key, without encrypting their data again.
  // Returns false if one stays locked for so long. A negative limit is none.
  bool rotate(const std::string& path, const c10::intrusive_ptr<OpenEncryptionKey>& key, int64_t limit_ms) const;

  const EncryptionKey& key() const { return *key_; }

 private:
  const rust::Box<EncryptionKey> key_;
};

}  // namespace fst
