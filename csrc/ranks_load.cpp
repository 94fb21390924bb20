#include "ranks_load.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <utility>

#include "cast.h"
#include "error.h"
#include "load.h"
#include "memory.h"
#include "select.h"
#include "tensors.h"
#include "version.h"

namespace fst {

namespace {

// Returns the elements of a shard whose stored bytes are `begin` to `end`.
at::Tensor elements(const at::Tensor& shard, uint64_t item_bytes, uint64_t begin, uint64_t end) {
  return shard.narrow(0, static_cast<int64_t>(begin / item_bytes), static_cast<int64_t>((end - begin) / item_bytes));
}

}  // namespace

OpenLoadPlan::OpenLoadPlan(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, const at::Tensor& numbers,
                           const std::string& request)
    : plan_(call_core([&] {
        return plan_load(checkpoint->core(), numbers_of("a list of requests", numbers), to_rust(request));
      })) {}

std::vector<at::Tensor> OpenLoadPlan::load_own(const LoadOptions& options, int64_t rank,
                                               const std::vector<int64_t>& items) const {
  const auto selection = select_own(rank, items);
  return load(*selection, specs_of(*selection, options.dtypes), options);
}

void OpenLoadPlan::load_own_into(int64_t rank, const std::vector<int64_t>& items,
                                 const std::vector<at::Tensor>& out) const {
  const auto selection = select_own(rank, items);
  load_into(*selection, specs_of(*selection), out, OutputDtype::kAny);
}

rust::Box<Selection> OpenLoadPlan::select_own(int64_t rank, const std::vector<int64_t>& items) const {
  return call_core([&] { return plan_->select_own(rank, slice_of(items)); });
}

RanksLoad::RanksLoad(const c10::intrusive_ptr<OpenLoadPlan>& plan, int64_t rank, const Outputs& out, c10::Device device)
    : plan_(call_core([&] { return plan_rank(plan->core(), rank); })),
      specs_(specs_of(*plan_.selection)),
      device_(resolve_device(device)),
      transfer_(*plan_.selection, specs_, device_) {
  if (out.size() != plan_.shards.size()) {
    throw_invalid_argument(
        c10::str(plan_.shards.size(), " shards, but ", out.size(), " outputs; give one for every shard"));
  }
  for (size_t index = 0; index < out.size(); ++index) {
    const auto tensor = out.get(index).value_or(at::Tensor());
    if (!tensor.defined()) {
      out_.emplace_back();
      continue;
    }
    const Spec& shard = plan_.shards[index];
    check_output(shard, tensor, OutputDtype::kAny);
    const auto from = stored_type(shard);
    const auto to = tensor.scalar_type();
    const bool is_castable = from == to || can_convert(static_cast<int8_t>(from), static_cast<int8_t>(to));
    if (!is_castable || !is_plain(tensor) || tensor.device() != device_) {
      throw_invalid_argument(c10::str("tensor \"", std::string(shard.name), "\": the output is ", name_of(to), " on ",
                                      tensor.device(), ", but must be contiguous on ", device_, ", of a dtype that ",
                                      name_of(from), " can be cast to; nothing was written"));
    }
    out_.push_back(tensor.detach().view({-1}));
  }
}

void RanksLoad::read(int64_t window, const at::Tensor& send) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_vector("the send buffer", send, at::kByte, device_);
  uint64_t bytes = 0;
  for (const RankRange& range : call_core([&] { return plan_.plan->reads(window); })) {
    if (range.is_exchanged) {
      transfer_.add_bytes(range.tensor, range.begin, range.end,
                          address_in(send, range.offset, range.end - range.begin));
    } else if (out_[range.item].defined()) {
      const auto item_bytes = c10::elementSize(stored_type(plan_.shards[range.item]));
      transfer_.add(range.tensor, range.begin, elements(out_[range.item], item_bytes, range.begin, range.end));
    } else {
      continue;
    }
    bytes += range.end - range.begin;
  }
  const auto recording = plan_.selection->record(rust::String(device_.str()), static_cast<int64_t>(bytes));
  transfer_.run();
}

void RanksLoad::unpack(int64_t window, const at::Tensor& received) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_vector("the receive buffer", received, at::kByte, device_);
  struct Copy {
    at::Tensor target;
    c10::ScalarType from;
    uint64_t offset;
    uint64_t bytes;
  };
  std::vector<Copy> copies;
  CastBatch batch;
  for (const RankRange& range : call_core([&] { return plan_.plan->receives(window); })) {
    const auto& shard = out_[range.item];
    if (!shard.defined()) {
      continue;
    }
    const auto from = stored_type(plan_.shards[range.item]);
    const auto bytes = range.end - range.begin;
    const auto target = elements(shard, c10::elementSize(from), range.begin, range.end);
    batch.add(copies.size(), address_in(received, range.offset, bytes), from, target);
    copies.push_back(Copy{target, from, range.offset, bytes});
  }
  batch.run([&](size_t index) {
    const Copy& copy = copies[index];
    // The clone is aligned for any dtype.
    const auto source =
        received.narrow(0, static_cast<int64_t>(copy.offset), static_cast<int64_t>(copy.bytes)).clone().view(copy.from);
    copy_elements(copy.target, source);
  });
}

void RanksLoad::finish() {
  const at::AutoDispatchBelowADInplaceOrView guard;
  transfer_.finish();
  for (size_t index = 0; index < out_.size(); ++index) {
    if (out_[index].defined() && !has_data(plan_.shards[index])) {
      fill_with_zeros(out_[index]);
    }
  }
  mark_changed(out_);
  forget_version(out_);
}

}  // namespace fst
