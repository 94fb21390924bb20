// Loads checkpoints with fst in a C++ program, without Python.
//
// Build it against the PyTorch that libfst.so was built for:
//
//     cmake -S examples/libtorch -B examples/libtorch/build \
//         -DCMAKE_PREFIX_PATH="$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')"
//     cmake --build examples/libtorch/build
//
// Run a TorchScript module that loads its own weights (make_module.py saves one):
//
//     fst_example torch_ext/fst/libfst.so run linear.pt
//
// List the tensors of a checkpoint, on the CPU or on another device:
//
//     fst_example torch_ext/fst/libfst.so list model.safetensors [cuda:0]
//
// The same, but each tensor as soon as it is there, with the next ones on their way:
//
//     fst_example torch_ext/fst/libfst.so stream model.safetensors [cuda:0]
//
// Every tensor is one line: name, dtype, shape, sum in double precision, and the first values.

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/custom_class.h>
#include <torch/script.h>

#include <algorithm>
#include <exception>
#include <iomanip>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int64_t kValuesShown = 4;

void print(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().cpu().to(at::kDouble).flatten();
  std::cout << name << ' ' << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes() << " sum "
            << values.sum().item<double>() << " first";
  for (int64_t i = 0; i < std::min(kValuesShown, values.numel()); ++i) {
    std::cout << ' ' << values[i].item<double>();
  }
  std::cout << '\n';
}

void print(const c10::impl::GenericDict& tensors) {
  for (const auto& entry : c10::impl::toTypedDict<std::string, at::Tensor>(tensors)) {
    print(entry.key(), entry.value());
  }
}

// Loading the library registers its operators with the dispatcher, for TorchScript and for direct calls alike.
void register_operators(const std::string& library) {
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    throw std::runtime_error(dlerror());
  }
}

void run(const std::string& path) {
  torch::jit::Module module = torch::jit::load(path);
  const int64_t in_features = module.attr("in_features").toInt();
  print("forward", module.forward({at::linspace(0, 1, in_features)}).toTensor());
  print(module.run_method("tensors").toGenericDict());
}

void list(const std::string& path, const std::string& device) {
  const c10::OperatorHandle load_file = c10::Dispatcher::singleton().findSchemaOrThrow("fst::load_file", "");
  torch::jit::Stack stack{path, c10::Device(device), c10::IValue()};
  load_file.callBoxed(&stack);
  print(stack.at(0).toGenericDict());
}

void stream(const std::string& path, const std::string& device) {
  const c10::ClassTypePtr type = torch::getCustomClass("__torch__.torch.classes.fst.Loader");
  const c10::IValue loader(c10::ivalue::Object::create(type, 1));
  // What is left out has its default.
  type->getMethod("__init__")({loader, c10::List<std::string>({path}), c10::Device(device)});
  torch::jit::Function& next = type->getMethod("next");
  for (c10::IValue item = next({loader}); !item.isNone(); item = next({loader})) {
    const auto& elements = item.toTupleRef().elements();
    print(elements[1].toStringRef(), elements[2].toTensor());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string mode = arguments.size() < 3 ? "" : arguments[1];
  try {
    std::cout << std::setprecision(9);
    if (mode == "run" && arguments.size() == 3) {
      register_operators(arguments[0]);
      run(arguments[2]);
    } else if (mode == "list" && arguments.size() <= 4) {
      register_operators(arguments[0]);
      list(arguments[2], arguments.size() == 4 ? arguments[3] : "cpu");
    } else if (mode == "stream" && arguments.size() <= 4) {
      register_operators(arguments[0]);
      stream(arguments[2], arguments.size() == 4 ? arguments[3] : "cpu");
    } else {
      std::cerr << "usage: fst_example LIBFST.SO run MODULE | list CHECKPOINT [DEVICE] | stream CHECKPOINT [DEVICE]\n";
      return 2;
    }
  } catch (const c10::Error& error) {
    std::cerr << "fst_example: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "fst_example: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
