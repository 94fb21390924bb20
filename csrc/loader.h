// Tensors one by one, while those behind them are still on their way.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "views.h"

namespace fst {

// Enough that the core reads on while a user looks at what is there.
constexpr int64_t kWindowBytes = 512ll << 20;

// `torch.classes.fst.Loader`. It allocates tensors in the order of the files, as many as a window holds, and lets the
// core fill them in the background. Any thread may call it, one at a time.
class Loader : public torch::CustomClassHolder {
 public:
  using Names = std::optional<c10::List<std::string>>;
  using Numbers = std::optional<std::vector<int64_t>>;
  using Item = std::tuple<int64_t, std::string, at::Tensor>;

  // Without `names` all tensors are wanted. With dimensions, starts and lengths, one of each for every name, slices
  // are. The tensors that have been allocated and not yet handed over take at most `window_bytes`, or are a single one.
  // `order` is "file" or "landed".
  Loader(const c10::List<std::string>& paths, c10::Device device, const Names& names,
         std::optional<c10::ScalarType> dtype, int64_t window_bytes, const std::string& order, const Numbers& dims,
         const Numbers& starts, const Numbers& lengths);
  ~Loader() override;

  // The next tensor, ready on the current stream, with its position among the names (or in the files) and its name.
  // None after the last one and after `close`. After an error, every call throws it again.
  std::optional<Item> next();

  // Ends the load and frees what has not been handed over.
  void close();

  // How many tensors there are in all, and how many bytes they take.
  int64_t size() const { return static_cast<int64_t>(specs_.size()); }
  int64_t total_bytes() const;

 private:
  // A tensor that is being filled.
  struct Ahead {
    at::Tensor tensor;
    // Shared with the others of its filling; free when all of them have been handed over.
    at::Tensor scratch;
    // For which both were allocated.
    c10::Stream stream;
  };

  std::unique_lock<std::mutex> lock();
  std::optional<Item> hand_over();
  bool is_read(size_t index) const;
  void look_ahead();
  at::Tensor allocate(size_t index, c10::ScalarType type) const;
  void submit(const std::vector<Destination>& destinations);
  at::Tensor take(size_t index);
  c10::Stream follow_current_stream();
  void release();

  const rust::Box<Selection> selection_;
  const rust::Vec<Spec> specs_;
  const c10::Device device_;
  std::vector<int8_t> types_;
  const uint64_t window_bytes_;
  const Order order_;
  const pid_t process_ = getpid();

  std::mutex mutex_;
  // Until the last tensor has been handed over.
  std::optional<rust::Box<Recording>> recording_;
  std::optional<MappedFiles> mapped_;
  // In which order the tensors are allocated, and how many of them have been, and have been handed over.
  std::vector<size_t> queue_;
  size_t allocated_ = 0;
  size_t handed_over_ = 0;
  // Of the tensors ahead.
  uint64_t bytes_ahead_ = 0;
  at::Tensor scratch_;
  std::map<size_t, Ahead> ahead_;
  // Ends before the memory that it fills is freed.
  std::optional<rust::Box<AnyStream>> stream_;
  // Why less has been allocated than the window holds, if it is for want of memory.
  std::exception_ptr shortage_;
  std::exception_ptr failure_;
};

}  // namespace fst
