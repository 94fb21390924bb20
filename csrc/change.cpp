#include "change.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/atleast_1d.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "tensors.h"

namespace fst {

namespace {

std::string describe_staged(const at::Tensor& tensor) {
  return c10::str(name_of(tensor.scalar_type()), " of shape ", tensor.sizes(), " on ", tensor.device());
}

// Throws unless the change can be written.
void check_change(size_t index, const Change& change) {
  const auto refuse = [&](const std::string& message) {
    throw_invalid_argument(c10::str("change ", index, ": ", message, "; nothing was written"));
  };
  const auto& [target, positions, values] = change;
  const auto refusal = describe_unwritable(target);
  if (!refusal.empty()) {
    refuse("the target " + refusal);
  }
  if (!has_memory(values)) {
    refuse("the tensor of values " + describe_missing_memory(values));
  }
  const bool has_positions = positions.defined();
  if (has_positions && !has_memory(positions)) {
    refuse("the tensor of positions " + describe_missing_memory(positions));
  }
  if ((!values.is_cpu() && values.device() != target.device()) ||
      (has_positions && positions.device() != values.device())) {
    refuse(c10::str("the values are on ", values.device(),
                    has_positions ? c10::str(", the positions on ", positions.device()) : "",
                    ", but must be on cpu or on ", target.device(), ", as the target"));
  }
  if (values.scalar_type() != target.scalar_type() || values.is_conj() || values.is_neg()) {
    refuse(c10::str("the values are ", describe_staged(values), ", but must be of the target's dtype ",
                    name_of(target.scalar_type()), ", and no conjugate or negative view"));
  }
  if (!has_positions) {
    if (values.sizes() != target.sizes()) {
      refuse(c10::str("the values have the shape ", values.sizes(), ", but the target has ", target.sizes()));
    }
    return;
  }
  if (positions.scalar_type() != at::kUInt32 || positions.dim() != 1 || values.dim() != 1 ||
      positions.numel() != values.numel() || positions.numel() > target.numel()) {
    refuse(c10::str("the positions are ", describe_staged(positions), ", and the values ", describe_staged(values),
                    ", but must be 1-d uint32 and as many values, at most the ", target.numel(),
                    " elements of the target"));
  }
}

// Throws unless all positions in host memory are in their target. No write goes beyond a target, but one that is left
// out must be an error.
void check_positions(size_t index, const at::Tensor& positions, const at::Tensor& target) {
  const auto dense = positions.contiguous();
  const auto bytes = bytes_of(dense);
  const rust::Slice<const uint32_t> numbers(reinterpret_cast<const uint32_t*>(bytes.data()), dense.numel());
  const auto elements = target.numel();
  const auto beyond = [&](uint32_t number) { return std::cmp_greater_equal(number, elements); };
  if (const auto found = std::ranges::find_if(numbers, beyond); found != numbers.end()) {
    throw_invalid_argument(c10::str("change ", index, ": position ", *found, " is not among the ", elements,
                                    " elements of the target; nothing was written"));
  }
}

// Writes elements with PyTorch, in parts whose indices take at most kScratchBytes.
void put_with_torch(const Change& change) {
  const auto target = at::atleast_1d(as_bits(change.target));
  const auto values = as_bits(change.values);
  const auto step = static_cast<int64_t>(kScratchBytes / sizeof(int64_t)) / (target.dim() + 1);
  for (int64_t begin = 0; begin < values.numel(); begin += step) {
    const auto count = std::min(step, values.numel() - begin);
    auto rest = change.positions.narrow(0, begin, count).to(target.device()).to(at::kLong);
    c10::List<std::optional<at::Tensor>> indices;
    indices.resize(target.dim());
    for (int64_t dim = target.dim() - 1; dim >= 0; --dim) {
      indices.set(dim, rest.remainder(target.size(dim)));
      rest = rest.div(target.size(dim), "floor");
    }
    target.index_put_(indices, values.narrow(0, begin, count).to(target.device()));
  }
}

void write_with_torch(const Change& change) {
  if (change.positions.defined()) {
    put_with_torch(change);
  } else {
    copy_elements(change.target, change.values);
  }
}

// Writes changes in batches. Elements that are staged in host memory are copied to the device first, at most
// kScratchBytes of them at a time.
class ChangeWriter {
 public:
  void add(const Change& change) {
    const auto& [target, positions, values] = change;
    const bool is_uploaded = values.device() != target.device();
    const bool is_direct =
        is_plain(target) && is_plain(values) && (positions.defined() ? positions.is_contiguous() : !is_uploaded);
    if (!is_direct) {
      write_with_torch(change);
    } else if (is_uploaded) {
      upload(change);
    } else {
      push(change);
    }
  }

