#include "ranks_save.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "save.h"
#include "tensors.h"
#include "views.h"

namespace fst {

namespace {

// Copies elements of a tensor, in row-major order from the element `begin` on, to a contiguous 1-d tensor.
void copy_elements_from(const at::Tensor& target, const at::Tensor& tensor, int64_t begin) {
  const int64_t count = target.numel();
  if (count == 0) {
    return;
  }
  if (count == tensor.numel()) {
    copy_elements(target.view(tensor.sizes()), tensor, /*non_blocking=*/false);
    return;
  }
  const int64_t row_elements = tensor.numel() / tensor.size(0);
  int64_t row = begin / row_elements;
  int64_t done = 0;
  const auto copy_partial = [&](int64_t first, int64_t length) {
    copy_elements_from(target.narrow(0, done, length), tensor.select(0, row), first);
    done += length;
    ++row;
  };
  if (const int64_t first = begin % row_elements; first > 0) {
    copy_partial(first, std::min(row_elements - first, count));
  }
  if (const int64_t rows = (count - done) / row_elements; rows > 0) {
    copy_elements_from(target.narrow(0, done, rows * row_elements), tensor.narrow(0, row, rows), 0);
    done += rows * row_elements;
    row += rows;
  }
  if (done < count) {
    copy_partial(0, count - done);
  }
}

// Contiguous bytes of local tensors in the dtypes of their files. Bytes that are not in memory as such are copied, all
// in one batch.
class Pieces {
 public:
  Pieces(const rust::Vec<LocalTensor>& specs, const std::vector<LocalElements>& tensors, const DeviceStreams& streams)
      : specs_(specs), tensors_(tensors), streams_(streams) {}

  // Adds bytes `begin` to `end` of a local tensor. With `on_host`, copies bytes of a device to the memory of the host.
  // With `is_copied_here`, `copy_to` takes the bytes, and not the core, so they cannot be in a mapped file.
  void add(size_t index, uint64_t begin, uint64_t end, bool on_host, bool is_copied_here = false) {
    const at::Tensor& tensor = tensors_[index].tensor;
    const auto to = static_cast<c10::ScalarType>(specs_[index].scalar_type);
    const auto item_bytes = c10::elementSize(to);
    const auto first = static_cast<int64_t>(begin / item_bytes) - tensors_[index].first;
    const auto count = static_cast<int64_t>((end - begin) / item_bytes);
    const bool is_host = on_host && !tensor.is_cpu();
    const bool is_direct = is_plain(tensor) && tensor.scalar_type() == to && !is_host;
    if (is_direct && !(is_copied_here && is_read_mapped(tensor))) {
      const auto address = address_of(tensor) + static_cast<uint64_t>(first) * item_bytes;
      extents_.push_back(Extent{streams_.index_of(tensor), address, end - begin});
      return;
    }
    auto piece = elements(index, first, count);
    if (piece.scalar_type() != to) {
      const auto source = piece;
      piece = at::empty({count}, source.options().dtype(to));
      batch_.add(casts_.size(), address_of(source), source.scalar_type(), piece);
      casts_.emplace_back(piece, source);
      copied_bytes_ += source.nbytes();
    }
    copied_bytes_ += piece.nbytes();
    extents_.push_back(Extent{});
    copies_.push_back(Copy{extents_.size() - 1, std::move(piece), is_host});
  }

  // Adds bytes in the memory of the host.
  void add_host(uint64_t address, uint64_t bytes) { extents_.push_back(Extent{0, address, bytes}); }

  // Returns the memory of all bytes, in the order in which they were added.
  const std::vector<Extent>& run() {
    batch_.run([&](size_t index) { copy_elements(casts_[index].first, casts_[index].second, false); });
    for (Copy& copy : copies_) {
      if (copy.to_host) {
        copy.piece = copy.piece.cpu();
      }
      extents_[copy.extent] = Extent{streams_.index_of(copy.piece), address_of(copy.piece), copy.piece.nbytes()};
    }
    return extents_;
  }

