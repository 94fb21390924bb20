#include "converter.h"

#include <ATen/Parallel.h>

#include "error.h"
#include "load.h"

namespace fst {

namespace {

bool run_on_cuda(rust::Slice<const Conversion> conversions, c10::Device device) {
  const auto stream = native_handle(current_stream(device));
  return call_core([&] { return convert_on_cuda(conversions, device.index(), stream); });
}

}  // namespace

void Converter::add(size_t index, uint64_t source, c10::ScalarType from, const at::Tensor& target) {
  const auto elements = static_cast<uint64_t>(target.numel());
  if (elements == 0 || target.is_meta()) {
    return;
  }
  Work& work = works_.try_emplace(target.device()).first->second;
  const auto address = reinterpret_cast<uint64_t>(target.mutable_data_ptr());
  if (from == target.scalar_type()) {
    // A copy needs no dtype, and the core has not got all of PyTorch's.
    const auto byte = static_cast<int8_t>(at::kByte);
    work.conversions.push_back(Conversion{source, address, elements * target.element_size(), byte, byte});
  } else {
    work.conversions.push_back(
        Conversion{source, address, elements, static_cast<int8_t>(from), static_cast<int8_t>(target.scalar_type())});
  }
  work.indices.push_back(index);
}

void Converter::run(const std::function<void(size_t)>& copy) const {
  for (const auto& [device, work] : works_) {
    const rust::Slice<const Conversion> conversions(work.conversions.data(), work.conversions.size());
    if (device.is_cpu()) {
      call_core([&] { convert_on_host(conversions, at::get_num_threads()); });
    } else if (!device.is_cuda() || !run_on_cuda(conversions, device)) {
      for (const size_t index : work.indices) {
        copy(index);
      }
    }
  }
}

}  // namespace fst
