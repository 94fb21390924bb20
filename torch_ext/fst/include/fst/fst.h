// C++ interface of fst: loads safetensors files into at::Tensor and saves them.
//
//     find_package(fst REQUIRED)
//     target_link_libraries(program PRIVATE fst::fst)
//
//     #include <fst/fst.h>
//
//     const auto weights = fst::load_file("model.safetensors", at::Device("cuda:0"));
//     const at::Tensor weight = weights.at("layer.weight");
//
// Each function calls the operator of the same name through PyTorch's dispatcher. Programs, TorchScript
// modules and AOTInductor packages therefore run the same code.
//
// Paths. A path names a safetensors file, a directory with one checkpoint (its index, `model.safetensors`, shards, or
// files whose names differ in numbers only), or the index file of a sharded checkpoint. Several paths form one
// checkpoint; each tensor name may occur in one file only.
//
// Devices. "cpu", "cuda" (the current GPU), "cuda:1", or "meta", which reads the headers and no data.
//
// Dtypes. `dtype` is a floating-point dtype. Tensors stored as F16, BF16, F32 and F64 are cast to it; all others keep
// their dtype. A list of patterns casts only some of the tensors, for example not the scales of quantized weights: see
// `Dtypes`.
//
// Digests. `verify` compares the data with digests before any tensor is returned: "digests" with the digests that the
// files carry, or the path or JSON text of a manifest with digests of whole files, or the text {"signature": {"path":
// "model.sig", "public_key": "key.pub"}} of a signature, which has a manifest. A difference is an [integrity] error. So
// is a load that the digests do not cover, such as a load of a slice or of some tensors of a file with a manifest. The
// text
// {"verify": {"source": "digests", "partial": "allow"}} permits it, with any of these texts as the source; the log
// (FST_LOG=warn) then names the tensors that were not compared.
//
// Encryption. Loads decrypt files that fst or tensorizer has encrypted, with a key that was registered
// in this process, or the key in the files which FST_ENCRYPTION_KEY_FILE and FST_ENCRYPTION_PASSPHRASE_FILE name. Saves
// encrypt if their metadata name a registered key. See `EncryptionKey`.
//
// Tensors. Each tensor owns its memory and is ready on the current stream. On the CPU, tensors of local files are views
// of private mappings. They take memory when they are used. A write to one changes neither the file nor another tensor.
//
// Errors. All exceptions are c10::Error or a subclass. The text, `error.what_without_backtrace()`, begins with a code
// in brackets and names the path, the tensor and the byte if they are known:
//
//     c10::ValueError           [malformed] [integrity] [duplicate-tensor] [invalid-argument] [mismatch] [version]
//     c10::IndexError           [tensor-not-found]
//     c10::NotImplementedError  [unsupported-dtype]
//     c10::OutOfMemoryError     [out-of-memory], and errors of PyTorch's allocator, which have no code
//     c10::Error                [file-not-found] [permission-denied] [is-a-directory] [io] [source-changed]
//                               [interrupted] [device] [internal]
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// The inline namespace keeps these names apart from the classes that the operators define in `fst`.
namespace fst::inline api {

// Tensors by name, in the order of the files and of the bytes in each file.
using Tensors = c10::Dict<std::string, at::Tensor>;
// Metadata of a file.
using Texts = c10::Dict<std::string, std::string>;

using Strings = std::vector<std::string>;

// Dtypes to cast tensors to: one for all, or one for each name or pattern (`*`, `?`, `[...]`). A name takes precedence
// over patterns, and a pattern over later ones. `std::nullopt` and tensors that match nothing keep the stored dtype. A
// pattern that decides for no tensor is a c10::ValueError, except "*".
//
//     fst::load_file("model.safetensors", at::kCPU, at::kBFloat16);
//     fst::load_file("model.safetensors", at::kCPU, {{"*_scale", std::nullopt}, {"*", at::kBFloat16}});
class Dtypes {
 public:
  struct Rule {
    std::string pattern;
    std::optional<c10::ScalarType> dtype;
  };

