#include "select.h"

#include <utility>

#include "error.h"

namespace fst {

namespace {

rust::Vec<rust::String> to_rust(Strings texts) {
  rust::Vec<rust::String> converted;
  converted.reserve(texts.size());
  for (size_t index = 0; index < texts.size(); ++index) {
    converted.push_back(fst::to_rust(texts.get(index)));
  }
  return converted;
}

rust::Slice<const rust::String> slice_of(const rust::Vec<rust::String>& texts) { return {texts.data(), texts.size()}; }

rust::Slice<const int64_t> to_rust(c10::IntArrayRef numbers) { return {numbers.data(), numbers.size()}; }

}  // namespace

rust::Box<Checkpoint> open_checkpoint(Strings paths) {
  const auto converted = to_rust(paths);
  return call_core([&] { return open(slice_of(converted)); });
}

rust::Box<Selection> select_all(Strings paths) {
  auto checkpoint = open_checkpoint(paths);
  return call_core([&] { return select_all(std::move(checkpoint)); });
}

rust::Box<Selection> select_named(Strings paths, Strings names) {
  auto checkpoint = open_checkpoint(paths);
  const auto converted = to_rust(names);
  return call_core([&] { return select_tensors(std::move(checkpoint), slice_of(converted)); });
}

rust::Box<Selection> select_sliced(Strings paths, Strings names, c10::IntArrayRef dims, c10::IntArrayRef starts,
                                   c10::IntArrayRef lengths) {
  auto checkpoint = open_checkpoint(paths);
  const auto converted = to_rust(names);
  return call_core([&] {
    return select_slices(std::move(checkpoint), slice_of(converted), to_rust(dims), to_rust(starts), to_rust(lengths));
  });
}

rust::Vec<Spec> specs_of(const Selection& selection) {
  return call_core([&] { return selection.specs(); });
}

}  // namespace fst
