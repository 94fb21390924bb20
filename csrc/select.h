// From what a caller names to a selection of the core.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <string>

#include "fst/rust/bridge.rs.h"

namespace fst {

using Strings = const c10::List<std::string>&;

rust::Box<Checkpoint> open_checkpoint(Strings paths);

// With headers that another process has read: contiguous bytes.
rust::Box<Checkpoint> join_checkpoint(Strings paths, const at::Tensor& headers);

// All tensors of a checkpoint, the ones that are named, or a slice or box of each that is named.
rust::Box<Selection> select_all(const Checkpoint& checkpoint);
rust::Box<Selection> select_named(const Checkpoint& checkpoint, Strings names);
rust::Box<Selection> select_sliced(const Checkpoint& checkpoint, Strings names, c10::IntArrayRef dims,
                                   c10::IntArrayRef starts, c10::IntArrayRef lengths);
rust::Box<Selection> select_boxed(const Checkpoint& checkpoint, Strings names, c10::IntArrayRef starts,
                                  c10::IntArrayRef lengths, c10::IntArrayRef steps);

rust::Vec<Spec> specs_of(const Selection& selection);

}  // namespace fst