  void run() {
    batch_.run([&](size_t index) { write_with_torch(changes_[index]); });
    // The allocator reuses the memory of uploads for later work of the same stream only.
    batch_ = CastBatch();
    changes_.clear();
    uploaded_bytes_ = 0;
  }

 private:
  void push(const Change& change) {
    const auto& [target, positions, values] = change;
    if (positions.defined()) {
      batch_.add_put(changes_.size(), positions, values, target);
    } else {
      batch_.add(changes_.size(), address_of(values), values.scalar_type(), target);
    }
    changes_.push_back(change);
  }

  void upload(const Change& change) {
    const auto element_bytes = static_cast<int64_t>(sizeof(uint32_t) + change.values.element_size());
    const auto step = static_cast<int64_t>(kScratchBytes) / element_bytes;
    const auto part = [&](const at::Tensor& staged, int64_t begin, int64_t count) {
      const auto options = staged.options().device(change.target.device());
      return staged.narrow(0, begin, count).to(options, /*non_blocking=*/true);
    };
    for (int64_t begin = 0; begin < change.values.numel(); begin += step) {
      const auto count = std::min(step, change.values.numel() - begin);
      const auto bytes = static_cast<uint64_t>(count * element_bytes);
      if (uploaded_bytes_ + bytes > kScratchBytes) {
        run();
      }
      push(Change{change.target, part(change.positions, begin, count), part(change.values, begin, count)});
      uploaded_bytes_ += bytes;
    }
  }

  CastBatch batch_;
  std::vector<Change> changes_;
  uint64_t uploaded_bytes_ = 0;
};

// Keeps the memory of tensors on a GPU until the current stream has used it, if another stream has allocated it.
void record_on_current_stream(const Change& change) {
  for (const auto& staged : {change.positions, change.values}) {
    if (staged.defined() && staged.is_cuda()) {
      at::Tensor(staged).record_stream(current_stream(staged.device()));
    }
  }
}

}  // namespace

void write_changes(const std::vector<Change>& changes) {
  for (size_t index = 0; index < changes.size(); ++index) {
    check_change(index, changes[index]);
  }
  // Autograd does not record the writes, as under torch.no_grad().
  const at::AutoDispatchBelowADInplaceOrView guard;
  ChangeWriter writer;
  for (const auto& change : changes) {
    // A write that fails may have changed elements.
    mark_changed(change.target);
    record_on_current_stream(change);
    writer.add(change);
  }
  writer.run();
}

std::vector<Change> changes_of(at::TensorList targets, const c10::List<std::optional<at::Tensor>>& positions,
                               at::TensorList values) {
  if (positions.size() != targets.size() || values.size() != targets.size()) {
    throw_invalid_argument(c10::str(targets.size(), " targets, but ", positions.size(), " positions and ",
                                    values.size(), " values; give one of each for every target"));
  }
  std::vector<Change> changes;
  changes.reserve(targets.size());
  for (size_t index = 0; index < targets.size(); ++index) {
    const std::optional<at::Tensor> at = positions[index];
    if (at && has_memory(*at) && at->is_cpu() && at->scalar_type() == at::kUInt32) {
      check_positions(index, *at, targets[index]);
    }
    changes.push_back(Change{targets[index], at.value_or(at::Tensor()), values[index]});
  }
  return changes;
}

}  // namespace fst
