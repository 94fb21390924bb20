// Plan, allocate, execute: what every loading operator does.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <vector>

#include "fst/rust/bridge.rs.h"

namespace fst {

// The device with its index, checked to be one that tensors can be loaded to. "cuda" means the current one.
c10::Device resolve_device(c10::Device device);

c10::Stream current_stream(c10::Device device);

// As the driver has it; zero on the CPU.
uint64_t native_handle(const c10::Stream& stream);

inline c10::ScalarType stored_type(const Spec& spec) { return static_cast<c10::ScalarType>(spec.scalar_type); }

inline c10::IntArrayRef shape_of(const Spec& spec) { return {spec.shape.data(), spec.shape.size()}; }

// The dtype that each tensor is wanted with: only floating-point tensors of 16 bits and more are cast to `dtype`.
std::vector<int8_t> target_types(const rust::Vec<Spec>& specs, std::optional<c10::ScalarType> dtype);

// New tensors, one for each of the selection and in its order. Floating-point tensors of 16 bits and more are cast to
// `dtype` if it is given.
std::vector<at::Tensor> load(const Selection& selection, const rust::Vec<Spec>& specs, c10::Device device,
                             std::optional<c10::ScalarType> dtype);

// Overwrites `out`, one for each tensor of the selection and in its order, after all of them have been checked.
void load_into(const Selection& selection, const rust::Vec<Spec>& specs, at::TensorList out);

}  // namespace fst
