// Registers the operators and script classes, and converts between PyTorch's types and the core's types.

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#include <torch/version.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cast.h"
#include "change.h"
#include "checkpoint.h"
#include "delta.h"
#include "dequantize.h"
#include "encryption_key.h"
#include "error.h"
#include "load.h"
#include "loader.h"
#include "ranks_load.h"
#include "ranks_save.h"
#include "recipe.h"
#include "save.h"
#include "select.h"
#include "source.h"
#include "update.h"
#include "version.h"
#include "writer.h"

namespace fst {

namespace {

using Dtype = std::optional<c10::ScalarType>;
using Names = std::optional<c10::List<std::string>>;
// Starts, lengths and steps of index regions: one of each for every dimension of every tensor.
using Regions = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>;

c10::List<std::string> list_of(const std::string& path) { return {{path}}; }
c10::List<std::string> list_of(Strings paths) { return paths; }

// Calls a function of the core without tensors. Requests and answers are in JSON: rust/bridge/calls.rs.
std::string call_function(const std::string& method, const std::string& request) {
  return std::string(call_core([&] { return call(to_rust(method), to_rust(request)); }));
}

// Calls a method of an object of the core in the same way.
template <typename Class>
std::string call_method(const c10::intrusive_ptr<Class>& object, const std::string& method,
                        const std::string& request) {
  return std::string(call_core([&] { return object->core().call(to_rust(method), to_rust(request)); }));
}

// Warns of tensors that loads of files that were opened for them have not verified.
void warn_of_unverified(const OpenCheckpoint& checkpoint) {
  const auto warning = checkpoint.take_unverified();
  if (!warning.empty()) {
    TORCH_WARN("fst: ", warning);
  }
}

// Load into new tensors, with the arguments that select these and the common ones of all loads, as an operator that
// opens files and as a method of open ones.
template <auto select>
struct Load;

template <typename... Own, Selected (*select)(Own...)>
struct Load<select> {
  static std::vector<at::Tensor> of_paths(Strings paths, Own... own, c10::Device device, Dtype dtype,
                                          const std::string& verify, const Patterns& patterns,
                                          c10::IntArrayRef dtypes) {
    const OpenCheckpoint checkpoint(paths, {.verify = verify});
    auto tensors = checkpoint.load(select(own...), {device, dtype_rules(dtype, patterns, dtypes.vec())});
    warn_of_unverified(checkpoint);
    return tensors;
  }

