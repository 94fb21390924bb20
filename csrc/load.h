// Loads a selection: plan, allocate, transfer. All loading operators use these functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "fst/rust/bridge.rs.h"
#include "select.h"

namespace fst {

// Validates a device for loads and returns it with its index. "cuda" becomes the current CUDA device.
c10::Device resolve_device(c10::Device device);

c10::Stream current_stream(c10::Device device);

// Returns the driver's handle of the current stream of a CUDA device, and zero for other devices.
uint64_t current_stream_handle(c10::Device device);

inline c10::ScalarType stored_type(const Spec& spec) { return static_cast<c10::ScalarType>(spec.scalar_type); }

inline c10::IntArrayRef shape_of(const Spec& spec) { return {spec.shape.data(), spec.shape.size()}; }

// Returns whether the region has bytes in its file. Otherwise it has no elements, or all of them are zero: the tensor
// is stored without data.
inline bool has_data(const Spec& spec) { return spec.bytes > 0; }

// Returns why the elements of a tensor cannot be overwritten, after its name, or an empty text if they can.
std::string describe_unwritable(const at::Tensor& tensor);

// Sets all elements to zero: those of a region without data.
void fill_with_zeros(const at::Tensor& tensor);

// Increases the versions of tensors, by which autograd detects that one it saved has changed. Some may be undefined.
void mark_changed(at::TensorList tensors);

// Returns scratch memory of the size that `prepare` returns for a plan of which it takes at most a number of bytes. A
// device with too little memory gets a plan that needs little, and at last none, with which the core copies piece by
// piece.
at::Tensor allocate_scratch(c10::Device device, const std::function<uint64_t(uint64_t)>& prepare);

// Returns a new tensor for a region, which is complete if the region has no data.
at::Tensor allocate(const Spec& spec, c10::Device device, c10::ScalarType type, const Selection* selection = nullptr,
                    size_t index = 0);

// Options of loads into new tensors.
struct LoadOptions {
  c10::Device device;
  // Dtypes to cast floating-point tensors of 16 bits or more to.
  DtypeRules dtypes;
  // Whether results on the CPU may be views of mapped files.
  bool is_mapped = true;
};

// Loads the selection into new tensors, in its order.
std::vector<at::Tensor> load(const Selection& selection, const rust::Vec<Spec>& specs, const LoadOptions& options);

// Copies all tensors of a file in memory. Returns their names and the tensors, in the order of their bytes.
std::tuple<std::vector<std::string>, std::vector<at::Tensor>> load_bytes(const at::Tensor& file);

// Whether outputs of another dtype than the stored one are errors, or are written as `Tensor.copy_` does.
enum class OutputDtype : uint8_t { kStored, kAny };

// Throws unless a load can write to existing tensors, one for each tensor of a selection.
void check_outputs(const rust::Vec<Spec>& specs, at::TensorList out, OutputDtype dtype);

// Loads the selection into existing tensors, in its order. Checks all outputs before it writes any.
void load_into(const Selection& selection, const rust::Vec<Spec>& specs, at::TensorList out, OutputDtype dtype);

// Makes ready what large loads to a device need, and what the process keeps between loads: pinned memory, streams and
// kernels. Only GPUs need any.
void prepare(c10::Device device);

// Warns once of a GPU that was used and for which the library has no kernels.
void warn_of_missing_kernels(c10::Device device);

// Throws if digests were requested that do not cover a load of the selection to a device, or keeps the names of
// uncovered tensors for `take_unverified` if the request allows them.
void check_coverage(const Selection& selection, c10::Device device);

// Returns the tensors that the last load of this thread, or the last loader that it opened, does not verify although
// digests were requested. Returns them once.
std::vector<std::string> take_unverified();

}  // namespace fst
