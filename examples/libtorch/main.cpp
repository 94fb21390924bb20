// Loads checkpoints with fst in a C++ program, without Python.
//
//     PREFIX=$(python -c 'import fst, torch; print(fst.cmake_prefix_path, torch.utils.cmake_prefix_path, sep=";")')
//     cmake -S examples/libtorch -B examples/libtorch/build -DCMAKE_PREFIX_PATH="$PREFIX"
//     cmake --build examples/libtorch/build
//
// Lists the tensors of a checkpoint, loaded to the CPU or another device:
//
//     fst_example list model.safetensors [cuda:0]
//
// Lists each tensor as soon as it is ready, while the next tensors load:
//
//     fst_example stream model.safetensors [cuda:0]
//
// Runs a module that loads its own weights: a TorchScript module or a package compiled by AOTInductor. make_module.py
// creates both.
//
//     fst_example run linear.pt
//     fst_example run linear.pt2
//
// Gives the parameters of a TorchScript module the values of a checkpoint, all or nothing, and runs it before and
// after:
//
//     fst_example update layer.pt linear.safetensors
//
// Prints one line per tensor: name, dtype, shape, sum in double precision, and the first values.

#include <ATen/ops/linspace.h>
#include <fst/fst.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <exception>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int64_t kInFeatures = 8;
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

void print(const fst::Tensors& tensors) {
  for (const auto& entry : tensors) {
    print(entry.key(), entry.value());
  }
}

void list(const std::string& path, c10::Device device) {
  const fst::Tensors tensors = fst::load_file(path, device);
  print(tensors);
}

void stream(const std::string& path, c10::Device device) {
  fst::Loader loader({path}, device);
  while (const auto item = loader.next()) {
    print(item->name, item->tensor);
  }
}

void print_forward(torch::jit::Module module) {
  print("forward", module.forward({at::linspace(0, 1, kInFeatures)}).toTensor());
}

void update(const std::string& path, const std::string& checkpoint) {
  const torch::jit::Module module = torch::jit::load(path);
  fst::Strings names;
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : module.named_parameters()) {
    names.push_back(parameter.name);
    parameters.push_back(parameter.value);
  }
  print_forward(module);
  const fst::Update update = fst::prepare_update({checkpoint}, names, parameters, checkpoint);
  update.commit();
  print_forward(module);
  std::cout << "version " << fst::version_of(parameters).value_or("unknown") << '\n';
}

void run_script(const std::string& path) {
  torch::jit::Module module = torch::jit::load(path);
  print_forward(module);
  print(c10::impl::toTypedDict<std::string, at::Tensor>(module.run_method("tensors").toGenericDict()));
}

void run_package(const std::string& path) {
  torch::inductor::AOTIModelPackageLoader package(path);
  print("forward", package.run({at::linspace(0, 1, kInFeatures)}).at(0));
}

int usage() {
  std::cerr << "usage: fst_example list CHECKPOINT [DEVICE] | stream CHECKPOINT [DEVICE] | run MODULE | update MODULE "
               "CHECKPOINT\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() < 2 || arguments.size() > 3) {
    return usage();
  }
  const std::string& mode = arguments[0];
  const std::string& path = arguments[1];
  const std::string device = arguments.size() == 3 ? arguments[2] : "cpu";
  std::cout << std::setprecision(9);
  try {
    if (mode == "list") {
      list(path, c10::Device(device));
    } else if (mode == "stream") {
      stream(path, c10::Device(device));
    } else if (mode == "run" && path.ends_with(".pt2")) {
      run_package(path);
    } else if (mode == "run") {
      run_script(path);
    } else if (mode == "update" && arguments.size() == 3) {
      update(path, arguments[2]);
    } else {
      return usage();
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
