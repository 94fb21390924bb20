// Operators for the crate in rust/tch.
#pragma once

#include <c10/util/Exception.h>
#include <fst/fst.h>
#include <rust/cxx.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

namespace fst::tch {

struct Named;
struct DtypeRule;
struct IndexRange;
struct Load;
struct Region;
struct Slice;
struct MetadataEntry;

rust::Vec<Named> load_files(const Load& load);
rust::Vec<Named> load_tensors(const Load& load, rust::Slice<const rust::String> names);
rust::Vec<Named> load_slices(const Load& load, rust::Slice<const Slice> slices);
rust::Vec<Named> load_boxes(const Load& load, rust::Slice<const Region> regions);
void load_into(rust::Slice<const rust::String> paths, rust::Slice<const Named> outputs, rust::Str verify);
void verify(rust::Slice<const rust::String> paths, rust::Str verify);
void save_file(rust::Slice<const Named> tensors, rust::Str path, rust::Slice<const MetadataEntry> metadata);
void prepare(rust::Str device);
int64_t release_memory();
rust::Vec<uint8_t> serialize(rust::Slice<const Named> tensors, rust::Slice<const MetadataEntry> metadata);

std::unique_ptr<Loader> open_loader(const Load& load);
// Returns one tensor, or an empty vector after the last one.
rust::Vec<Named> next(Loader& loader);

// A version is a slice or vector of one text, or empty.
std::unique_ptr<Update> prepare_update(rust::Slice<const rust::String> paths, rust::Slice<const Named> outputs,
                                       rust::Slice<const rust::String> version, rust::Str verify);
rust::Vec<rust::String> version(const Update& update);
rust::Vec<rust::String> version_of(rust::Slice<const Named> tensors);
void set_version(rust::Slice<const Named> tensors, rust::Slice<const rust::String> version);

// Returns the error text without a backtrace. Adds the code to out-of-memory errors of PyTorch's allocator.
std::string text_of(const c10::Error& error);

}  // namespace fst::tch

namespace rust::behavior {

// Passes the text of exceptions to Rust.
template <typename Try, typename Fail>
static void trycatch(Try&& call, Fail&& fail) noexcept {
  try {
    call();
  } catch (const c10::Error& error) {
    fail(fst::tch::text_of(error));
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

}  // namespace rust::behavior
