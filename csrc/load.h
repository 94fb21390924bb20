// Loads a selection: plan, allocate, transfer. All loading operators use these functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "select.h"

namespace fst {

// Options of loads into new tensors.
struct LoadOptions {
  c10::Device device;
  // Dtypes to cast floating-point tensors of 16 bits or more to.
  DtypeRules dtypes;
  // Whether results on the CPU may be views of mapped files.
  bool is_mapped = true;
};

// Argument of `Selection::record` for a load of all its bytes.
constexpr int64_t kAllBytes = -1;

// Loads the selection into new tensors of the dtypes in `specs`, in its order.
std::vector<at::Tensor> load(const Selection& selection, const rust::Vec<Spec>& specs, const LoadOptions& options);

// Copies all tensors of a file in memory. Returns their names and the tensors, in the order of their bytes.
std::tuple<std::vector<std::string>, std::vector<at::Tensor>> load_bytes(const at::Tensor& file);

// Whether outputs of another dtype than the stored one are errors, or are written as `Tensor.copy_` does.
enum class OutputDtype : uint8_t { kStored, kAny };

// Throws unless a load can write a region to an existing tensor.
void check_output(const Spec& spec, const at::Tensor& out, OutputDtype dtype);

// Throws unless a load can write to existing tensors, one for each tensor of a selection.
void check_outputs(const rust::Vec<Spec>& specs, at::TensorList out, OutputDtype dtype);

// Loads the selection into existing tensors, in its order. Checks all outputs before it writes any, and, unless they
// are new, compares the digests of all data before.
void load_into(const Selection& selection, const rust::Vec<Spec>& specs, at::TensorList out, OutputDtype dtype,
               Target target = Target::Existing);

// Makes ready what large loads to a device need, and what the process keeps between loads: pinned memory, streams and
// kernels. Only GPUs need any.
void warm_up(c10::Device device);

}  // namespace fst
