// Registers the operators, and converts between PyTorch's types and the core's types.

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>
#include <torch/version.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cast.h"
#include "checkpoint.h"
#include "classes.h"
#include "delta.h"
#include "dequantize.h"
#include "encryption_key.h"
#include "error.h"
#include "load.h"
#include "recipe.h"
#include "save.h"
#include "select.h"
#include "tensors.h"
#include "update.h"
#include "version.h"

namespace fst {

namespace {

using Dtype = std::optional<c10::ScalarType>;

c10::List<std::string> list_of(const std::string& path) { return {{path}}; }
c10::List<std::string> list_of(Strings paths) { return paths; }

// Calls a function of the core without tensors. Requests and answers are in JSON: rust/bridge/calls.rs.
std::string call_function(const std::string& method, const std::string& request) {
  return std::string(call_core([&] { return call(to_rust(method), to_rust(request)); }));
}

// Returns a text in JSON. The core refuses a text that is not UTF-8.
std::string to_json(const std::string& text) {
  constexpr auto kDigits = "0123456789abcdef";
  std::string json = "\"";
  for (const char byte : text) {
    if (byte == '"' || byte == '\\') {
      json += '\\';
    }
    if (static_cast<unsigned char>(byte) < ' ') {
      json += c10::str("\\u00", kDigits[byte >> 4], kDigits[byte & 15]);
    } else {
      json += byte;
    }
  }
  return json + '"';
}

std::string to_json(Strings texts) {
  std::vector<std::string> items;
  for (const std::string& text : texts.vec()) {
    items.push_back(to_json(text));
  }
  return "[" + c10::Join(",", items) + "]";
}

// Load into new tensors, with the arguments that select these and the common ones of all loads.
template <auto select>
struct Load;

template <typename... Own, Selected (*select)(Own...)>
struct Load<select> {
  static std::vector<at::Tensor> of_paths(Strings paths, Own... own, c10::Device device, Dtype dtype,
                                          const std::string& verify, const Patterns& patterns,
                                          c10::IntArrayRef dtypes) {
    const OpenCheckpoint checkpoint(paths, {.verify = verify});
    auto tensors = checkpoint.load(select(own...), {device, dtype_rules(dtype, patterns, dtypes.vec())});
    checkpoint.warn_of_unverified();
    return tensors;
  }
};

template <typename Paths>
c10::Dict<std::string, at::Tensor> load_all(Paths paths, c10::Device device, Dtype dtype, const std::string& verify,
                                            const Patterns& patterns, c10::IntArrayRef dtypes) {
  const OpenCheckpoint checkpoint(list_of(paths), {.verify = verify});
  auto tensors = checkpoint.load_all({device, dtype_rules(dtype, patterns, dtypes.vec())});
  checkpoint.warn_of_unverified();
  return tensors;
}

void load_into_outputs(Strings paths, Strings names, at::TensorList out, const std::string& verify) {
  const OpenCheckpoint checkpoint(paths, {.verify = verify});
  checkpoint.load_into(Selected::whole(names), out, OutputDtype::kStored);
  checkpoint.warn_of_unverified();
}

std::vector<at::Tensor> load_recipe_of_paths(Strings paths, Strings names, Strings rules, c10::Device device,
                                             Dtype dtype, const std::string& verify, const Patterns& patterns,
                                             c10::IntArrayRef dtypes) {
  const OpenCheckpoint checkpoint(paths, {.verify = verify});
  auto tensors = checkpoint.load_recipe({names, rules}, {device, dtype_rules(dtype, patterns, dtypes.vec())});
  checkpoint.warn_of_unverified();
  return tensors;
}

void load_recipe_into_outputs(Strings paths, Strings names, Strings rules, at::TensorList out,
                              const std::string& verify) {
  const OpenCheckpoint checkpoint(paths, {.verify = verify});
  checkpoint.load_recipe_into({names, rules}, out, OutputDtype::kStored);
  checkpoint.warn_of_unverified();
}

std::vector<std::string> tensor_names(Strings paths) { return OpenCheckpoint(paths).names(); }

c10::Dict<std::string, std::string> metadata(const std::string& path) {
  return OpenCheckpoint(list_of(path)).metadata();
}

// Names of readers need no escapes in JSON.
std::string reader(Strings paths, c10::Device device) {
  const OpenCheckpoint checkpoint(paths);
  const auto ordinal = std::to_string(resolve_device(device).index());
  const auto names = call_core([&] { return checkpoint.core().call("readers", ordinal); });
  return std::string(names).substr(1, names.size() - 2);
}

// The answers of these are numbers, which are the same in JSON.
int64_t release_memory() { return std::stoll(call_function("release_memory", "")); }

int64_t start_profile() { return std::stoll(call_function("profile_start", "")); }

std::string stop_profile(int64_t profile) { return call_function("profile_stop", std::to_string(profile)); }

std::string profile_totals() { return call_function("profile_totals", ""); }

// Sets options of the URLs that begin with `url`.
void configure_stores(const std::string& url, Strings names, Strings values) {
  call_function("configure_storage", "[" + to_json(url) + "," + to_json(names) + "," + to_json(values) + "]");
}

// Reads all data of a checkpoint, and compares their digests and authentication codes.
void verify_files_of(Strings paths, const std::string& verify) {
  call_function("verify", "[" + to_json(paths) + "," + to_json(verify) + "]");
}

void wait_for_cuda_event(int64_t event, c10::Device device) {
  call_core([&] { wait_for_event(static_cast<size_t>(event), device.index()); });
}

void save_tensors(at::TensorList tensors, Strings names, const std::string& path, const Metadata& metadata) {
  save_file(tensors, names, path, metadata);
}

}  // namespace

// Versions of fst and PyTorch, for readers of the file. They must be known before the library is loaded: with another
// PyTorch, loading fails on a missing symbol.
// NOLINTNEXTLINE(modernize-avoid-c-arrays): the symbol must be the text itself.
[[gnu::used, gnu::retain]] const char build_text[] = "fst " FST_VERSION ": built for PyTorch " TORCH_VERSION;

TORCH_LIBRARY(fst, m) {
  // Loads have no tensor inputs, so compilers would merge equal calls. But each call returns separate tensors, which
  // the caller may modify. Conservative alias analysis and the tag `nondeterministic_seeded` prevent the merge. The tag
  // `cudagraph_unsafe` keeps loads out of CUDA graphs, which would replay the copies without the reads.
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};
  const std::vector<at::Tag> load_tags = {at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe,
                                          at::Tag::nondeterministic_seeded};
  const auto def_io = [&](const std::string& schema) {
    m.def(torch::schema(schema.c_str(), c10::AliasAnalysisKind::CONSERVATIVE), load_tags);
  };
  // Numbers in `dtypes` are c10::ScalarType's, or -1 to keep the stored dtype of the tensors of a pattern.
  const auto def_load = [&](const std::string& own, const std::string& result) {
    def_io(own +
           ", Device device=\"cpu\", *, ScalarType? dtype=None, str verify=\"\", str[]? patterns=None, "
           "int[] dtypes=[]) -> " +
           result);
  };
  def_load("load_file(str path", "Dict(str, Tensor)");
  def_load("load_files(str[] paths", "Dict(str, Tensor)");
  def_load("load_tensors(str[] paths, str[] names", "Tensor[]");
  def_load("load_slices(str[] paths, str[] names, int[] dims, int[] starts, int[] lengths", "Tensor[]");
  def_load("load_boxes(str[] paths, str[] names, int[] starts, int[] lengths, int[] steps", "Tensor[]");
  def_load("load_recipe(str[] paths, str[] names, str[] rules", "Tensor[]");
  // TorchScript treats a write to the elements of a list as a write to the list and would remove the call as dead code.
  // `a! -> *` declares that the elements may alias anything.
  m.def("load_into(str[] paths, str[] names, Tensor(a! -> *)[] out, *, str verify=\"\") -> ()", tags);
  m.def("load_recipe_into(str[] paths, str[] names, str[] rules, Tensor(a! -> *)[] out, *, str verify=\"\") -> ()",
        tags);
  def_io("save_file(Tensor[] tensors, str[] names, str path, *, Dict(str, str)? metadata=None) -> ()");
  def_io("_load_bytes(Tensor file) -> (str[], Tensor[])");
  // Functions without tensors, for the Python package only.
  def_io("_call(str method, str request) -> str");
  def_io("verify(str[] paths, str verify=\"digests\") -> ()");
  def_io("tensor_names(str[] paths) -> str[]");
  def_io("metadata(str path) -> Dict(str, str)");
  def_io("reader(str[] paths, Device device=\"cpu\") -> str");
  def_io("warm_up(Device device) -> ()");
  def_io("release_memory() -> int");
  // Wait that leaves captures of CUDA graphs valid, for the Python package only.
  def_io("_wait_for_event(int event, Device device) -> ()");
  def_io("configure_storage(str url, str[] names, str[] values) -> ()");
  // The results of these operators depend on their inputs only.
  const std::vector<at::Tag> function_tags = {at::Tag::pt2_compliant_tag};
  m.def("cast(Tensor[] tensors, *, ScalarType dtype) -> Tensor[]", function_tags);
  // `dtypes` is not ScalarType[], because fakes and exported programs get numbers in either case.
  m.def(
      "scatter(Tensor bytes, int[] offsets, int[] dtypes, int[] sizes, int[] ranks, *, ScalarType? dtype=None) -> "
      "Tensor[]",
      function_tags);
  m.def(
      "dequantize(Tensor codes, Tensor scales, str scheme, *, int[]? block=None, Tensor? global_scale=None, int[]? "
      "begin=None, "
      "ScalarType? dtype=None) -> Tensor",
      function_tags);
  m.def(
      "dequantize_into(Tensor codes, Tensor scales, Tensor(a!) out, str scheme, *, int[]? block=None, "
      "Tensor? global_scale=None, int[]? begin=None) -> ()",
      function_tags);
  m.def("quantize(Tensor tensor, str scheme, *, int[]? block=None) -> (Tensor codes, Tensor scales)", function_tags);
  m.def("serialize(Tensor[] tensors, str[] names, *, Dict(str, str)? metadata=None) -> Tensor", function_tags);
  def_io("profile_start() -> int");
  def_io("profile_stop(int profile) -> str");
  def_io("profile_totals() -> str");

