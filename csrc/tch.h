// The operators for rust/tch.rs.
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
struct Slice;
struct MetadataEntry;

// Devices are as PyTorch writes them. `dtype` is the value of a c10::ScalarType, or negative for none.
rust::Vec<Named> load_files(rust::Slice<const rust::String> paths, rust::Str device, int8_t dtype);
rust::Vec<Named> load_tensors(rust::Slice<const rust::String> paths, rust::Slice<const rust::String> names,
                              rust::Str device, int8_t dtype);
rust::Vec<Named> load_slices(rust::Slice<const rust::String> paths, rust::Slice<const Slice> slices, rust::Str device,
                             int8_t dtype);
void load_into(rust::Slice<const rust::String> paths, rust::Slice<const Named> outputs);
void save_file(rust::Slice<const Named> tensors, rust::Str path, rust::Slice<const MetadataEntry> metadata);

std::unique_ptr<Loader> open_loader(rust::Slice<const rust::String> paths, rust::Str device, int8_t dtype);
// One tensor, or none after the last.
rust::Vec<Named> next(Loader& loader);

// Without a backtrace, and with a code where PyTorch's own exception tells by its class what went wrong.
std::string text_of(const c10::Error& error);

}  // namespace fst::tch

namespace rust::behavior {

// Only the text of an exception reaches Rust.
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
