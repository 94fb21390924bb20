#include "group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "cast.h"
#include "error.h"
#include "load.h"
#include "memory.h"
#include "select.h"
#include "version.h"

namespace fst {

namespace {

rust::Box<GroupPlan> plan_of(const OpenCheckpoint& checkpoint, const std::vector<at::Tensor>& requests,
                             const std::vector<int64_t>& list_of_rank, const std::vector<int64_t>& caches,
                             const std::string& strategy, int64_t window_bytes) {
  std::vector<ShardRequests> lists;
  for (const auto& list : requests) {
    const auto numbers = numbers_of("a list of requests", list);
    ShardRequests copied;
    copied.numbers.reserve(numbers.size());
    std::ranges::copy(numbers, std::back_inserter(copied.numbers));
    lists.push_back(std::move(copied));
  }
  return call_core([&] {
    return plan_group(checkpoint.core(), slice_of(lists), slice_of(list_of_rank), slice_of(caches), strategy,
                      window_bytes);
  });
}

uint64_t address_in(const at::Tensor& buffer, uint64_t offset, uint64_t bytes) {
  const auto length = static_cast<uint64_t>(buffer.numel());
  if (offset > length || bytes > length - offset) {
    throw_invalid_argument(c10::str("the buffer has ", length, " bytes, too few for ", bytes, " bytes at byte ", offset,
                                    "; allocate the sum of the plan's splits"));
  }
  return mutable_address_of(buffer) + offset;
}

// Returns the elements of a shard whose stored bytes are `begin` to `end`.
at::Tensor elements(const at::Tensor& shard, uint64_t item_bytes, uint64_t begin, uint64_t end) {
  return shard.narrow(0, static_cast<int64_t>(begin / item_bytes), static_cast<int64_t>((end - begin) / item_bytes));
}

}  // namespace

OpenGroupPlan::OpenGroupPlan(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint,
                             const std::vector<at::Tensor>& requests, const std::vector<int64_t>& list_of_rank,
                             const std::vector<int64_t>& caches, const std::string& strategy, int64_t window_bytes)
    : plan_(plan_of(*checkpoint, requests, list_of_rank, caches, strategy, window_bytes)) {}

std::string OpenGroupPlan::collective(int64_t window) const {
  return std::string(plan_->collective(check_window(window)));
}

std::vector<std::vector<int64_t>> OpenGroupPlan::splits(int64_t rank, int64_t window) const {
  const auto sent = plan_->send_splits(check_rank(rank), check_window(window));
  if (collective(window) != "exchange") {
    return {to_vector(sent), {}};
  }
  return {to_vector(sent), to_vector(plan_->receive_splits(check_rank(rank), check_window(window)))};
}

std::vector<int64_t> OpenGroupPlan::reads(int64_t rank, int64_t window) const {
  return to_vector(plan_->reads(check_rank(rank), check_window(window)));
}

at::Tensor OpenGroupPlan::sent_bytes(int64_t window) const {
  const auto numbers = plan_->sent_bytes(check_window(window));
  const auto ranks = static_cast<int64_t>(plan_->ranks());
  return at::tensor(at::ArrayRef<int64_t>(numbers.data(), numbers.size()), at::kLong).view({ranks, ranks});
}

bool OpenGroupPlan::is_cached(const std::string& name) const {
  return call_core([&] { return plan_->is_cached(to_rust(name)); });
}

std::vector<int64_t> OpenGroupPlan::part_to_verify(int64_t rank) const {
  return to_vector(plan_->part_to_verify(check_rank(rank)));
}

std::vector<at::Tensor> OpenGroupPlan::load_own(const LoadOptions& options, int64_t rank,
                                                const std::vector<int64_t>& items) const {
  const auto selection = select_own(rank, items);
  return load(*selection, specs_of(*selection), options);
}

void OpenGroupPlan::load_own_into(int64_t rank, const std::vector<int64_t>& items,
                                  const std::vector<at::Tensor>& out) const {
  const auto selection = select_own(rank, items);
  load_into(*selection, specs_of(*selection), out, OutputDtype::kAny);
}

rust::Box<Selection> OpenGroupPlan::select_own(int64_t rank, const std::vector<int64_t>& items) const {
  return call_core([&] { return plan_->select_own(check_rank(rank), slice_of(items)); });
}

rust::Box<RankPlan> OpenGroupPlan::plan_for(int64_t rank) const {
  return call_core([&] { return plan_rank(*plan_, check_rank(rank)); });
}

GroupLoad::GroupLoad(const c10::intrusive_ptr<OpenGroupPlan>& plan, int64_t rank, const Outputs& out,
                     c10::Device device)
    : plan_(plan),
      rank_plan_(plan->plan_for(rank)),
      selection_(rank_plan_->selection()),
      specs_(specs_of(*selection_)),
      shards_(call_core([&] { return rank_plan_->shards(); })),
      device_(resolve_device(device)),
      transfer_(*selection_, specs_, device_) {
  if (out.size() != shards_.size()) {
    throw_invalid_argument(c10::str(shards_.size(), " shards, but ", out.size(), " outputs; give one for every shard"));
  }
  for (size_t index = 0; index < out.size(); ++index) {
    const Spec& shard = shards_[index];
    const std::optional<at::Tensor> tensor = out.get(index);
    const auto refuse = [&](const std::string& message) {
      throw_invalid_argument("tensor \"" + std::string(shard.name) + "\": " + message + "; nothing was written");
    };
    if (!tensor || !tensor->defined()) {
      out_.emplace_back();
      continue;
    }
    const auto from = stored_type(shard);
    const auto to = tensor->scalar_type();
    if (!is_dense(*tensor) || !is_plain(*tensor)) {
      refuse("the output is not a contiguous tensor");
    }
    if (tensor->sizes() != shape_of(shard)) {
      refuse(c10::str("the shard has shape ", shape_of(shard), ", but the output ", tensor->sizes()));
    }
    if (from != to && !can_convert(static_cast<int8_t>(from), static_cast<int8_t>(to))) {
      refuse(c10::str("the file holds ", name_of(from), ", which cannot be cast to the output's ", name_of(to)));
    }
    if (tensor->device() != device_) {
      refuse(c10::str("the output is on ", tensor->device(), ", but the load is to ", device_));
    }
    out_.push_back(tensor->detach().view({-1}));
  }
}

void GroupLoad::read(int64_t window, const at::Tensor& send) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_vector("the send buffer", send, at::kByte, device_);
  const size_t index = plan_->check_window(window);
  const auto local = call_core([&] { return rank_plan_->local_ranges(index); });
  const auto sent = call_core([&] { return rank_plan_->send_ranges(index); });
  uint64_t bytes = 0;
  for (const LocalRange& range : local) {
    if (out_[range.item].defined()) {
      const auto item_bytes = c10::elementSize(stored_type(shards_[range.item]));
      transfer_.add(range.tensor, range.begin, elements(out_[range.item], item_bytes, range.begin, range.end));
      bytes += range.end - range.begin;
    }
  }
  for (const SendRange& range : sent) {
    transfer_.add_bytes(range.tensor, range.begin, range.end, address_in(send, range.offset, range.end - range.begin));
    bytes += range.end - range.begin;
  }
  const auto recording = rank_plan_->record(bytes, rust::String(device_.str()));
  transfer_.run();
}

void GroupLoad::unpack(int64_t window, const at::Tensor& received) {
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
  for (const ReceiveRange& range : rank_plan_->receive_ranges(plan_->check_window(window))) {
    const auto& shard = out_[range.item];
    if (!shard.defined()) {
      continue;
    }
    const auto from = stored_type(shards_[range.item]);
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

void GroupLoad::finish() {
  const at::AutoDispatchBelowADInplaceOrView guard;
  transfer_.finish();
  for (size_t index = 0; index < out_.size(); ++index) {
    if (out_[index].defined() && !has_data(shards_[index])) {
      fill_with_zeros(out_[index]);
    }
  }
  mark_changed(out_);
  forget_version(out_);
}

}  // namespace fst