  // Copies all bytes, which are on one device, one after the other to a buffer, which they fill.
  void copy_to(const at::Tensor& buffer) {
    const auto& extents = run();
    const auto device = streams_.device(extents.front().device);
    const bool is_here = device == buffer.device();
    const auto packed = is_here ? buffer : at::empty(buffer.sizes(), buffer.options().device(device));
    std::vector<at::Tensor> targets;
    CastBatch batch;
    int64_t offset = 0;
    for (const Extent& extent : extents) {
      targets.push_back(packed.narrow(0, offset, static_cast<int64_t>(extent.bytes)));
      batch.add(targets.size() - 1, extent.address, at::kByte, targets.back());
      offset += targets.back().numel();
    }
    batch.run([&](size_t index) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): the core has addresses as numbers.
      auto* source = reinterpret_cast<void*>(extents[index].address);
      targets[index].copy_(at::from_blob(source, targets[index].sizes(), packed.options()));
    });
    if (!is_here) {
      buffer.copy_(packed);
    }
  }

  // Returns the bytes of the copies.
  uint64_t copied_bytes() const { return copied_bytes_; }

 private:
  struct Copy {
    size_t extent;
    at::Tensor piece;
    bool to_host;
  };

  // Returns elements of a tensor in its own dtype, as a contiguous tensor.
  at::Tensor elements(size_t index, int64_t first, int64_t count) const {
    const at::Tensor& tensor = tensors_[index].tensor;
    const bool is_read = is_read_mapped(tensor);
    if (is_plain(tensor) && !is_read) {
      return tensor.view({-1}).narrow(0, first, count);
    }
    auto copy = at::empty({count}, tensor.options().memory_format(at::MemoryFormat::Contiguous));
    if (is_read) {
      const auto address = address_of(tensor) + static_cast<uint64_t>(first) * tensor.element_size();
      call_core([&] { read_mapped(specs_[index].name, address, mutable_bytes_of(copy)); });
    } else {
      copy_elements_from(copy, tensor, first);
    }
    return copy;
  }

  const rust::Vec<LocalTensor>& specs_;
  const std::vector<LocalElements>& tensors_;
  const DeviceStreams& streams_;
  std::vector<Extent> extents_;
  CastBatch batch_;
  std::vector<std::pair<at::Tensor, at::Tensor>> casts_;
  std::vector<Copy> copies_;
  uint64_t copied_bytes_ = 0;
};

LocalElements check_tensor(const LocalTensor& spec, int64_t rank, const std::optional<at::Tensor>& passed) {
  const std::string name(spec.name);
  const auto refuse = [&](const std::string& message) {
    throw_invalid_argument("tensor \"" + name + "\": " + message + "; nothing was written");
  };
  if (!spec.is_held) {
    return {};
  }
  const c10::IntArrayRef sizes(spec.shape.data(), spec.shape.size());
  const auto tensor = passed.value_or(at::Tensor());
  if (!tensor.defined()) {
    refuse(c10::str("rank ", rank, " holds a shard of shape ", sizes, ", but passes None"));
  }
  describe(name, tensor);
  const bool is_whole = tensor.sizes() == sizes;
  if (!is_whole && (tensor.dim() != 1 || tensor.numel() != spec.count)) {
    refuse(c10::str("the shard of rank ", rank, " has shape ", sizes, ", but the tensor ", tensor.sizes()));
  }
  const auto from = static_cast<int8_t>(tensor.scalar_type());
  if (from != spec.scalar_type && !can_convert(from, spec.scalar_type)) {
    refuse(c10::str("cannot cast ", name_of(tensor.scalar_type()), " to ",
                    name_of(static_cast<c10::ScalarType>(spec.scalar_type))));
  }
  return {tensor.detach(), is_whole ? 0 : spec.first};
}

