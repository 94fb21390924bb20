#include "writer.h"

#include <ATen/Parallel.h>

#include <utility>

#include "cast.h"
#include "error.h"
#include "memory.h"
#include "memory_streams.h"
#include "views.h"

namespace fst {

namespace {

void append_tensor(AnyWriter& writer, const std::string& name, const at::Tensor& tensor) {
  const auto added = describe(name, tensor);
  call_core([&] { writer.add(added); });
  const auto append = [&](const at::Tensor& part) {
    call_core([&] { writer.append(device_stream_of(part), address_of(part), part.nbytes()); });
  };
  if (is_plain(tensor)) {
    append(tensor);
    return;
  }
  split(in_memory(name, tensor), tensor.element_size(),
        [&](const at::Tensor& part, uint64_t) { append(contiguous_copy(part)); });
}

void write_hashed(AnyWriter& writer, const std::string& name, const at::Tensor& tensor, const Writer::Kind& kind) {
  const auto added = describe_dense(name, tensor);
  const bool has_data = !tensor.is_meta();
  if (has_data && (!tensor.is_cpu() || !is_plain(tensor))) {
    throw_invalid_argument("tensor \"" + name + "\": must be contiguous on the CPU, or on meta");
  }
  const auto held = in_memory(name, tensor);
  const auto data = has_data ? bytes_of(held) : rust::Slice<const uint8_t>();
  call_core([&] { writer.write_hashed(added, std::get<0>(kind), std::get<1>(kind), has_data, data); });
}

}  // namespace

Writer::Writer(const std::string& path, const Metadata& metadata, bool is_tensorizer,
               const OpenEncryptionKey::Optional& key) {
  const auto file = describe_file(path, metadata, "", key);
  writer_.emplace(call_core([&] { return begin_writer(*file, is_tensorizer, at::get_num_threads()); }));
}

Writer::~Writer() {
  if (getpid() != process_ && writer_) {
    // A forked child has none of the writer's threads and would wait for them forever. The file belongs to the parent.
    (void)std::move(*writer_).into_raw();
  }
}

void Writer::write(const std::string& name, const at::Tensor& tensor, const std::optional<Kind>& kind) {
  const auto locked = lock();
  if (!writer_) {
    throw_invalid_argument("tensor \"" + name + "\": the writer is closed; create a new one");
  }
  if (kind) {
    write_hashed(**writer_, name, tensor, *kind);
  } else {
    append_tensor(**writer_, name, tensor);
  }
}

void Writer::close(bool discards) {
  const auto locked = lock();
  if (discards || !writer_) {
    writer_.reset();
    return;
  }
  auto writer = std::move(*writer_);
  writer_.reset();
  call_core([&] { finish_writer(std::move(writer)); });
}

std::unique_lock<std::mutex> Writer::lock() {
  if (getpid() != process_) {
    throw_invalid_argument("the writer belongs to the process that created it; create a new one after a fork");
  }
  return std::unique_lock(mutex_);
}

}  // namespace fst
