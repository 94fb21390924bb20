#include "source.h"

#include "error.h"
#include "memory.h"

namespace fst {

OpenSource::OpenSource(const std::string& path) : file_(call_core([&] { return open_source(to_rust(path)); })) {}

void OpenSource::read(int64_t begin, const at::Tensor& out) const {
  if (begin < 0) {
    throw_invalid_argument("begin must not be negative");
  }
  if (out.scalar_type() != at::kByte) {
    throw_invalid_argument("out must be a uint8 tensor");
  }
  const auto bytes = mutable_bytes_of(out);
  call_core([&] { file_.source->read(static_cast<uint64_t>(begin), bytes); });
}

}  // namespace fst
