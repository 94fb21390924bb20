#include "tch.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "fst/rust/tch.rs.h"

namespace fst::tch {

namespace {

using RustStrings = rust::Slice<const rust::String>;

Strings to_strings(RustStrings strings) {
  Strings converted;
  converted.reserve(strings.size());
  for (const auto& string : strings) {
    converted.emplace_back(string);
  }
  return converted;
}

c10::Device device_of(rust::Str device) { return {std::string(device)}; }

std::optional<c10::ScalarType> dtype_of(int8_t dtype) {
  return dtype < 0 ? std::nullopt : std::optional(static_cast<c10::ScalarType>(dtype));
}

void add(rust::Vec<Named>& all, rust::String name, at::Tensor tensor) {
  all.push_back(Named{std::move(name), std::make_unique<at::Tensor>(std::move(tensor))});
}

std::pair<Strings, std::vector<at::Tensor>> unzip(rust::Slice<const Named> all) {
  Strings names;
  std::vector<at::Tensor> tensors;
  for (const Named& named : all) {
    names.emplace_back(named.name);
    tensors.push_back(*named.tensor);
  }
  return {std::move(names), std::move(tensors)};
}

std::optional<Texts> to_texts(rust::Slice<const MetadataEntry> metadata) {
  if (metadata.empty()) {
    return std::nullopt;
  }
  Texts texts;
  for (const MetadataEntry& entry : metadata) {
    texts.insert(std::string(entry.key), std::string(entry.value));
  }
  return texts;
}

}  // namespace

rust::Vec<Named> load_files(RustStrings paths, rust::Str device, int8_t dtype) {
  rust::Vec<Named> all;
  for (const auto& entry : fst::load_files(to_strings(paths), device_of(device), dtype_of(dtype))) {
    add(all, entry.key(), entry.value());
  }
  return all;
}

rust::Vec<Named> load_tensors(RustStrings paths, RustStrings names, rust::Str device, int8_t dtype) {
  auto tensors = fst::load_tensors(to_strings(paths), to_strings(names), device_of(device), dtype_of(dtype));
  rust::Vec<Named> all;
  for (size_t index = 0; index < tensors.size(); ++index) {
    add(all, names[index], std::move(tensors[index]));
  }
  return all;
}

rust::Vec<Named> load_slices(RustStrings paths, rust::Slice<const Slice> slices, rust::Str device, int8_t dtype) {
  std::vector<fst::Slice> requested;
  for (const Slice& slice : slices) {
    requested.push_back({std::string(slice.name), slice.dim, slice.start, slice.length});
  }
  auto tensors = fst::load_slices(to_strings(paths), requested, device_of(device), dtype_of(dtype));
  rust::Vec<Named> all;
  for (size_t index = 0; index < tensors.size(); ++index) {
    add(all, slices[index].name, std::move(tensors[index]));
  }
  return all;
}

rust::Vec<Named> load_boxes(RustStrings paths, rust::Slice<const Region> regions, rust::Str device, int8_t dtype) {
  std::vector<fst::Region> requested;
  for (const Region& region : regions) {
    std::vector<fst::IndexRange> ranges;
    for (const IndexRange& range : region.ranges) {
      ranges.push_back({range.start, range.length, range.step});
    }
    requested.push_back({std::string(region.name), std::move(ranges)});
  }
  auto tensors = fst::load_boxes(to_strings(paths), requested, device_of(device), dtype_of(dtype));
  rust::Vec<Named> all;
  for (size_t index = 0; index < tensors.size(); ++index) {
    add(all, regions[index].name, std::move(tensors[index]));
  }
  return all;
}

void load_into(RustStrings paths, rust::Slice<const Named> outputs) {
  const auto [names, tensors] = unzip(outputs);
  fst::load_into(to_strings(paths), names, tensors);
}

void save_file(rust::Slice<const Named> named, rust::Str path, rust::Slice<const MetadataEntry> metadata) {
  const auto [names, tensors] = unzip(named);
  fst::save_file(tensors, names, std::string(path), to_texts(metadata));
}

rust::Vec<uint8_t> serialize(rust::Slice<const Named> named, rust::Slice<const MetadataEntry> metadata) {
  const auto [names, tensors] = unzip(named);
  const at::Tensor bytes = fst::serialize(tensors, names, to_texts(metadata));
  rust::Vec<uint8_t> copied;
  copied.reserve(bytes.nbytes());
  std::copy_n(bytes.const_data_ptr<uint8_t>(), bytes.nbytes(), std::back_inserter(copied));
  return copied;
}

std::unique_ptr<Loader> open_loader(RustStrings paths, rust::Str device, int8_t dtype) {
  return std::make_unique<Loader>(to_strings(paths), device_of(device), LoaderOptions{.dtype = dtype_of(dtype)});
}

rust::Vec<Named> next(Loader& loader) {
  rust::Vec<Named> all;
  if (auto item = loader.next()) {
    add(all, item->name, std::move(item->tensor));
  }
  return all;
}

std::string text_of(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  const bool is_out_of_memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
  return is_out_of_memory ? std::string(out_of_memory(rust::String::lossy(text))) : text;
}

}  // namespace fst::tch