  Dtypes(std::optional<c10::ScalarType> dtype = std::nullopt) : all_(dtype) {}
  Dtypes(c10::ScalarType dtype) : all_(dtype) {}
  Dtypes(std::nullopt_t) {}
  Dtypes(std::initializer_list<Rule> rules) : Dtypes(std::vector<Rule>(rules)) {}
  Dtypes(const std::vector<Rule>& rules) {
    for (const Rule& rule : rules) {
      patterns_.push_back(rule.pattern);
      numbers_.push_back(rule.dtype ? static_cast<int64_t>(*rule.dtype) : -1);
    }
  }

  // Arguments `dtype`, `patterns` and `dtypes` of the operators.
  std::optional<c10::ScalarType> all() const { return all_; }
  std::optional<c10::List<std::string>> patterns() const { return patterns_; }
  const std::vector<int64_t>& numbers() const { return numbers_; }

 private:
  std::optional<c10::ScalarType> all_;
  c10::List<std::string> patterns_;
  std::vector<int64_t> numbers_;
};

namespace detail {

using StringList = c10::List<std::string>;
using Dtype = std::optional<c10::ScalarType>;
using Patterns = std::optional<StringList>;

inline StringList list_of(const Strings& strings) { return StringList(c10::ArrayRef<std::string>(strings)); }

// Callers look the operator up in each call. A child that is forked while a static variable is initialized by another
// thread of its parent would wait for that thread.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Calls a method of an object of a script class.
template <typename... Arguments>
c10::IValue call_method(const c10::intrusive_ptr<c10::ivalue::Object>& object, const char* method,
                        Arguments&&... arguments) {
  return object->type()->getMethod(method)({object, std::forward<Arguments>(arguments)...});
}

// Calls an operator that loads, of which `Own` are its own arguments.
template <typename Result, typename... Own>
Result load(const char* name, Own... own, c10::Device device, const Dtypes& dtype, const std::string& verify) {
  using Signature = Result(Own..., c10::Device, Dtype, const std::string&, const Patterns&, c10::IntArrayRef);
  return find<Signature>(name).call(own..., device, dtype.all(), verify, dtype.patterns(), dtype.numbers());
}

// Calls an operator that loads parts of tensors, which three lists of numbers describe.
inline std::vector<at::Tensor> load_parts(const char* name, const Strings& paths, const StringList& names,
                                          const std::array<std::vector<int64_t>, 3>& numbers, c10::Device device,
                                          const Dtypes& dtype, const std::string& verify) {
  return load<std::vector<at::Tensor>, const StringList&, const StringList&, c10::IntArrayRef, c10::IntArrayRef,
              c10::IntArrayRef>(name, list_of(paths), names, numbers[0], numbers[1], numbers[2], device, dtype, verify);
}

}  // namespace detail

// Loads all tensors of a checkpoint.
inline Tensors load_file(const std::string& path, c10::Device device = at::kCPU, const Dtypes& dtype = {},
                         const std::string& verify = {}) {
  return detail::load<Tensors, const std::string&>("fst::load_file", path, device, dtype, verify);
}

// Loads all tensors of several files.
inline Tensors load_files(const Strings& paths, c10::Device device = at::kCPU, const Dtypes& dtype = {},
                          const std::string& verify = {}) {
  return detail::load<Tensors, const detail::StringList&>("fst::load_files", detail::list_of(paths), device, dtype,
                                                          verify);
}

// Loads the named tensors, in the order of `names`. Reads no other data. A name given twice yields two separate
// tensors. Throws c10::IndexError for a name that is in no file.
//
//     const auto tensors = fst::load_tensors({"model.safetensors"}, {"weight", "bias"});
inline std::vector<at::Tensor> load_tensors(const Strings& paths, const Strings& names, c10::Device device = at::kCPU,
                                            const Dtypes& dtype = {}, const std::string& verify = {}) {
  return detail::load<std::vector<at::Tensor>, const detail::StringList&, const detail::StringList&>(
      "fst::load_tensors", detail::list_of(paths), detail::list_of(names), device, dtype, verify);
}

// Slice of a tensor: `length` indices of dimension `dim` from `start` on, as in `tensor.narrow(dim, start, length)`.
struct Slice {
  std::string name;
  int64_t dim;
  int64_t start;
  int64_t length;
};

// Loads slices into contiguous tensors, in the order of `slices`. Reads only the bytes of the slices. Throws
// c10::ValueError for a slice that exceeds its tensor.
//
//     const auto rows = fst::load_slices({"model.safetensors"}, {{"weight", 0, 128, 64}});
inline std::vector<at::Tensor> load_slices(const Strings& paths, const std::vector<Slice>& slices,
                                           c10::Device device = at::kCPU, const Dtypes& dtype = {},
                                           const std::string& verify = {}) {
  detail::StringList names;
  std::vector<int64_t> dims, starts, lengths;
  for (const Slice& slice : slices) {
    names.push_back(slice.name);
    dims.push_back(slice.dim);
    starts.push_back(slice.start);
    lengths.push_back(slice.length);
  }
  return detail::load_parts("fst::load_slices", paths, names, {dims, starts, lengths}, device, dtype, verify);
}

// Range of indices of one dimension: `start`, `start + step`, and so on, `length` of them.
struct IndexRange {
  int64_t start;
  int64_t length;
  int64_t step = 1;
};

// Index region of a tensor: one range for each dimension.
struct Region {
  std::string name;
  std::vector<IndexRange> ranges;
};

// Loads index regions into contiguous tensors, in the order of `regions`. Each shape consists of the lengths. Reads
// only the bytes of the regions. Throws c10::ValueError for a region that does not fit its tensor.
//
//     const auto corners = fst::load_boxes({"model.safetensors"}, {{"weight", {{0, 2, 3}, {0, 2, 2}}}});
inline std::vector<at::Tensor> load_boxes(const Strings& paths, const std::vector<Region>& regions,
                                          c10::Device device = at::kCPU, const Dtypes& dtype = {},
                                          const std::string& verify = {}) {
  detail::StringList names;
  std::vector<int64_t> starts, lengths, steps;
  for (const Region& region : regions) {
    names.push_back(region.name);
    for (const IndexRange& range : region.ranges) {
      starts.push_back(range.start);
      lengths.push_back(range.length);
      steps.push_back(range.step);
    }
  }
  return detail::load_parts("fst::load_boxes", paths, names, {starts, lengths, steps}, device, dtype, verify);
}

// Overwrites existing tensors in place. `outputs[i]` must have the shape and dtype that `names[i]` has in the file. Its
// strides are arbitrary, and it is on the CPU or a GPU. Checks all outputs before it writes any: after a
// c10::ValueError, no output has changed. Autograd does not record the writes. With `verify`, the data are read and
// verified before anything is written, and then read again.
inline void load_into(const Strings& paths, const Strings& names, at::TensorList outputs,
                      const std::string& verify = {}) {
  using Signature = void(const detail::StringList&, const detail::StringList&, at::TensorList, const std::string&);
  const auto operation = detail::find<Signature>("fst::load_into");
  operation.call(detail::list_of(paths), detail::list_of(names), outputs, verify);
}

// Loads outputs of the rules of a recipe into contiguous tensors, in the order of `names`. A rule names an output and
// an expression over stored tensors. Reads only headers and the data of these outputs. Throws c10::ValueError for a
// rule that is not valid or does not fit the tensors, and c10::IndexError for a name that does not exist.
//
//     const auto fused = fst::load_recipe({"model.safetensors"}, {"qkv"}, {"qkv = cat(0, q, k, v)"});
inline std::vector<at::Tensor> load_recipe(const Strings& paths, const Strings& names, const Strings& rules,
                                           c10::Device device = at::kCPU, const Dtypes& dtype = {},
                                           const std::string& verify = {}) {
  using List = const detail::StringList&;
  return detail::load<std::vector<at::Tensor>, List, List, List>("fst::load_recipe", detail::list_of(paths),
                                                                 detail::list_of(names), detail::list_of(rules), device,
                                                                 dtype, verify);
}

// Overwrites existing tensors with outputs of the rules of a recipe, as `load_into` does with stored tensors.
inline void load_recipe_into(const Strings& paths, const Strings& names, const Strings& rules, at::TensorList outputs,
                             const std::string& verify = {}) {
  using List = const detail::StringList&;
  const auto operation =
      detail::find<void(List, List, List, at::TensorList, const std::string&)>("fst::load_recipe_into");
  operation.call(detail::list_of(paths), detail::list_of(names), detail::list_of(rules), outputs, verify);
}

// Update of existing tensors that `prepare_update` has prepared, and that waits for its commit. Calls from several
// threads run one after another. An update whose last copy is destroyed is rolled back.
class Update {
 public:
  explicit Update(c10::intrusive_ptr<c10::ivalue::Object> object) : object_(std::move(object)) {}