  static std::vector<at::Tensor> of_object(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, Own... own,
                                           c10::Device device, Dtype dtype, const Patterns& patterns,
                                           const DtypeNumbers& dtypes, bool is_mapped) {
    return checkpoint->load(select(own...), {device, dtype_rules(dtype, patterns, dtypes), is_mapped});
  }
};

template <typename Paths>
c10::Dict<std::string, at::Tensor> load_all(Paths paths, c10::Device device, Dtype dtype, const std::string& verify,
                                            const Patterns& patterns, c10::IntArrayRef dtypes) {
  const OpenCheckpoint checkpoint(list_of(paths), {.verify = verify});
  auto tensors = checkpoint.load_all({device, dtype_rules(dtype, patterns, dtypes.vec())});
  warn_of_unverified(checkpoint);
  return tensors;
}

void load_into_outputs(Strings paths, Strings names, at::TensorList out, const std::string& verify) {
  const OpenCheckpoint checkpoint(paths, {.verify = verify});
  checkpoint.load_into(Selected::whole(names), out, OutputDtype::kStored);
  warn_of_unverified(checkpoint);
}

// Overwrites tensors of an open checkpoint, with the casts of `Tensor.copy_` if outputs of other dtypes are permitted.
void overwrite(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, Strings names, const std::vector<at::Tensor>& out,
               bool is_cast) {
  checkpoint->load_into(Selected::whole(names), out, is_cast ? OutputDtype::kAny : OutputDtype::kStored);
}

void load_regions_into(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, Strings names,
                       const std::vector<int64_t>& starts, const std::vector<int64_t>& lengths,
                       const std::vector<int64_t>& steps, const std::vector<at::Tensor>& out) {
  checkpoint->load_into(Selected::regions(names, starts, lengths, steps), out, OutputDtype::kAny);
}

std::vector<at::Tensor> load_recipe_of_paths(Strings paths, Strings names, Strings rules, c10::Device device,
                                             Dtype dtype, const std::string& verify, const Patterns& patterns,
                                             c10::IntArrayRef dtypes) {
  const OpenCheckpoint checkpoint(paths, {.verify = verify});
  auto tensors = checkpoint.load_recipe({names, rules}, {device, dtype_rules(dtype, patterns, dtypes.vec())});
  warn_of_unverified(checkpoint);
  return tensors;
}

void load_recipe_into_outputs(Strings paths, Strings names, Strings rules, at::TensorList out,
                              const std::string& verify) {
  const OpenCheckpoint checkpoint(paths, {.verify = verify});
  checkpoint.load_recipe_into({names, rules}, out, OutputDtype::kStored);
  warn_of_unverified(checkpoint);
}

// Loads outputs of a recipe of an open checkpoint, or index regions of them if there are starts, lengths and steps.
std::vector<at::Tensor> load_outputs(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, Strings names, Strings rules,
                                     const std::vector<int64_t>& starts, const std::vector<int64_t>& lengths,
                                     const std::vector<int64_t>& steps, c10::Device device, Dtype dtype,
                                     const Patterns& patterns, const DtypeNumbers& dtypes, bool is_mapped) {
  return checkpoint->load_recipe({names, rules, starts, lengths, steps},
                                 {device, dtype_rules(dtype, patterns, dtypes), is_mapped});
}

void load_outputs_into(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, Strings names, Strings rules,
                       const std::vector<int64_t>& starts, const std::vector<int64_t>& lengths,
                       const std::vector<int64_t>& steps, const std::vector<at::Tensor>& out, bool is_cast) {
  checkpoint->load_recipe_into({names, rules, starts, lengths, steps}, out,
                               is_cast ? OutputDtype::kAny : OutputDtype::kStored);
}

// Fills tensors with views that a program has recorded of the tensors of several checkpoints, one behind the other.
void load_recorded_views(const std::vector<c10::intrusive_ptr<OpenCheckpoint>>& checkpoints, const std::string& views,
                         const std::vector<at::Tensor>& held, const std::vector<at::Tensor>& out) {
  if (checkpoints.size() == 1) {
    load_views_into(checkpoints.front()->core(), views, held, out);
    return;
  }
  auto joined = empty_checkpoint();
  for (const auto& checkpoint : checkpoints) {
    joined = joined->join(checkpoint->core());
  }
  load_views_into(*joined, views, held, out);
}

std::vector<at::Tensor> load_own(const c10::intrusive_ptr<OpenLoadPlan>& plan, int64_t rank,
                                 const std::vector<int64_t>& items, c10::Device device, Dtype dtype,
                                 const Patterns& patterns, const DtypeNumbers& dtypes) {
  return plan->load_own({device, dtype_rules(dtype, patterns, dtypes)}, rank, items);
}

std::vector<std::string> tensor_names(Strings paths) { return OpenCheckpoint(paths).names(); }

c10::Dict<std::string, std::string> metadata(const std::string& path) {
  return OpenCheckpoint(list_of(path)).metadata();
}

std::string reader(Strings paths, c10::Device device) { return OpenCheckpoint(paths).reader(device); }

c10::intrusive_ptr<OpenCheckpoint> open_files(Strings paths, const std::optional<at::Tensor>& headers,
                                              const std::string& verify, const OpenEncryptionKey::Optional& key,
                                              bool accepts_plain) {
  return c10::make_intrusive<OpenCheckpoint>(paths, OpenOptions{verify, key, headers, accepts_plain});
}

c10::intrusive_ptr<Loader> stream(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, const Names& names,
                                  const std::optional<Regions>& regions, c10::Device device, Dtype dtype,
                                  int64_t window_bytes, const std::string& order, const Patterns& patterns,
                                  const DtypeNumbers& dtypes) {
  auto selected = names ? Selected::whole(*names) : Selected();
  if (names && regions) {
    const auto& [starts, lengths, steps] = *regions;
    selected = Selected::regions(*names, starts, lengths, steps);
  }
  return c10::make_intrusive<Loader>(select(checkpoint->core(), selected),
                                     LoadOptions{device, dtype_rules(dtype, patterns, dtypes)}, window_bytes, order);
}

c10::intrusive_ptr<Loader> stream_files(Strings paths, c10::Device device, const Names& names, Dtype dtype,
                                        int64_t window_bytes, const std::string& order, const std::string& verify,
                                        const Patterns& patterns, const DtypeNumbers& dtypes) {
  const auto checkpoint = open_files(paths, {}, verify, {}, false);
  auto loader = stream(checkpoint, names, {}, device, dtype, window_bytes, order, patterns, dtypes);
  warn_of_unverified(*checkpoint);
  return loader;
}

void stage_lists(const c10::intrusive_ptr<Update>& update, const std::vector<at::Tensor>& targets,
                 const Update::Positions& positions, const std::vector<at::Tensor>& values, const Version& version) {
  update->stage(changes_of(targets, positions, values), version);
}

c10::intrusive_ptr<OpenUpdateSource> open_update_source(Strings paths, const std::string& verify,
                                                        const OpenEncryptionKey::Optional& key, bool accepts_plain) {
  return c10::make_intrusive<OpenUpdateSource>(
      paths, OpenOptions{.verify = verify, .key = key, .accepts_plain = accepts_plain});
}

// The answers of these are numbers, which are the same in JSON.
int64_t release_memory() { return std::stoll(call_function("release_memory", "")); }

int64_t start_profile() { return std::stoll(call_function("profile_start", "")); }

std::string stop_profile(int64_t profile) { return call_function("profile_stop", std::to_string(profile)); }

std::string profile_totals() { return call_function("profile_totals", ""); }

// Sets options of the URLs that begin with `url`.
void configure_stores(const std::string& url, Strings names, Strings values) {
  const auto rust_names = to_rust(names);
  const auto rust_values = to_rust(values);
  call_core([&] { ::fst::configure_storage(to_rust(url), slice_of(rust_names), slice_of(rust_values)); });
}

// Reads all data of a checkpoint, and compares their digests and authentication codes.
void verify_files_of(Strings paths, const std::string& verify) {
  const auto converted = to_rust(paths);
  call_core([&] { verify_checkpoint(slice_of(converted), to_rust(verify)); });
}

void wait_for_cuda_event(int64_t event, c10::Device device) {
  call_core([&] { wait_for_event(static_cast<size_t>(event), device.index()); });
}

void save_tensors(at::TensorList tensors, Strings names, const std::string& path, const Metadata& metadata) {
  save_file(tensors, names, path, metadata);
}

// Changes as lists: positions (`None` if every element changes), and values.
std::tuple<std::vector<std::optional<at::Tensor>>, std::vector<at::Tensor>> changes_of_deltas(
    const c10::intrusive_ptr<OpenUpdateSource>& source, Strings names, const std::vector<at::Tensor>& old,
    const OpenUpdateSource::Numbers& shapes, const OpenUpdateSource::Numbers& ranges, int64_t limit_bytes) {
  std::vector<std::optional<at::Tensor>> positions;
  std::vector<at::Tensor> values;
  for (auto& change : source->changes(names, old, shapes, ranges, limit_bytes)) {
    positions.push_back(change.positions.defined() ? std::optional(change.positions) : std::nullopt);
    values.push_back(std::move(change.values));
  }
  return {std::move(positions), std::move(values)};
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
  // Steps of new deltas, for the Python package only.
  def_io("_encode_delta(str[] names, Tensor[] old, Tensor[] new, str encoding, str checksum) -> (Tensor[], str[])");
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

  const auto none = c10::IValue();
  m.class_<OpenEncryptionKey>("EncryptionKey")
      .def(torch::init<const at::Tensor&, const std::string&, const std::vector<int64_t>&,
                       const std::optional<at::Tensor>&>(),
           "Secret key of encrypted files.",
           {torch::arg("secret"), torch::arg("label") = "", torch::arg("limits") = std::vector<int64_t>(),
            torch::arg("salt") = none})
      .def_static("of_file", &OpenEncryptionKey::of_file)
      .def_static("derive", &OpenEncryptionKey::derive)
      .def("set_registered", &OpenEncryptionKey::set_registered)
      .def("for_save", &OpenEncryptionKey::for_save)
      .def("rotate", &OpenEncryptionKey::rotate, "",
           {torch::arg("path"), torch::arg("key"), torch::arg("limit_ms") = -1});
  // Saves of one file of several, for the Python package only.
  def_io(
      "_save_shard(Tensor[] tensors, str[] names, str path, Dict(str, str)? metadata, str permissions_from, "
      "__torch__.torch.classes.fst.EncryptionKey? key=None) -> ()");
  m.class_<Loader>("Loader")
      .def(torch::init(stream_files), "Returns tensors one by one while the next ones load.",
           {torch::arg("paths"), torch::arg("device") = c10::Device(c10::kCPU), torch::arg("names") = none,
            torch::arg("dtype") = none, torch::arg("window_bytes") = kWindowBytes, torch::arg("order") = "file",
            torch::arg("verify") = "", torch::arg("patterns") = none, torch::arg("dtypes") = none})
      .def("next", &Loader::next)
      .def("next_batch", &Loader::next_batch)
      .def("close", &Loader::close)
      .def("size", &Loader::size)
      .def("total_bytes", &Loader::total_bytes);
  m.class_<OpenCheckpoint>("Checkpoint")
      .def(torch::init(open_files), "Checkpoint with open files and parsed headers.",
           {torch::arg("paths"), torch::arg("headers") = none, torch::arg("verify") = "", torch::arg("key") = none,
            torch::arg("accepts_plain") = false})
      .def("headers", &OpenCheckpoint::headers)
      .def("call", call_method<OpenCheckpoint>)
      .def("names", &OpenCheckpoint::names)
      .def("texts", &OpenCheckpoint::texts)
      .def("entry", &OpenCheckpoint::entry, "", {torch::arg("name")})
      .def("differing_hashes", &OpenCheckpoint::differing_hashes, "", {torch::arg("names"), torch::arg("tensors")})
      .def("load_tensors", Load<&Selected::whole>::of_object, "",
           {torch::arg("names"), torch::arg("device") = c10::Device(c10::kCPU), torch::arg("dtype") = none,
            torch::arg("patterns") = none, torch::arg("dtypes") = none, torch::arg("is_mapped") = true})
      .def("load_slices", Load<&Selected::slices>::of_object, "",
           {torch::arg("names"), torch::arg("dims"), torch::arg("starts"), torch::arg("lengths"),
            torch::arg("device") = c10::Device(c10::kCPU), torch::arg("dtype") = none, torch::arg("patterns") = none,
            torch::arg("dtypes") = none, torch::arg("is_mapped") = true})
      .def("load_boxes", Load<&Selected::regions>::of_object, "",
           {torch::arg("names"), torch::arg("starts"), torch::arg("lengths"), torch::arg("steps"),
            torch::arg("device") = c10::Device(c10::kCPU), torch::arg("dtype") = none, torch::arg("patterns") = none,
            torch::arg("dtypes") = none, torch::arg("is_mapped") = true})
      .def("load_region", &OpenCheckpoint::load_region, "",
           {torch::arg("name"), torch::arg("ranges") = std::vector<int64_t>(),
            torch::arg("device") = c10::Device(c10::kCPU), torch::arg("is_mapped") = true})
      .def("stream", stream, "",
           {torch::arg("names") = none, torch::arg("regions") = none, torch::arg("device") = c10::Device(c10::kCPU),
            torch::arg("dtype") = none, torch::arg("window_bytes") = kWindowBytes, torch::arg("order") = "file",
            torch::arg("patterns") = none, torch::arg("dtypes") = none})
      .def("load_into", overwrite, "", {torch::arg("names"), torch::arg("out"), torch::arg("is_cast") = true})
      .def("load_boxes_into", load_regions_into, "",
           {torch::arg("names"), torch::arg("starts"), torch::arg("lengths"), torch::arg("steps"), torch::arg("out")})
      .def("load_recipe", load_outputs, "",
           {torch::arg("names"), torch::arg("rules"), torch::arg("starts") = std::vector<int64_t>(),
            torch::arg("lengths") = std::vector<int64_t>(), torch::arg("steps") = std::vector<int64_t>(),
            torch::arg("device") = c10::Device(c10::kCPU), torch::arg("dtype") = none, torch::arg("patterns") = none,
            torch::arg("dtypes") = none, torch::arg("is_mapped") = true})
      .def("load_recipe_into", load_outputs_into, "",
           {torch::arg("names"), torch::arg("rules"), torch::arg("starts"), torch::arg("lengths"), torch::arg("steps"),
            torch::arg("out"), torch::arg("is_cast") = true})
      .def_static("load_views_into", load_recorded_views);
  m.class_<Update>("Update")
      .def(torch::init<std::vector<std::string>, std::vector<at::Tensor>>(), "Staged changes of tensors.",
           {torch::arg("names"), torch::arg("tensors")})
      .def("stage", stage_lists, "",
           {torch::arg("targets"), torch::arg("positions"), torch::arg("values"), torch::arg("version") = none})
      .def("check", &Update::check)
      .def("write", &Update::write, "", {torch::arg("begin"), torch::arg("end")})
      .def("commit", &Update::commit)
      .def("rollback", &Update::rollback)
      .def("version", &Update::version)
      .def("staged_bytes", &Update::staged_bytes);
  def_io(
      "prepare_update(str[] paths, str[] names, Tensor[] out, *, str? version=None, str verify=\"\") -> "
      "__torch__.torch.classes.fst.Update");
  def_io("version_of(Tensor[] tensors, str[]? names=None) -> str?");
  def_io("set_version(Tensor[] tensors, str? version) -> ()");
  m.class_<OpenSource>("Source")
      .def(torch::init<const std::string&>(), "Open file, local or remote.", {torch::arg("path")})
      .def("length", &OpenSource::length)
      .def("read", &OpenSource::read, "", {torch::arg("begin"), torch::arg("out")});
  m.class_<OpenUpdateSource>("UpdateSource")
      .def(torch::init(open_update_source), "One open checkpoint, or open deltas, the oldest first.",
           {torch::arg("paths"), torch::arg("verify") = "", torch::arg("key") = none,
            torch::arg("accepts_plain") = false})
      .def("after", &OpenUpdateSource::after)
      .def("call", call_method<OpenUpdateSource>)
      .def("checkpoint", &OpenUpdateSource::checkpoint)
      .def("changes", changes_of_deltas, "",
           {torch::arg("names"), torch::arg("old"), torch::arg("shapes"), torch::arg("ranges"),
            torch::arg("limit_bytes") = -1});
  m.class_<OpenLoadPlan>("LoadPlan")
      .def(torch::init<const c10::intrusive_ptr<OpenCheckpoint>&, const at::Tensor&, const std::string&>(),
           "Plan of a load by a group of ranks: reads and exchanges of each rank.",
           {torch::arg("checkpoint"), torch::arg("numbers"), torch::arg("request")})
      .def("call", call_method<OpenLoadPlan>)
      .def("load_own", load_own, "",
           {torch::arg("rank"), torch::arg("items"), torch::arg("device"), torch::arg("dtype"),
            torch::arg("patterns") = none, torch::arg("dtypes") = none})
      .def("load_own_into", &OpenLoadPlan::load_own_into, "",
           {torch::arg("rank"), torch::arg("items"), torch::arg("out")});
  m.class_<RanksLoad>("RanksLoad")
      .def(torch::init<const c10::intrusive_ptr<OpenLoadPlan>&, int64_t, const RanksLoad::Outputs&, c10::Device>(),
           "Executes a group plan on one rank.",
           {torch::arg("plan"), torch::arg("rank"), torch::arg("out"), torch::arg("device")})
      .def("read", &RanksLoad::read, "", {torch::arg("window"), torch::arg("send")})
      .def("unpack", &RanksLoad::unpack, "", {torch::arg("window"), torch::arg("received")})
      .def("finish", &RanksLoad::finish);
  m.class_<OpenSavePlan>("SavePlan")
      .def(torch::init<const at::Tensor&, const std::string&>(),
           "Plan of a save by a group of ranks: writes and exchanges of each rank.",
           {torch::arg("numbers"), torch::arg("request")})
      .def("call", call_method<OpenSavePlan>);
  m.class_<FileSave>("FileSave")
      .def(torch::init<const std::string&, Strings, const std::vector<at::Tensor>&, const Metadata&, const std::string&,
                       const OpenEncryptionKey::Optional&>(),
           "Saves one file, whose values come in parts.",
           {torch::arg("path"), torch::arg("names"), torch::arg("likes"), torch::arg("metadata"),
            torch::arg("permissions_from"), torch::arg("key")})
      .def("order", &FileSave::order)
      .def("append", &FileSave::append)
      .def("finish", &FileSave::finish)
      .def("abandon", &FileSave::abandon);
  m.class_<CheckpointSave>("CheckpointSave")
      .def(torch::init<>(), "Files of a checkpoint that a save replaces.")
      .def("call", call_method<CheckpointSave>);
  m.class_<RanksSave>("RanksSave")
      .def(torch::init<const c10::intrusive_ptr<OpenSavePlan>&, int64_t, Strings, Strings, const RanksSave::Tensors&>(),
           "Executes the plan of a save on one rank.",
           {torch::arg("plan"), torch::arg("rank"), torch::arg("paths"), torch::arg("uploads"), torch::arg("tensors")})
      .def("read", &RanksSave::read, "", {torch::arg("window"), torch::arg("send")})
      .def("unpack", &RanksSave::unpack, "", {torch::arg("window"), torch::arg("received")})
      .def("hashes", &RanksSave::hashes)
      .def("seal", &RanksSave::seal, "", {torch::arg("hashes")})
      .def("finish", &RanksSave::finish);
  m.class_<Memory>("Memory")
      .def_static("check", &Memory::check)
      .def_static("is_mapped", &Memory::is_mapped)
      .def_static("copy", &Memory::copy);
  m.class_<Writer>("Writer")
      .def(torch::init<const std::string&, const Metadata&, bool, const OpenEncryptionKey::Optional&>(),
           "Writes tensors to a file one by one.",
           {torch::arg("path"), torch::arg("metadata") = none, torch::arg("tensorizer") = false,
            torch::arg("key") = none})
      .def("write", &Writer::write)
      .def("write_hashed", &Writer::write_hashed)
      .def("close", &Writer::close)
      .def("abandon", &Writer::abandon);
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
