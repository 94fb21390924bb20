// Script class that writes tensors to a file one by one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "encryption_key.h"
#include "fst/rust/bridge.rs.h"
#include "save.h"

namespace fst {

// `torch.classes.fst.Writer`: writes in the background while the caller computes the next tensor. Calls from several
// threads run one after another.
class Writer : public torch::CustomClassHolder {
 public:
  // Begins a safetensors file with this metadata, or a file in tensorizer's format, which has no metadata. Either is
  // encrypted if there is a key.
  Writer(const std::string& path, const Metadata& metadata, bool is_tensorizer, const OpenEncryptionKey::Optional& key);
  ~Writer() override;

  // Copies the current values of the tensor. Waits if the disk is slower than the caller.
  void write(const std::string& name, const at::Tensor& tensor);

  // Writes a contiguous tensor on the CPU, or one on meta without data, to a file in tensorizer's format.
  void write_hashed(const std::string& name, const at::Tensor& tensor, int64_t kind, int64_t module);

  // Flushes the file and moves it to its path. After a failed write, throws the same error again and creates no file.
  // Does nothing if called again or after `abandon`.
  void close();

  // Discards the file. Does nothing after `close`.
  void abandon();

 private:
  std::unique_lock<std::mutex> lock();

  const pid_t process_ = getpid();
  std::mutex mutex_;
  // Empty after `close` or `abandon`.
  std::optional<rust::Box<AnyWriter>> writer_;
};

}  // namespace fst