  // Writes all values on the current streams of their devices, and sets the version. Reads no files. Throws a
  // c10::ValueError, with the code [version], if another load or update has written to one of the tensors since
  // `prepare_update` began, or its memory was replaced. Nothing was written then.
  void commit() const { detail::call_method(object_, "commit"); }

  // Frees the staged values. No tensor changes. Does nothing after a commit.
  void rollback() const { detail::call_method(object_, "rollback"); }

  // Returns the version that the tensors get.
  std::optional<std::string> version() const {
    return detail::call_method(object_, "version").toOptional<std::string>();
  }

  // Returns the size of the staged values in bytes.
  int64_t staged_bytes() const { return detail::call_method(object_, "staged_bytes").toInt(); }

 private:
  c10::intrusive_ptr<c10::ivalue::Object> object_;
};

// Reads new values of existing tensors, or deltas of them, and verifies them, while the old values stay in use.
// `outputs[i]` must have the shape and dtype that `names[i]` has in the file. The values need as much memory again, on
// the devices of the outputs. After an error, no output has changed.
//
//     const auto update = fst::prepare_update({"model.safetensors"}, {"weight", "bias"}, {weight, bias}, "step-2");
//     update.commit();
inline Update prepare_update(const Strings& paths, const Strings& names, at::TensorList outputs,
                             const std::optional<std::string>& version = std::nullopt, const std::string& verify = {}) {
  const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("fst::prepare_update", "");
  torch::jit::Stack stack{detail::list_of(paths), detail::list_of(names), c10::List<at::Tensor>(outputs), version,
                          verify};
  operation.callBoxed(stack);
  return Update(stack.back().toObject());
}

// Returns the version of the contents of tensors, or `std::nullopt` if they have none. Throws a c10::ValueError, with
// the code [version], if the tensors have different versions or hold a mixture of two.
inline std::optional<std::string> version_of(at::TensorList tensors,
                                             const std::optional<Strings>& names = std::nullopt) {
  using Signature = std::optional<std::string>(at::TensorList, const std::optional<Strings>&);
  const auto operation = detail::find<Signature>("fst::version_of");
  return operation.call(tensors, names);
}

// Sets the version of the contents of tensors, which the caller knows.
inline void set_version(at::TensorList tensors, const std::optional<std::string>& version) {
  using Signature = void(at::TensorList, const std::optional<std::string>&);
  const auto operation = detail::find<Signature>("fst::set_version");
  operation.call(tensors, version);
}

// Reads all data of a checkpoint and compares their digests and authentication codes, without returning tensors.
inline void verify(const Strings& paths, const std::string& verify = "digests") {
  using Signature = void(const detail::StringList&, const std::string&);
  const auto operation = detail::find<Signature>("fst::verify");
  operation.call(detail::list_of(paths), verify);
}

// Creates what the first load to a GPU would create, and the process keeps for later loads: pinned host memory, streams
// and device kernels. Does nothing for other devices.
inline void warm_up(c10::Device device = at::kCUDA) {
  const auto operation = detail::find<void(c10::Device)>("fst::warm_up");
  operation.call(device);
}

// Frees what the process keeps between loads, and returns the bytes of host memory that were freed.
inline int64_t release_memory() {
  const auto operation = detail::find<int64_t()>("fst::release_memory");
  return operation.call();
}

// Returns the names of all tensors. Reads the headers only.
inline Strings tensor_names(const Strings& paths) {
  using Signature = Strings(const detail::StringList&);
  const auto operation = detail::find<Signature>("fst::tensor_names");
  return operation.call(detail::list_of(paths));
}

// Returns the metadata of a file. Reads the header only.
inline Texts metadata(const std::string& path) {
  using Signature = Texts(const std::string&);
  const auto operation = detail::find<Signature>("fst::metadata");
  return operation.call(path);
}

// Saves `tensors[i]` under `names[i]` in a safetensors file. The tensors are on the CPU or a GPU. The function writes a
// temporary file, flushes it and renames it to `path`. Other programs never see an incomplete file, and a file whose
// tensors are mapped may be replaced.
//
// Metadata of {"fst.digests": "blake3"} (or "sha256") requests digests of all tensors in the file. Metadata of
// {"fst.encryption": "my models"} encrypts the tensors with the registered key of this label, see `EncryptionKey`.
//
//     fst::save_file({weight, bias}, {"weight", "bias"}, "model.safetensors");
inline void save_file(at::TensorList tensors, const Strings& names, const std::string& path,
                      const std::optional<Texts>& metadata = std::nullopt) {
  using Signature = void(at::TensorList, const detail::StringList&, const std::string&, const std::optional<Texts>&);
  const auto operation = detail::find<Signature>("fst::save_file");
  operation.call(tensors, detail::list_of(names), path, metadata);
}

// Returns the bytes of the safetensors file that `save_file` would write, as a 1-d uint8 tensor on the CPU.
//
//     const at::Tensor bytes = fst::serialize({weight, bias}, {"weight", "bias"});
inline at::Tensor serialize(at::TensorList tensors, const Strings& names,
                            const std::optional<Texts>& metadata = std::nullopt) {
  using Signature = at::Tensor(at::TensorList, const detail::StringList&, const std::optional<Texts>&);
  const auto operation = detail::find<Signature>("fst::serialize");
  return operation.call(tensors, detail::list_of(names), metadata);
}

// Casts many tensors in one call. Each result is a new tensor on the device of its source.
inline std::vector<at::Tensor> cast(at::TensorList tensors, c10::ScalarType dtype) {
  using Signature = std::vector<at::Tensor>(at::TensorList, c10::ScalarType);
  const auto operation = detail::find<Signature>("fst::cast");
  return operation.call(tensors, dtype);
}

// Position, dtype and shape of a tensor in raw bytes.
struct Place {
  // In bytes.
  int64_t offset;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
};

// Creates tensors from `bytes`, a 1-d uint8 tensor that contains their raw bytes. The new tensors are on its device.
// Tensors of F16, BF16, F32 and F64 are cast to `dtype`, if it is given.
//
//     const auto tensors = fst::scatter(bytes, {{0, at::kFloat, {2, 3}}, {24, at::kHalf, {4}}});
inline std::vector<at::Tensor> scatter(const at::Tensor& bytes, const std::vector<Place>& places,
                                       std::optional<c10::ScalarType> dtype = std::nullopt) {
  using Signature = std::vector<at::Tensor>(const at::Tensor&, c10::IntArrayRef, c10::IntArrayRef, c10::IntArrayRef,
                                            c10::IntArrayRef, detail::Dtype);
  const auto operation = detail::find<Signature>("fst::scatter");
  std::vector<int64_t> offsets, dtypes, sizes, ranks;
  for (const Place& place : places) {
    offsets.push_back(place.offset);
    dtypes.push_back(static_cast<int64_t>(place.dtype));
    sizes.insert(sizes.end(), place.shape.begin(), place.shape.end());
    ranks.push_back(static_cast<int64_t>(place.shape.size()));
  }
  return operation.call(bytes, offsets, dtypes, sizes, ranks, dtype);
}

// Secret key of encrypted files. The memory of the key is overwritten with the last copy of the object.
//
//     fst::EncryptionKey::from_file("model.key", "my models").register_key();
//     fst::Texts metadata;
//     metadata.insert("fst.encryption", "my models");
//     fst::save_file({weight}, {"weight"}, "secret.safetensors", metadata);
//     const auto weights = fst::load_file("secret.safetensors");
class EncryptionKey {
 public:
  // Copies 32 bytes. New files show the label, of up to 64 bytes, to everybody.
  explicit EncryptionKey(c10::ArrayRef<uint8_t> key, const std::string& label = {})
      : object_(c10::ivalue::Object::create(type(), 1)) {
    detail::call_method(object_, "__init__", copied(key), label, std::vector<int64_t>(), c10::IValue());
  }

