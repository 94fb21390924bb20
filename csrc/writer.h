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
#include <tuple>

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

  // Kind of a tensor in tensorizer's format, and the index of its module.
  using Kind = std::tuple<int64_t, int64_t>;

  // Copies the current values of the tensor. Waits if the disk is slower than the caller. A file in tensorizer's format
  // takes a kind, and a contiguous tensor on the CPU, or one on meta without data.
  void write(const std::string& name, const at::Tensor& tensor, const std::optional<Kind>& kind);

  // Flushes the file and moves it to its path, or discards it. After a failed write, throws the same error again and
  // creates no file. Does nothing if called again.
  void close(bool discards);

 private:
  std::unique_lock<std::mutex> lock();

  const pid_t process_ = getpid();
  std::mutex mutex_;
  // Empty after `close`.
  std::optional<rust::Box<AnyWriter>> writer_;
};

}  // namespace fst
