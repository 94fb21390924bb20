#include "tch.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "fst/rust/tch/lib.rs.h"

namespace fst::tch {

namespace {

using RustStrings = rust::Slice<const rust::String>;
using Rules = rust::Slice<const DtypeRule>;

Strings to_strings(RustStrings strings) {
  Strings converted;
  converted.reserve(strings.size());
  for (const auto& string : strings) {
    converted.emplace_back(string);
  }
  return converted;
}

c10::Device device_of(rust::Str device) { return {std::string(device)}; }

Dtypes to_dtypes(Rules rules) {
  std::vector<Dtypes::Rule> converted;
  for (const DtypeRule& rule : rules) {
    const auto type = static_cast<c10::ScalarType>(rule.scalar_type);
    converted.push_back({std::string(rule.pattern), rule.scalar_type < 0 ? std::nullopt : std::optional(type)});
  }
  return converted;
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

rust::Vec<Named> load_files(RustStrings paths, rust::Str device, Rules dtypes, rust::Str verify) {
  rust::Vec<Named> all;
  for (const auto& entry :
       fst::load_files(to_strings(paths), device_of(device), to_dtypes(dtypes), std::string(verify))) {
    add(all, entry.key(), entry.value());
  }
  return all;
}

rust::Vec<Named> load_tensors(RustStrings paths, RustStrings names, rust::Str device, Rules dtypes, rust::Str verify) {
  auto tensors = fst::load_tensors(to_strings(paths), to_strings(names), device_of(device), to_dtypes(dtypes),
                                   std::string(verify));
  rust::Vec<Named> all;
  for (size_t index = 0; index < tensors.size(); ++index) {
    add(all, names[index], std::move(tensors[index]));
  }
  return all;
}

rust::Vec<Named> load_slices(RustStrings paths, rust::Slice<const Slice> slices, rust::Str device, Rules dtypes,
                             rust::Str verify) {
  std::vector<fst::Slice> requested;
  for (const Slice& slice : slices) {
    requested.push_back({std::string(slice.name), slice.dim, slice.start, slice.length});
  }
  auto tensors =
      fst::load_slices(to_strings(paths), requested, device_of(device), to_dtypes(dtypes), std::string(verify));
  rust::Vec<Named> all;
  for (size_t index = 0; index < tensors.size(); ++index) {
    add(all, slices[index].name, std::move(tensors[index]));
  }
  return all;
}

rust::Vec<Named> load_boxes(RustStrings paths, rust::Slice<const Region> regions, rust::Str device, Rules dtypes,
                            rust::Str verify) {
  std::vector<fst::Region> requested;
  for (const Region& region : regions) {
    std::vector<fst::IndexRange> ranges;
    for (const IndexRange& range : region.ranges) {
      ranges.push_back({range.start, range.length, range.step});
    }
    requested.push_back({std::string(region.name), std::move(ranges)});
  }
  auto tensors =
      fst::load_boxes(to_strings(paths), requested, device_of(device), to_dtypes(dtypes), std::string(verify));
  rust::Vec<Named> all;
  for (size_t index = 0; index < tensors.size(); ++index) {
    add(all, regions[index].name, std::move(tensors[index]));
  }
  return all;
}

void load_into(RustStrings paths, rust::Slice<const Named> outputs, rust::Str verify) {
  const auto [names, tensors] = unzip(outputs);
  fst::load_into(to_strings(paths), names, tensors, std::string(verify));
}

void verify(RustStrings paths, rust::Str verify) { fst::verify(to_strings(paths), std::string(verify)); }

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

std::unique_ptr<Loader> open_loader(RustStrings paths, rust::Str device, Rules dtypes, rust::Str verify) {
  return std::make_unique<Loader>(to_strings(paths), device_of(device),
                                  LoaderOptions{.dtype = to_dtypes(dtypes), .verify = std::string(verify)});
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
