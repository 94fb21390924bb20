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

template <typename List>
Strings to_strings(const List& strings) {
  Strings converted;
  converted.reserve(strings.size());
  for (const auto& string : strings) {
    converted.emplace_back(string);
  }
  return converted;
}

c10::Device device_of(const Load& load) { return {std::string(load.device)}; }

Dtypes dtypes_of(const Load& load) {
  std::vector<Dtypes::Rule> converted;
  for (const DtypeRule& rule : load.dtypes) {
    const auto type = static_cast<c10::ScalarType>(rule.scalar_type);
    converted.push_back({std::string(rule.pattern), rule.scalar_type < 0 ? std::nullopt : std::optional(type)});
  }
  return converted;
}

void add(rust::Vec<Named>& all, rust::String name, at::Tensor tensor) {
  all.push_back(Named{std::move(name), std::make_unique<at::Tensor>(std::move(tensor))});
}

// Returns tensors whose names the caller knows.
rust::Vec<Named> unnamed(std::vector<at::Tensor> tensors) {
  rust::Vec<Named> all;
  for (auto& tensor : tensors) {
    add(all, {}, std::move(tensor));
  }
  return all;
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

std::optional<std::string> to_version(RustStrings version) {
  return version.empty() ? std::nullopt : std::optional(std::string(version.front()));
}

rust::Vec<rust::String> from_version(const std::optional<std::string>& version) {
  rust::Vec<rust::String> text;
  if (version) {
    text.push_back(rust::String::lossy(*version));
  }
  return text;
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

rust::Vec<Named> load_files(const Load& load) {
  rust::Vec<Named> all;
  for (const auto& entry :
       fst::load_files(to_strings(load.paths), device_of(load), dtypes_of(load), std::string(load.verify))) {
    add(all, entry.key(), entry.value());
  }
  return all;
}

rust::Vec<Named> load_tensors(const Load& load, RustStrings names) {
  return unnamed(fst::load_tensors(to_strings(load.paths), to_strings(names), device_of(load), dtypes_of(load),
                                   std::string(load.verify)));
}

rust::Vec<Named> load_slices(const Load& load, rust::Slice<const Slice> slices) {
  std::vector<fst::Slice> requested;
  for (const Slice& slice : slices) {
    requested.push_back({std::string(slice.name), slice.dim, slice.start, slice.length});
  }
  return unnamed(
      fst::load_slices(to_strings(load.paths), requested, device_of(load), dtypes_of(load), std::string(load.verify)));
}

rust::Vec<Named> load_boxes(const Load& load, rust::Slice<const Region> regions) {
  std::vector<fst::Region> requested;
  for (const Region& region : regions) {
    std::vector<fst::IndexRange> ranges;
    for (const IndexRange& range : region.ranges) {
      ranges.push_back({range.start, range.length, range.step});
    }
    requested.push_back({std::string(region.name), std::move(ranges)});
  }
  return unnamed(
      fst::load_boxes(to_strings(load.paths), requested, device_of(load), dtypes_of(load), std::string(load.verify)));
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

void prepare(rust::Str device) { fst::prepare(c10::Device(std::string(device))); }

int64_t release_memory() { return fst::release_memory(); }

std::unique_ptr<Loader> open_loader(const Load& load) {
  return std::make_unique<Loader>(to_strings(load.paths), device_of(load),
                                  LoaderOptions{.dtype = dtypes_of(load), .verify = std::string(load.verify)});
}

rust::Vec<Named> next(Loader& loader) {
  rust::Vec<Named> all;
  if (auto item = loader.next()) {
    add(all, item->name, std::move(item->tensor));
  }
  return all;
}

std::unique_ptr<Update> prepare_update(RustStrings paths, rust::Slice<const Named> outputs, RustStrings version,
                                       rust::Str verify) {
  const auto [names, tensors] = unzip(outputs);
  return std::make_unique<Update>(
      fst::prepare_update(to_strings(paths), names, tensors, to_version(version), std::string(verify)));
}

rust::Vec<rust::String> version(const Update& update) { return from_version(update.version()); }

rust::Vec<rust::String> version_of(rust::Slice<const Named> named) {
  const auto [names, tensors] = unzip(named);
  return from_version(fst::version_of(tensors, names));
}

void set_version(rust::Slice<const Named> named, RustStrings version) {
  fst::set_version(unzip(named).second, to_version(version));
}

std::string text_of(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  const bool is_out_of_memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
  return is_out_of_memory ? std::string(out_of_memory(rust::String::lossy(text))) : text;
}

}  // namespace fst::tch
