// fst for C++ programs: safetensors files to at::Tensors and back.
//
//     find_package(fst REQUIRED)
//     target_link_libraries(program PRIVATE fst::fst)
//
//     #include <fst/fst.h>
//
//     const auto weights = fst::load_file("model.safetensors", at::Device("cuda:0"));
//     const at::Tensor weight = weights.at("layer.weight");
//
// Each function here calls the operator of the same name in libfst.so through PyTorch's dispatcher, so a program, a
// TorchScript module and an AOTInductor package all run the same code.
//
// Paths. A path is a safetensors file, a directory that holds one checkpoint (`*.safetensors` files, with or without an
// index file), or the index file of a sharded checkpoint. Where several paths may stand, the tensors of all of them
// together are the checkpoint, and a name may stand in one file only.
//
// Devices. "cpu", "cuda" (the current GPU), "cuda:1"; "meta" reads the headers and no data.
//
// Dtypes. `dtype` is a floating-point type to which tensors that are stored as F16, BF16, F32 and F64 are cast. All
// others keep theirs.
//
// Tensors. Each owns its memory and is ready on the current stream. On the CPU, tensors of local files are views of
// private mappings: they take memory when they are used, and a write changes neither the file nor another tensor.
//
// Errors. c10::Error, or a class below it. The text, `error.what_without_backtrace()`, begins with a code in brackets
// and names the path, the tensor and the byte where it can:
//
//     c10::ValueError           [malformed] [duplicate-tensor] [invalid-argument]
//     c10::IndexError           [tensor-not-found]
//     c10::NotImplementedError  [unsupported-dtype]
//     c10::OutOfMemoryError     [out-of-memory], and those of PyTorch's allocator
//     c10::Error                [file-not-found] [permission-denied] [is-a-directory] [io] [interrupted] [device]
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fst {

// The library's own classes are in `fst` itself, and may be in one program with these.
inline namespace api {

// By name, in the order of the files and of the bytes in each.
using Tensors = c10::Dict<std::string, at::Tensor>;
using Texts = c10::Dict<std::string, std::string>;

using Strings = std::vector<std::string>;

namespace detail {

using StringList = c10::List<std::string>;
using Dtype = std::optional<c10::ScalarType>;

inline StringList list_of(const Strings& strings) { return StringList(c10::ArrayRef<std::string>(strings)); }

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace detail

// Every tensor of a checkpoint.
inline Tensors load_file(const std::string& path, c10::Device device = at::kCPU,
                         std::optional<c10::ScalarType> dtype = std::nullopt) {
  using Signature = Tensors(const std::string&, c10::Device, detail::Dtype);
  static const auto operation = detail::find<Signature>("fst::load_file");
  return operation.call(path, device, dtype);
}

// Every tensor of several files.
inline Tensors load_files(const Strings& paths, c10::Device device = at::kCPU,
                          std::optional<c10::ScalarType> dtype = std::nullopt) {
  using Signature = Tensors(const detail::StringList&, c10::Device, detail::Dtype);
  static const auto operation = detail::find<Signature>("fst::load_files");
  return operation.call(detail::list_of(paths), device, dtype);
}

// The tensors that are named, in the order of the names; nothing else is read but the headers. The same name twice
// gives two separate tensors. Throws c10::IndexError for a name that no file holds.
//
//     const auto tensors = fst::load_tensors({"model.safetensors"}, {"weight", "bias"});
inline std::vector<at::Tensor> load_tensors(const Strings& paths, const Strings& names, c10::Device device = at::kCPU,
                                            std::optional<c10::ScalarType> dtype = std::nullopt) {
  using Signature =
      std::vector<at::Tensor>(const detail::StringList&, const detail::StringList&, c10::Device, detail::Dtype);
  static const auto operation = detail::find<Signature>("fst::load_tensors");
  return operation.call(detail::list_of(paths), detail::list_of(names), device, dtype);
}

// Indices `start` to `start + length` of dimension `dim` of a tensor, as `tensor.narrow` takes them.
struct Slice {
  std::string name;
  int64_t dim;
  int64_t start;
  int64_t length;
};

// A contiguous tensor for each slice, in their order. Only the bytes that the slices need are read. Throws
// c10::ValueError for a slice that does not fit its tensor.
//
//     const auto rows = fst::load_slices({"model.safetensors"}, {{"weight", 0, 128, 64}});
inline std::vector<at::Tensor> load_slices(const Strings& paths, const std::vector<Slice>& slices,
                                           c10::Device device = at::kCPU,
                                           std::optional<c10::ScalarType> dtype = std::nullopt) {
  using Signature = std::vector<at::Tensor>(const detail::StringList&, const detail::StringList&, c10::IntArrayRef,
                                            c10::IntArrayRef, c10::IntArrayRef, c10::Device, detail::Dtype);
  static const auto operation = detail::find<Signature>("fst::load_slices");
  detail::StringList names;
  std::vector<int64_t> dims, starts, lengths;
  for (const Slice& slice : slices) {
    names.push_back(slice.name);
    dims.push_back(slice.dim);
    starts.push_back(slice.start);
    lengths.push_back(slice.length);
  }
  return operation.call(detail::list_of(paths), names, dims, starts, lengths, device, dtype);
}

// Overwrites tensors that exist, in place, with those that are named: `outputs[i]` has the shape and dtype of
// `names[i]` in the file, any strides, and is on the CPU or a GPU. All of them are checked before anything is written;
// c10::ValueError says that nothing was. Autograd records nothing.
inline void load_into(const Strings& paths, const Strings& names, at::TensorList outputs) {
  using Signature = void(const detail::StringList&, const detail::StringList&, at::TensorList);
  static const auto operation = detail::find<Signature>("fst::load_into");
  operation.call(detail::list_of(paths), detail::list_of(names), outputs);
}

// The names of all tensors. Reads the headers only.
inline Strings tensor_names(const Strings& paths) {
  using Signature = Strings(const detail::StringList&);
  static const auto operation = detail::find<Signature>("fst::tensor_names");
  return operation.call(detail::list_of(paths));
}

// The metadata of a file. Reads the header only.
inline Texts metadata(const std::string& path) {
  using Signature = Texts(const std::string&);
  static const auto operation = detail::find<Signature>("fst::metadata");
  return operation.call(path);
}

// Writes a safetensors file of `tensors`, `names[i]` for `tensors[i]`, from the CPU or a GPU. It is written under
// another name, flushed and renamed, so that at no moment there is half a file, and a file that is mapped may be
// replaced.
//
//     fst::save_file({weight, bias}, {"weight", "bias"}, "model.safetensors");
inline void save_file(at::TensorList tensors, const Strings& names, const std::string& path,
                      const std::optional<Texts>& metadata = std::nullopt) {
  using Signature = void(at::TensorList, const detail::StringList&, const std::string&, const std::optional<Texts>&);
  static const auto operation = detail::find<Signature>("fst::save_file");
  operation.call(tensors, detail::list_of(names), path, metadata);
}

// New tensors with the values of `tensors` as `dtype`, each on its tensor's device: many casts at once.
inline std::vector<at::Tensor> cast(at::TensorList tensors, c10::ScalarType dtype) {
  using Signature = std::vector<at::Tensor>(at::TensorList, c10::ScalarType);
  static const auto operation = detail::find<Signature>("fst::cast");
  return operation.call(tensors, dtype);
}

// Where a tensor begins in raw bytes, in bytes, and what it is.
struct Place {
  int64_t offset;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
};

// New tensors from the raw bytes of `bytes`, a tensor of uint8 that holds them one behind the other, on its device.
//
//     const auto tensors = fst::scatter(bytes, {{0, at::kFloat, {2, 3}}, {24, at::kHalf, {4}}});
inline std::vector<at::Tensor> scatter(const at::Tensor& bytes, const std::vector<Place>& places,
                                       std::optional<c10::ScalarType> dtype = std::nullopt) {
  using Signature = std::vector<at::Tensor>(const at::Tensor&, c10::IntArrayRef, c10::IntArrayRef, c10::IntArrayRef,
                                            c10::IntArrayRef, detail::Dtype);
  static const auto operation = detail::find<Signature>("fst::scatter");
  std::vector<int64_t> offsets, dtypes, sizes, ranks;
  for (const Place& place : places) {
    offsets.push_back(place.offset);
    dtypes.push_back(static_cast<int64_t>(place.dtype));
    sizes.insert(sizes.end(), place.shape.begin(), place.shape.end());
    ranks.push_back(static_cast<int64_t>(place.shape.size()));
  }
  return operation.call(bytes, offsets, dtypes, sizes, ranks, dtype);
}

// In which order a loader hands over its tensors: in that of the files and of the bytes in each, or without waiting for
// one tensor while the bytes of another are there.
enum class Order { kFile, kLanded };

struct LoaderOptions {
  // The tensors to load; all without. The same name twice gives two separate tensors.
  std::optional<Strings> names = std::nullopt;
  std::optional<c10::ScalarType> dtype = std::nullopt;
  // How far the load may be ahead: tensors that take memory and were not handed over yet have at most so many bytes in
  // all. A tensor that is larger is loaded when nothing else is ahead.
  int64_t window_bytes = 512ll << 20;
  Order order = Order::kFile;
};

// Tensors one by one, each as soon as its bytes have landed, with those behind it on their way. The load begins with
// the constructor and ends with `close`, or with the last copy of the loader. Any thread may call it, one at a time.
//
//     fst::Loader loader({"model.safetensors"}, at::Device("cuda:0"), {.dtype = at::kHalf});
//     while (const auto item = loader.next()) {
//       use(item->name, item->tensor);
//     }
class Loader {
 public:
  struct Item {
    // The position of `name` among the names that were asked for; without, its position in the files.
    int64_t index;
    std::string name;
    at::Tensor tensor;
  };

  explicit Loader(const Strings& paths, c10::Device device = at::kCPU, const LoaderOptions& options = {})
      : object_(c10::ivalue::Object::create(type(), 1)) {
    c10::IValue names;
    if (options.names) {
      names = detail::list_of(*options.names);
    }
    call("__init__", detail::list_of(paths), device, names, options.dtype, options.window_bytes,
         options.order == Order::kFile ? "file" : "landed");
  }

  // The next tensor, ready on the current stream. Nothing after the last one and after `close`. After an error, every
  // call throws it again.
  std::optional<Item> next() {
    const c10::IValue item = call("next");
    if (item.isNone()) {
      return std::nullopt;
    }
    const auto& elements = item.toTupleRef().elements();
    return Item{elements[0].toInt(), elements[1].toStringRef(), elements[2].toTensor()};
  }

  // Ends the load and frees what was not handed over.
  void close() { call("close"); }

  // How many tensors there are in all, those that were handed over too.
  int64_t size() const { return call("size").toInt(); }

  // How many bytes all of them take.
  int64_t total_bytes() const { return call("total_bytes").toInt(); }

 private:
  static c10::ClassTypePtr type() { return torch::getCustomClass("__torch__.torch.classes.fst.Loader"); }

  template <typename... Arguments>
  c10::IValue call(const char* method, Arguments&&... arguments) const {
    return object_->type()->getMethod(method)({object_, std::forward<Arguments>(arguments)...});
  }

  c10::intrusive_ptr<c10::ivalue::Object> object_;
};

}  // namespace api
}  // namespace fst
