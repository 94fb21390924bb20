#include "classes.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "change.h"
#include "checkpoint.h"
#include "delta.h"
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
#include "writer.h"

namespace fst {

namespace {

using Dtype = std::optional<c10::ScalarType>;
using Names = std::optional<c10::List<std::string>>;
using Numbers = std::vector<int64_t>;
// Starts, lengths and steps of index regions: one of each for every dimension of every tensor.
using Regions = std::optional<std::tuple<Numbers, Numbers, Numbers>>;

// Calls a method of an object of the core without tensors. Requests and answers are in JSON.
template <typename Class>
std::string call_method(const c10::intrusive_ptr<Class>& object, const std::string& method,
                        const std::string& request) {
  return std::string(call_core([&] { return object->core().call(to_rust(method), to_rust(request)); }));
}

// Returns what a method selects of named tensors: all of them, or index regions, or, with dimensions, a slice along one
// dimension of each, which has one start and one length.
Selected selected_of(Strings names, const Regions& regions, const std::optional<Numbers>& dims = std::nullopt) {
  if (!regions) {
    return Selected::whole(names);
  }
  const auto& [starts, lengths, steps] = *regions;
  return dims ? Selected::slices(names, *dims, starts, lengths) : Selected::regions(names, starts, lengths, steps);
}

// Returns the request for named outputs of rules, or for what is selected of them.
RecipeRequest request_of(Strings names, Strings rules, const Selected& selected) {
  if (selected.parts == Parts::Slices) {
    throw_invalid_argument("outputs of rules have no slices along a dimension; give index regions, and no dims");
  }
  return {names, rules, selected.starts, selected.lengths, selected.steps_or_dims};
}

// Loads named tensors or outputs of rules, or parts of them, into new tensors.
std::vector<at::Tensor> load_parts(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, Strings names,
                                   const Regions& regions, c10::Device device, Dtype dtype, const Patterns& patterns,
                                   const DtypeNumbers& dtypes, bool is_mapped, const std::optional<Numbers>& dims,
                                   const Names& rules) {
  const auto selected = selected_of(names, regions, dims);
  const LoadOptions options{device, dtype_rules(dtype, patterns, dtypes), is_mapped};
  return rules ? checkpoint->load_recipe(request_of(names, *rules, selected), options)
               : checkpoint->load(selected, options);
}

// Overwrites tensors with named tensors or outputs of rules, or with parts of them, with the casts of `Tensor.copy_` if
// outputs of other dtypes are permitted.
void overwrite_parts(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, Strings names,
                     const std::vector<at::Tensor>& out, const Regions& regions, bool is_cast, const Names& rules) {
  const auto selected = selected_of(names, regions);
  const auto dtype = is_cast ? OutputDtype::kAny : OutputDtype::kStored;
  if (rules) {
    checkpoint->load_recipe_into(request_of(names, *rules, selected), out, dtype);
  } else {
    checkpoint->load_into(selected, out, dtype);
  }
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

c10::intrusive_ptr<OpenCheckpoint> open_files(Strings paths, const std::optional<at::Tensor>& headers,
                                              const std::string& verify, const OpenEncryptionKey::Optional& key,
                                              bool accepts_plain) {
  return c10::make_intrusive<OpenCheckpoint>(paths, OpenOptions{verify, key, headers, accepts_plain});
}

c10::intrusive_ptr<Loader> stream(const c10::intrusive_ptr<OpenCheckpoint>& checkpoint, const Names& names,
                                  const Regions& regions, c10::Device device, Dtype dtype, int64_t window_bytes,
                                  const std::string& order, const Patterns& patterns, const DtypeNumbers& dtypes) {
  const auto selected = names ? selected_of(*names, regions) : Selected();
  return c10::make_intrusive<Loader>(select(checkpoint->core(), selected),
                                     LoadOptions{device, dtype_rules(dtype, patterns, dtypes)}, window_bytes, order);
}

c10::intrusive_ptr<Loader> stream_files(Strings paths, c10::Device device, const Names& names, Dtype dtype,
                                        int64_t window_bytes, const std::string& order, const std::string& verify,
                                        const Patterns& patterns, const DtypeNumbers& dtypes) {
  const auto checkpoint = open_files(paths, {}, verify, {}, false);
  auto loader = stream(checkpoint, names, {}, device, dtype, window_bytes, order, patterns, dtypes);
  checkpoint->warn_of_unverified();
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

void define_classes(torch::Library& m) {
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
      .def("entry", &OpenCheckpoint::entry, "", {torch::arg("name")})
      .def("load", load_parts, "",
           {torch::arg("names"), torch::arg("regions") = none, torch::arg("device") = c10::Device(c10::kCPU),
            torch::arg("dtype") = none, torch::arg("patterns") = none, torch::arg("dtypes") = none,
            torch::arg("is_mapped") = true, torch::arg("dims") = none, torch::arg("rules") = none})
      .def("load_region", &OpenCheckpoint::load_region, "",
           {torch::arg("name"), torch::arg("ranges") = std::vector<int64_t>(),
            torch::arg("device") = c10::Device(c10::kCPU), torch::arg("is_mapped") = true})
      .def("stream", stream, "",
           {torch::arg("names") = none, torch::arg("regions") = none, torch::arg("device") = c10::Device(c10::kCPU),
            torch::arg("dtype") = none, torch::arg("window_bytes") = kWindowBytes, torch::arg("order") = "file",
            torch::arg("patterns") = none, torch::arg("dtypes") = none})
      .def("load_into", overwrite_parts, "",
           {torch::arg("names"), torch::arg("out"), torch::arg("regions") = none, torch::arg("is_cast") = true,
            torch::arg("rules") = none})
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
      .def("close", &FileSave::close, "", {torch::arg("discards") = false});
  m.class_<CheckpointSave>("CheckpointSave")
      .def(torch::init<>(), "Files of a checkpoint that a save replaces.")
      .def("call", call_method<CheckpointSave>);
  m.class_<RanksSave>("RanksSave")
      .def(torch::init<const c10::intrusive_ptr<OpenSavePlan>&, int64_t, Strings, Strings, const RanksSave::Tensors&>(),
           "Executes the plan of a save on one rank.",
           {torch::arg("plan"), torch::arg("rank"), torch::arg("paths"), torch::arg("uploads"), torch::arg("tensors")})
      .def("read", &RanksSave::read, "", {torch::arg("window"), torch::arg("send")})
      .def("unpack", &RanksSave::unpack, "", {torch::arg("window"), torch::arg("received")})
      .def("call", call_method<RanksSave>);
  m.class_<Memory>("Memory")
      .def_static("check", &Memory::check)
      .def_static("is_mapped", &Memory::is_mapped)
      .def_static("copy", &Memory::copy);
  m.class_<Writer>("Writer")
      .def(torch::init<const std::string&, const Metadata&, bool, const OpenEncryptionKey::Optional&>(),
           "Writes tensors to a file one by one.",
           {torch::arg("path"), torch::arg("metadata") = none, torch::arg("tensorizer") = false,
            torch::arg("key") = none})
      .def("write", &Writer::write, "", {torch::arg("name"), torch::arg("tensor"), torch::arg("kind") = none})
      .def("close", &Writer::close, "", {torch::arg("discards") = false});
}

}  // namespace fst
