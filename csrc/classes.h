// Script classes, whose methods convert between PyTorch's types and the core's types.
#pragma once

#include <torch/library.h>

namespace fst {

// Registers all script classes. Operators with such classes in their schemas are defined afterwards.
void define_classes(torch::Library& library);

}  // namespace fst
