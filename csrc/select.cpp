#include "select.h"

#include "error.h"
#include "memory.h"

namespace fst {

namespace {

rust::Slice<const int64_t> to_rust(c10::IntArrayRef numbers) { return {numbers.data(), numbers.size()}; }

}  // namespace

rust::Vec<rust::String> to_rust(Strings strings) {
  rust::Vec<rust::String> converted;
  converted.reserve(strings.size());
  for (size_t index = 0; index < strings.size(); ++index) {
    converted.push_back(fst::to_rust(strings.get(index)));
  }
  return converted;
}

std::vector<std::string> checkpoint_files(Strings paths) {
  const auto converted = to_rust(paths);
  const auto files = call_core([&] { return resolve_files(slice_of(converted)); });
  return {files.begin(), files.end()};
}

void configure_stores(const std::string& url, Strings names, Strings values) {
  const auto rust_names = to_rust(names);
  const auto rust_values = to_rust(values);
  call_core([&] { ::fst::configure_storage(fst::to_rust(url), slice_of(rust_names), slice_of(rust_values)); });
}

void verify_files_of(Strings paths, const std::string& verify) {
  const auto converted = to_rust(paths);
  call_core([&] { verify_checkpoint(slice_of(converted), fst::to_rust(verify)); });
}

rust::Box<Checkpoint> open_checkpoint(Strings paths, const OpenOptions& options) {
  const auto converted = to_rust(paths);
  auto request = call_core([&] { return open_request(fst::to_rust(options.verify)); });
  if (options.key) {
    request->set_key((*options.key)->key());
  }
  if (const auto& headers = options.headers) {
    if (!has_memory(*headers) || headers->scalar_type() != at::kByte || headers->dim() != 1 || !headers->is_cpu()) {
      throw_invalid_argument("headers must be a 1-d uint8 tensor on the CPU, as Checkpoint.headers() returns it");
    }
    request->set_headers(bytes_of(headers->contiguous()));
  }
  return call_core([&] { return open(slice_of(converted), *request); });
}

rust::Box<Selection> select_all(const Checkpoint& checkpoint) {
  return call_core([&] { return checkpoint.select_all(); });
}

rust::Box<Selection> select_named(const Checkpoint& checkpoint, Strings names) {
  const auto converted = to_rust(names);
  return call_core([&] { return checkpoint.select_tensors(slice_of(converted)); });
}

rust::Box<Selection> select_regions(const Checkpoint& checkpoint, Strings names, c10::IntArrayRef starts,
                                    c10::IntArrayRef lengths, c10::IntArrayRef steps) {
  const auto converted = to_rust(names);
  return call_core([&] {
    return checkpoint.select_regions(slice_of(converted), to_rust(starts), to_rust(lengths), to_rust(steps));
  });
}

rust::Vec<Spec> specs_of(const Selection& selection) {
  return call_core([&] { return selection.specs(); });
}

}  // namespace fst