  define_classes(m);
  // Steps of new deltas, for the Python package only.
  def_io(
      "_encode_delta(str[] names, Tensor[] old, Tensor[] new, str encoding, str checksum, "
      "__torch__.torch.classes.fst.Checkpoint? old_files, __torch__.torch.classes.fst.Checkpoint? new_files) -> "
      "(Tensor[], str[])");
  // Saves of one file of several, for the Python package only.
  def_io(
      "_save_shard(Tensor[] tensors, str[] names, str path, Dict(str, str)? metadata, str permissions_from, "
      "__torch__.torch.classes.fst.EncryptionKey? key=None) -> ()");
  def_io(
      "prepare_update(str[] paths, str[] names, Tensor[] out, *, str? version=None, str verify=\"\") -> "
      "__torch__.torch.classes.fst.Update");
  def_io("version_of(Tensor[] tensors, str[]? names=None) -> str?");
  def_io("set_version(Tensor[] tensors, str? version) -> ()");
}

TORCH_LIBRARY_IMPL(fst, CompositeExplicitAutograd, m) {
  m.impl("load_file", load_all<const std::string&>);
  m.impl("load_files", load_all<Strings>);
  m.impl("load_tensors", Load<&Selected::whole>::of_paths);
  m.impl("load_slices", Load<&Selected::slices>::of_paths);
  m.impl("load_boxes", Load<&Selected::regions>::of_paths);
  m.impl("load_recipe", load_recipe_of_paths);
  m.impl("load_into", load_into_outputs);
  m.impl("load_recipe_into", load_recipe_into_outputs);
  m.impl("prepare_update", prepare_update);
  m.impl("version_of", version_of);
  m.impl("set_version", set_version);
  m.impl("save_file", save_tensors);
  m.impl("_save_shard", save_file);
  m.impl("_load_bytes", load_bytes);
  m.impl("_call", call_function);
  m.impl("_encode_delta", encode_delta);
  m.impl("serialize", serialize);
  m.impl("verify", verify_files_of);
  m.impl("tensor_names", tensor_names);
  m.impl("metadata", metadata);
  m.impl("reader", reader);
  m.impl("warm_up", warm_up);
  m.impl("release_memory", release_memory);
  m.impl("_wait_for_event", wait_for_cuda_event);
  m.impl("configure_storage", configure_stores);
  m.impl("cast", cast);
  m.impl("scatter", scatter);
  m.impl("dequantize", dequantize_tensor);
  m.impl("dequantize_into", dequantize_tensor_into);
  m.impl("quantize", quantize_tensor);
  m.impl("profile_start", start_profile);
  m.impl("profile_stop", stop_profile);
  m.impl("profile_totals", profile_totals);
}

TORCH_LIBRARY_IMPL(fst, Autograd, m) { m.impl("cast", cast_with_gradients); }

}  // namespace fst
