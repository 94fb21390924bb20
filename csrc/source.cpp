#include "source.h"

#include "error.h"
#include "memory.h"

namespace fst {

OpenSource::OpenSource(const std::string& path) : source_(call_core([&] { return open_source(to_rust(path)); })) {}

int64_t OpenSource::length() const { return static_cast<int64_t>(source_->length()); }

void OpenSource::read(int64_t begin, const at::Tensor& out) const {
  if (begin < 0) {
    throw_invalid_argument("begin must not be negative");
  }
  if (out.scalar_type() != at::kByte) {
    throw_invalid_argument("out must be a uint8 tensor");
  }
  const auto bytes = mutable_bytes_of(out);
  call_core([&] { source_->read(static_cast<uint64_t>(begin), bytes); });
}

}  // namespace fst
