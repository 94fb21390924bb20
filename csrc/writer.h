// Tensors to a file one by one, while the next are being made.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <mutex>
#include <optional>
#include <string>

#include "fst/rust/bridge.rs.h"
#include "save.h"

namespace fst {

// `torch.classes.fst.Writer`. Any thread may call it, one at a time.
class Writer : public torch::CustomClassHolder {
 public:
  Writer(const std::string& path, const Texts& metadata);
  ~Writer() override;

  // Takes the tensor's values as they are now. Waits while the disk is behind.
  void write(const std::string& name, const at::Tensor& tensor);

  // Puts the file in its place, on the disk. After a failure it throws that again, and nothing is put anywhere. A
  // second time, and after `abandon`, it does nothing.
  void close();

  // Leaves nothing behind. After `close` it does nothing.
  void abandon();

 private:
  std::unique_lock<std::mutex> lock();

  const pid_t process_ = getpid();
  std::mutex mutex_;
  // Until the writer is closed.
  std::optional<rust::Box<AnyWriter>> writer_;
};

}  // namespace fst
