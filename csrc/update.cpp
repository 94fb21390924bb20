#include "update.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "checkpoint.h"
#include "delta.h"
#include "error.h"
#include "load.h"
#include "tensors.h"

namespace fst {

namespace {

// Returns the number of writes that autograd has noticed. Tensors of inference mode count none.
uint32_t autograd_version(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

template <typename Value>
std::vector<Value> of_each(at::TensorList tensors, Value (*of)(const at::Tensor&)) {
  std::vector<Value> values;
  std::ranges::transform(tensors, std::back_inserter(values), of);
  return values;
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

// Returns the changes of tensors by deltas.
std::vector<Change> delta_changes(const OpenUpdateSource& source, Strings names, const std::vector<at::Tensor>& out) {
  rust::Vec<rust::String> held;
  if (const auto version = version_of(out, names.vec())) {
    held.push_back(to_rust(*version));
  }
  const auto converted = to_rust(names);
  const auto found = call_core([&] { return source.core().changing(slice_of(converted), slice_of(held)); });
  const std::set<size_t> changing(found.begin(), found.end());
  std::map<TensorMemory, size_t> changed;
  c10::List<std::string> selected;
  std::vector<at::Tensor> old;
  OpenUpdateSource::Numbers shapes;
  for (const size_t index : changing) {
    changed.try_emplace(memory_of(out[index]), index);
    selected.push_back(names.get(index));
    old.push_back(out[index]);
    shapes.push_back(out[index].sizes().vec());
  }
  for (size_t index = 0; index < out.size(); ++index) {
    const auto tied = changed.find(memory_of(out[index]));
    if (tied != changed.end() && out[index].numel() > 0 && !changing.contains(index)) {
      throw_mismatch("tensors \"" + names.get(tied->second) + "\" and \"" + names.get(index) +
                     "\" are one tensor in the target, but the deltas change only the first; nothing was written");
    }
  }
  return source.changes(selected, old, shapes, OpenUpdateSource::Numbers(selected.size()));
}

// Returns the values of tensors in a whole checkpoint as changes.
std::vector<Change> whole_changes(const OpenCheckpoint& checkpoint, Strings names, const std::vector<at::Tensor>& out) {
  check_outputs(specs_of(*select(checkpoint.core(), Selected::whole(names))), out, OutputDtype::kStored);
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
    auto values = checkpoint.load(Selected::whole(selected), {device, {}, false});
    for (size_t turn = 0; turn < indices.size(); ++turn) {
      changes[indices[turn]] = {out[indices[turn]], {}, std::move(values[turn])};
    }
  }
  return changes;
}

}  // namespace

Update::Update(std::vector<std::string> names, std::vector<at::Tensor> tensors)
    : names_(std::move(names)),
      tensors_(std::move(tensors)),
      memory_(of_each(tensors_, memory_of)),
      autograd_versions_(of_each(tensors_, autograd_version)),
      writes_(writes_of(tensors_)) {
  check_counts(names_.size(), "names", tensors_.size(), "tensors");
}

void Update::stage(std::vector<Change> changes, Version version) {
  const auto locked = lock_open();
  if (is_begun_) {
    mark_torn(tensors_);
  }
  changes_ = std::move(changes);
  written_ = 0;
  version_ = std::move(version);
  events_ = record_events(changes_);
}

std::unique_lock<std::mutex> Update::lock() {
  if (getpid() != process_) {
    throw_invalid_argument("the update belongs to the process that prepared it; prepare one after a fork");
  }
  return std::unique_lock(mutex_);
}

std::unique_lock<std::mutex> Update::lock_open() {
  auto locked = lock();
  if (!is_open_) {
    throw_invalid_argument("the update was committed or rolled back; prepare another");
  }
  return locked;
}

void Update::check() {
  const auto locked = lock_open();
  check_locked();
}

void Update::write(int64_t begin, int64_t end) {
  const auto locked = lock_open();
  const auto count = static_cast<int64_t>(changes_.size());
  if (begin < 0 || begin > end || end > count) {
    throw_invalid_argument(c10::str("no changes ", begin, " to ", end, " among ", count, "; nothing was written"));
  }
  write_locked(static_cast<size_t>(begin), static_cast<size_t>(end));
}

void Update::commit() {
  const auto locked = lock_open();
  write_locked(written_, changes_.size());
  set_version(tensors_, version_);
  is_open_ = false;
  changes_.clear();
}

void Update::rollback() {
  const auto locked = lock();
  if (is_open_ && is_begun_) {
    mark_torn(tensors_);
  }
  is_open_ = false;
  changes_.clear();
}

Version Update::version() {
  const auto locked = lock();
  return version_;
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
  const auto refuse = [&](size_t index, const char* reason) {
    throw_version_conflict("tensor \"" + names_[index] + "\": " + reason +
                           " since this update was prepared; nothing was written. Prepare it again");
  };
  std::set<const c10::StorageImpl*> partial;
  for (const auto& change : changes_) {
    // A whole tensor replaces any values.
    if (change.positions.defined()) {
      partial.insert(change.target.storage().unsafeGetStorageImpl());
    }
  }
  const auto writes = writes_of(tensors_);
  for (size_t index = 0; index < tensors_.size(); ++index) {
    const auto& tensor = tensors_[index];
    if (memory_of(tensor) != memory_[index]) {
      refuse(index, "its memory was replaced, as by Module.to or an assignment to Tensor.data,");
    }
    if (writes[index] != writes_[index]) {
      refuse(index, "another load or update has written to it");
    }
    if (tensor.has_storage() && partial.contains(tensor.storage().unsafeGetStorageImpl()) &&
        autograd_version(tensor) != autograd_versions_[index]) {
      refuse(index, "a delta changes it, and it was written to");
    }
  }
}

void Update::write_locked(size_t begin, size_t end) {
  if (!is_begun_) {
    check_locked();
    if (const auto index = begin_write(tensors_, writes_)) {
      throw_version_conflict("tensor \"" + names_[*index] +
                             "\": another load or update has written to it since this update was prepared; nothing was "
                             "written. Prepare it again");
    }
    is_begun_ = true;
  }
  for (const auto& [device, event] : events_) {
    event.block(current_stream(device));
  }
  try {
    write_changes(c10::ArrayRef<Change>(changes_).slice(begin, end - begin).vec());
  } catch (...) {
    mark_torn(tensors_);
    // Another attempt finds that the tensors were written to.
    is_begun_ = false;
    throw;
  }
  written_ = end;
}

c10::intrusive_ptr<Update> prepare_update(Strings paths, Strings names, const std::vector<at::Tensor>& out,
                                          const Version& version, const std::string& verify) {
  check_counts(names.size(), "names", out.size(), "tensors; give one for every name");
  // Writes count before the first value of a tensor is read.
  auto update = c10::make_intrusive<Update>(names.vec(), out);
  const OpenUpdateSource source(paths, {.verify = verify});
  const auto& [_, is_delta, stated] = source.opened();
  auto changes = is_delta ? delta_changes(source, names, out) : whole_changes(*source.checkpoint(), names, out);
  update->stage(std::move(changes), version || stated.empty() ? version : std::string(stated.front()));
  return update;
}

}  // namespace fst