std::vector<LocalElements> check_tensors(const rust::Vec<LocalTensor>& specs, int64_t rank,
                                         const RanksSave::Tensors& tensors) {
  if (tensors.size() != specs.size()) {
    throw_invalid_argument(
        c10::str(specs.size(), " tensors, but ", tensors.size(), " local ones; give one or None for each"));
  }
  std::vector<LocalElements> checked;
  checked.reserve(tensors.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    checked.push_back(check_tensor(specs[index], rank, tensors.get(index)));
  }
  return checked;
}

// Returns the memory of the tensors, after the host's memory.
DeviceStreams streams_of(const std::vector<LocalElements>& tensors) {
  const auto host = at::empty({0}, at::kByte);
  DeviceStreams streams(host);
  for (const LocalElements& elements : tensors) {
    if (elements.tensor.defined()) {
      streams.add(elements.tensor);
    }
  }
  return streams;
}

}  // namespace

OpenSavePlan::OpenSavePlan(const at::Tensor& numbers, const std::string& request)
    : plan_(call_core([&] { return plan_save(numbers_of("the list of numbers", numbers), to_rust(request)); })) {}

RanksSave::RanksSave(const c10::intrusive_ptr<OpenSavePlan>& plan, int64_t rank, Strings paths, Strings uploads,
                     const Tensors& tensors)
    : specs_(call_core([&] { return plan->core().local_tensors(rank); })),
      tensors_(check_tensors(specs_, rank, tensors)),
      streams_(streams_of(tensors_)),
      save_([&] {
        const auto names = to_rust(paths);
        const auto ids = to_rust(uploads);
        return call_core(
            [&] { return open_ranks_save(plan->core(), rank, slice_of(names), slice_of(ids), streams_.all()); });
      }()) {}

void RanksSave::read(int64_t window, const at::Tensor& send) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_vector("the send buffer", send, at::kByte, send.device());
  const auto sends = call_core([&] { return save_->sends(window); });
  const auto device_of = [&](const RankRange& range) { return tensors_[range.tensor].tensor.device(); };
  size_t next = 0;
  while (next < sends.size()) {
    Pieces pieces(specs_, tensors_, streams_);
    const RankRange& first = sends[next];
    uint64_t bytes = 0;
    do {
      const RankRange& range = sends[next++];
      bytes += range.end - range.begin;
      pieces.add(range.tensor, range.begin, range.end, /*on_host=*/false, /*is_copied_here=*/true);
    } while (next < sends.size() && pieces.copied_bytes() <= kScratchBytes &&
             device_of(sends[next]) == device_of(first));
    address_in(send, first.offset, bytes);
    pieces.copy_to(send.narrow(0, static_cast<int64_t>(first.offset), static_cast<int64_t>(bytes)));
  }
}

void RanksSave::unpack(int64_t window, const at::Tensor& received) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_vector("the receive buffer", received, at::kByte, received.device());
  const auto host = received.cpu();
  const auto sources = call_core([&] { return save_->sources(window); });
  size_t next = 0;
  size_t begin = 0;
  do {
    Pieces pieces(specs_, tensors_, streams_);
    // The sources of a range of a file are written at once.
    for (size_t item = begin; next < sources.size(); ++next) {
      const RankRange& range = sources[next];
      if (range.item != item && pieces.copied_bytes() > kScratchBytes) {
        break;
      }
      item = range.item;
      if (range.is_exchanged) {
        const auto bytes = range.end - range.begin;
        pieces.add_host(address_in(host, range.offset, bytes), bytes);
      } else {
        // Copies of many short pieces between devices would be slow.
        pieces.add(range.tensor, range.begin, range.end, !range.is_contiguous);
      }
    }
    const auto& extents = pieces.run();
    const size_t end = next < sources.size() ? sources[next].item : std::numeric_limits<size_t>::max();
    call_core([&] { save_->write(window, begin, end, slice_of(extents)); });
    begin = end;
  } while (next < sources.size());
}

}  // namespace fst