  // Reads a local file: 32 bytes, or as many hexadecimal numbers.
  static EncryptionKey from_file(const std::string& path, const std::string& label = {}) {
    return EncryptionKey((*type()->findStaticMethod("of_file"))({path, label}).toObject());
  }

  // Makes all loads of this process use the key for encrypted files, and saves whose metadata name its label. Several
  // keys may be registered.
  void register_key() const { detail::call_method(object_, "set_registered", true); }

  // Unregisters the key.
  void unregister_key() const { detail::call_method(object_, "set_registered", false); }

 private:
  explicit EncryptionKey(c10::intrusive_ptr<c10::ivalue::Object> object) : object_(std::move(object)) {}

  static c10::ClassTypePtr type() { return torch::getCustomClass("__torch__.torch.classes.fst.EncryptionKey"); }

  static at::Tensor copied(c10::ArrayRef<uint8_t> key) {
    at::Tensor bytes = at::empty({static_cast<int64_t>(key.size())}, at::kByte);
    std::ranges::copy(key, bytes.mutable_data_ptr<uint8_t>());
    return bytes;
  }

  c10::intrusive_ptr<c10::ivalue::Object> object_;
};

// Order in which a loader returns tensors. `kFile` is the order of the files and of the bytes in each file. `kReady`
// is the order in which tensors become ready.
enum class Order : uint8_t { kFile, kReady };

struct LoaderOptions {
  // Tensors to load; all tensors by default. A name given twice yields two separate tensors.
  std::optional<Strings> names = std::nullopt;
  Dtypes dtype = {};
  // Limit for the size of all tensors that are allocated but not yet returned, in bytes. A larger tensor is loaded
  // alone.
  int64_t window_bytes = 512ll << 20;
  Order order = Order::kFile;
  // Digests to compare, as for `load_file`, but not digests of whole files.
  std::string verify = {};
};

// Loads tensors in the background and returns each as soon as it is ready. The constructor starts the load. `close`, or
// the destructor of the last copy of the loader, ends it. Calls from several threads run one after another.
//
//     fst::Loader loader({"model.safetensors"}, at::Device("cuda:0"), {.dtype = at::kHalf});
//     while (const auto item = loader.next()) {
//       use(item->name, item->tensor);
//     }
class Loader {
 public:
  struct Item {
    // Position of `name` in `LoaderOptions::names`, or in the files if no names are given.
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
    detail::call_method(object_, "__init__", detail::list_of(paths), device, names, options.dtype.all(),
                        options.window_bytes, options.order == Order::kFile ? "file" : "ready", options.verify,
                        options.dtype.patterns(), options.dtype.numbers());
  }

  // Returns the next tensor, ready on the current stream, or `std::nullopt` after the last tensor or `close`. After an
  // error, each call throws the same error again.
  std::optional<Item> next() {
    const c10::IValue item = detail::call_method(object_, "next");
    if (item.isNone()) {
      return std::nullopt;
    }
    const auto& elements = item.toTupleRef().elements();
    return Item{elements[0].toInt(), elements[1].toStringRef(), elements[2].toTensor()};
  }

  // Ends the load and frees the tensors that were not returned.
  void close() { detail::call_method(object_, "close"); }

  // Returns the number of all tensors of the load, including those already returned.
  int64_t size() const { return detail::call_method(object_, "size").toInt(); }

  // Returns the size of these tensors in memory, in bytes.
  int64_t total_bytes() const { return detail::call_method(object_, "total_bytes").toInt(); }

 private:
  static c10::ClassTypePtr type() { return torch::getCustomClass("__torch__.torch.classes.fst.Loader"); }

  c10::intrusive_ptr<c10::ivalue::Object> object_;
};

}  // namespace fst::inline api
