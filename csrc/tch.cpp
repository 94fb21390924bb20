#include "tch.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fst/rust/tch.rs.h"

namespace fst::tch {

namespace {

using RustStrings = rust::Slice<const rust::String>;

Strings strings(RustStrings texts) {
  Strings converted;
  converted.reserve(texts.size());
  for (const auto& text : texts) {
    converted.emplace_back(text);
  }
  return converted;
}

c10::Device device_of(rust::Str device) { return c10::Device(std::string(device)); }

std::optional<c10::ScalarType> dtype_of(int8_t dtype) {
  return dtype < 0 ? std::nullopt : std::optional(static_cast<c10::ScalarType>(dtype));
}

void add(rust::Vec<Named>& all, rust::String name, at::Tensor tensor) {
  all.push_back(Named{std::move(name), std::make_unique<at::Tensor>(std::move(tensor))});
}

std::pair<Strings, std::vector<at::Tensor>> separated(rust::Slice<const Named> all) {
  std::pair<Strings, std::vector<at::Tensor>> separated;
  for (const Named& named : all) {
    separated.first.emplace_back(named.name);
    separated.second.push_back(*named.tensor);
  }
  return separated;
}

}  // namespace

rust::Vec<Named> load_files(RustStrings paths, rust::Str device, int8_t dtype) {
  rust::Vec<Named> all;
  for (const auto& entry : fst::load_files(strings(paths), device_of(device), dtype_of(dtype))) {
    add(all, entry.key(), entry.value());
  }
  return all;
}

rust::Vec<Named> load_tensors(RustStrings paths, RustStrings names, rust::Str device, int8_t dtype) {
  auto tensors = fst::load_tensors(strings(paths), strings(names), device_of(device), dtype_of(dtype));
  rust::Vec<Named> all;
  for (size_t index = 0; index < tensors.size(); ++index) {
    add(all, names[index], std::move(tensors[index]));
  }
  return all;
}

rust::Vec<Named> load_slices(RustStrings paths, rust::Slice<const Slice> slices, rust::Str device, int8_t dtype) {
  std::vector<fst::Slice> wanted;
  for (const Slice& slice : slices) {
    wanted.push_back({std::string(slice.name), slice.dim, slice.start, slice.length});
  }
  auto tensors = fst::load_slices(strings(paths), wanted, device_of(device), dtype_of(dtype));
  rust::Vec<Named> all;
  for (size_t index = 0; index < tensors.size(); ++index) {
    add(all, slices[index].name, std::move(tensors[index]));
  }
  return all;
}

void load_into(RustStrings paths, rust::Slice<const Named> outputs) {
  const auto [names, tensors] = separated(outputs);
  fst::load_into(strings(paths), names, tensors);
}

void save_file(rust::Slice<const Named> named, rust::Str path, rust::Slice<const MetadataEntry> metadata) {
  const auto [names, tensors] = separated(named);
  Texts texts;
  for (const MetadataEntry& entry : metadata) {
    texts.insert(std::string(entry.key), std::string(entry.value));
  }
  fst::save_file(tensors, names, std::string(path), texts.empty() ? std::nullopt : std::optional(texts));
}

std::unique_ptr<Loader> open_loader(RustStrings paths, rust::Str device, int8_t dtype) {
  return std::make_unique<Loader>(strings(paths), device_of(device), LoaderOptions{.dtype = dtype_of(dtype)});
}

rust::Vec<Named> next(Loader& loader) {
  rust::Vec<Named> all;
  if (auto item = loader.next()) {
    add(all, item->name, std::move(item->tensor));
  }
  return all;
}

std::string text_of(const c10::Error& error) {
  const std::string code = "[out-of-memory] ";
  const std::string text = error.what_without_backtrace();
  const bool lacks_code = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr && !text.starts_with(code);
  return lacks_code ? code + text : text;
}

}  // namespace fst::tch
