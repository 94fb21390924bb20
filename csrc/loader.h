// Script class that returns tensors one by one while the next ones load.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "load.h"
#include "views.h"

namespace fst {

// Default limit for pending tensors. The core continues to read while the caller uses a tensor.
constexpr int64_t kWindowBytes = 512ll << 20;

// `torch.classes.fst.Loader`: allocates tensors in the order of the files, up to `window_bytes`, and lets the core load
// them in the background. Calls from several threads run one after another.
class Loader : public torch::CustomClassHolder {
 public:
  using Item = std::tuple<int64_t, std::string, at::Tensor>;
  using Items = std::tuple<std::vector<int64_t>, std::vector<std::string>, std::vector<at::Tensor>>;

  // Pending tensors, which are allocated but not yet returned, take at most `window_bytes`; a larger tensor is loaded
  // alone. `order` is "file" or "ready".
  Loader(rust::Box<Selection> selection, const LoadOptions& options, int64_t window_bytes, const std::string& order);
  ~Loader() override;

  // Returns the next tensor, ready on the current stream, with its position in `names` (or in the files) and its name.
  // Returns None after the last tensor and after `close`. After an error, each call throws the same error again.
  std::optional<Item> next();

  // Returns several of the next tensors that need no reads, at least one, as positions, names and tensors. Each call
  // costs more than a view of a mapped file. Empty after the last tensor.
  Items next_batch();

  // Ends the load and frees the tensors that were not returned.
  void close();

  // Return the number of all tensors and their size in memory.
  int64_t size() const { return static_cast<int64_t>(specs_.size()); }
  int64_t total_bytes() const;

 private:
  // Tensor that is allocated but not yet returned.
  struct Pending {
    at::Tensor tensor;
    // Scratch memory, shared by the tensors of a batch.
    at::Tensor scratch;
    // Stream on which both were allocated.
    c10::Stream stream;
  };

  std::unique_lock<std::mutex> lock();
  std::optional<Item> next_locked();
  std::optional<Item> advance();
  bool is_read(size_t index) const;
  void prefetch();
  void submit(const std::vector<Destination>& destinations);
  at::Tensor take(size_t index);
  void record_use(const Pending& pending, c10::Stream stream) const;
  AnyStream& stream();
  uint64_t use_current_stream();
  void release();

  const rust::Box<Selection> selection_;
  const rust::Vec<Spec> specs_;
  const c10::Device device_;
  const uint64_t window_bytes_;
  const Order order_;
  const pid_t process_ = getpid();

  std::mutex mutex_;
  // Empty after the last tensor was returned.
  std::optional<rust::Box<Recording>> recording_;
  std::optional<MappedFiles> mapped_;
  // Order of allocation, and the numbers of tensors that were allocated and returned.
  std::vector<size_t> queue_;
  size_t allocated_ = 0;
  size_t returned_ = 0;
  uint64_t pending_bytes_ = 0;
  at::Tensor scratch_;
  // Stream on which `scratch_` was allocated.
  std::optional<c10::Stream> scratch_stream_;
  // Stream of the caller that the core has used last.
  std::optional<c10::Stream> core_stream_;
  std::map<size_t, Pending> pending_;
  // Declared after the tensors that it writes to, so it is destroyed first.
  std::optional<rust::Box<AnyStream>> stream_;
  // Out-of-memory error that stopped the last prefetch, if any.
  std::exception_ptr allocation_failure_;
  std::exception_ptr failure_;
};

}  // namespace fst
