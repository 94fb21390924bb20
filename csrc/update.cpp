#include "update.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "checkpoint.h"
#include "delta.h"
#include "error.h"
#include "load.h"

namespace fst {

namespace {

// Returns the number of writes that autograd has noticed. Tensors of inference mode count none.
uint32_t autograd_version(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

std::vector<uint32_t> autograd_versions(const std::vector<Change>& changes) {
  std::vector<uint32_t> versions(changes.size());
  std::ranges::transform(changes, versions.begin(),
                         [](const Change& change) { return autograd_version(change.target); });
  return versions;
}

// Records an event on the current stream of each GPU with staged values.
std::map<c10::Device, c10::Event, DeviceOrder> record_events(const std::vector<Change>& changes) {
  std::map<c10::Device, c10::Event, DeviceOrder> events;
  for (const auto& change : changes) {
    const c10::Device device = change.values.device();
    if (device.is_cuda()) {
      events.try_emplace(device, device.type()).first->second.recordOnce(current_stream(device));
    }
  }
  return events;
}

c10::intrusive_ptr<Update> prepare_deltas(Strings paths, Strings names, const std::vector<at::Tensor>& out,
                                          const Version& version) {
  const DeltaChain chain(paths);
  chain.check_base(out, names.vec());
  const auto changing = chain.names();
  const std::set<std::string> known(changing.begin(), changing.end());
  c10::List<std::string> selected;
  std::vector<at::Tensor> old;
  DeltaChain::Numbers shapes;
  for (size_t index = 0; index < out.size(); ++index) {
    if (known.contains(names.get(index))) {
      selected.push_back(names.get(index));
      old.push_back(out[index]);
      shapes.push_back(out[index].sizes().vec());
    }
  }
  auto changes = chain.changes(selected, old, shapes, DeltaChain::Numbers(selected.size()));
  return c10::make_intrusive<Update>(names.vec(), out, std::move(changes), version ? version : chain.version());
}

}  // namespace

std::tuple<bool, Version> update_source_of(Strings paths) {
  const auto converted = to_rust(paths);
  const auto source = call_core([&] { return update_source(slice_of(converted)); });
  return {source.is_delta, source.version.empty() ? Version() : std::string(source.version.front())};
}

Update::Update(std::vector<std::string> names, std::vector<at::Tensor> tensors, std::vector<Change> changes,
               Version version)
    : names_(std::move(names)),
      tensors_(std::move(tensors)),
      version_(std::move(version)),
      changes_(std::move(changes)),
      writes_(writes_of(tensors_)),
      autograd_versions_(autograd_versions(changes_)),
      events_(record_events(changes_)) {
  if (names_.size() != tensors_.size()) {
    throw_invalid_argument(c10::str(names_.size(), " names, but ", tensors_.size(), " tensors"));
  }
}

std::unique_lock<std::mutex> Update::lock() {
  if (getpid() != process_) {
    throw_invalid_argument("the update belongs to the process that prepared it; prepare one after a fork");
  }
  return std::unique_lock(mutex_);
}

void Update::check() {
  const auto locked = lock();
  check_locked();
}

void Update::commit() {
  const auto locked = lock();
  check_locked();
  write_locked(0, changes_.size());
  finish_locked();
}

void Update::write(int64_t begin, int64_t end) {
  const auto locked = lock();
  write_locked(static_cast<size_t>(begin), static_cast<size_t>(end));
}

void Update::finish() {
  const auto locked = lock();
  finish_locked();
}

void Update::rollback() {
  const auto locked = lock();
  is_open_ = false;
  changes_.clear();
}

int64_t Update::staged_bytes() {
  const auto locked = lock();
  size_t bytes = 0;
  for (const auto& change : changes_) {
    bytes += change.values.nbytes() + (change.positions.defined() ? change.positions.nbytes() : 0);
  }
  return static_cast<int64_t>(bytes);
}

void Update::check_locked() const {
  if (!is_open_) {
    throw_invalid_argument("the update was committed or rolled back; prepare another");
  }
  const auto writes = writes_of(tensors_);
  const auto differing = std::ranges::mismatch(writes, writes_);
  if (differing.in1 != writes.end()) {
    throw_version_conflict("tensor \"" + names_[differing.in1 - writes.begin()] +
                           "\": another load or update has written to it since this update was prepared; prepare it "
                           "again");
  }
  for (size_t index = 0; index < changes_.size(); ++index) {
    // A whole tensor replaces any values.
    if (changes_[index].positions.defined() && autograd_version(changes_[index].target) != autograd_versions_[index]) {
      throw_version_conflict(c10::str("tensor ", index, " of the ", changes_.size(), " that the delta changes was ",
                                      "written to since this update was prepared; prepare it again"));
    }
  }
}

void Update::write_locked(size_t begin, size_t end) {
  for (const auto& [device, event] : events_) {
    event.block(current_stream(device));
  }
  try {
    write_changes(c10::ArrayRef<Change>(changes_).slice(begin, end - begin).vec());
  } catch (...) {
    mark_torn(tensors_);
    throw;
  }
}

void Update::finish_locked() {
  set_version(tensors_, version_);
  is_open_ = false;
  changes_.clear();
}

c10::intrusive_ptr<Update> prepare_update(Strings paths, Strings names, const std::vector<at::Tensor>& out,
                                          const Version& version, const std::string& verify) {
  if (names.size() != out.size()) {
    throw_invalid_argument(c10::str(names.size(), " names, but ", out.size(), " tensors; give one for every name"));
  }
  const auto [is_delta, stated] = update_source_of(paths);
  if (is_delta) {
    return prepare_deltas(paths, names, out, version);
  }
  const OpenCheckpoint checkpoint(paths, {.verify = verify});
  check_outputs(specs_of(*select_named(checkpoint.files(), names)), out, OutputDtype::kStored);
  std::map<c10::Device, std::vector<size_t>, DeviceOrder> by_device;
  for (size_t index = 0; index < out.size(); ++index) {
    by_device[out[index].device()].push_back(index);
  }
  std::vector<Change> changes(out.size());
  for (const auto& [device, indices] : by_device) {
    c10::List<std::string> selected;
    for (const size_t index : indices) {
      selected.push_back(names.get(index));
    }
    auto values = checkpoint.load_copies(selected, device);
    for (size_t turn = 0; turn < indices.size(); ++turn) {
      changes[indices[turn]] = {out[indices[turn]], {}, std::move(values[turn])};
    }
  }
  return c10::make_intrusive<Update>(names.vec(), out, std::move(changes), version ? version : stated);
}

}  // namespace fst
