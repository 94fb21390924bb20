// Update of existing tensors in one step: everything is read and checked before anything is written.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cast.h"
#include "change.h"
#include "memory.h"
#include "select.h"
#include "version.h"

namespace fst {

// `torch.classes.fst.Update`: staged changes of tensors. Calls from several threads run one after another.
class Update : public torch::CustomClassHolder {
 public:
  using Positions = c10::List<std::optional<at::Tensor>>;

  // Begins an update. `tensors` are all tensors that get the version, whether they change or not, and `names` their
  // names in errors. From now on, writes to them and replacements of their memory make `check` throw, so no value of
  // them must have been read for the update before.
  Update(std::vector<std::string> names, std::vector<at::Tensor> tensors);

  // Sets the changes, and the version of all tensors after them. Values on a GPU may be in flight on its current
  // stream. Once `write` has been called, marks the tensors as a mixture of two versions until the commit: an update
  // may stage and write its changes in several turns.
  void stage(std::vector<Change> changes, Version version);

  // Throws a version error if one of the tensors was updated since the update was begun, or has other memory, or is one
  // of those whose elements change in part and was written in any way that autograd notices.
  void check();

  // Writes the changes from one to another index on the current streams of their devices. The first call checks, and
  // makes other updates of the same tensors throw, even without any change.
  void write(int64_t begin, int64_t end);

  // Writes the changes that `write` has not written, and sets the version. Reads no files.
  void commit();

  // Frees the staged changes. No tensor changes. Does nothing after a commit. Once `write` has been called, marks the
  // tensors as a mixture of two versions.
  void rollback();

  Version version();

  // Returns the size of the staged positions and values in bytes.
  int64_t staged_bytes();

 private:
  std::unique_lock<std::mutex> lock();
  std::unique_lock<std::mutex> lock_open();
  void check_locked() const;
  void write_locked(size_t begin, size_t end);

  const std::vector<std::string> names_;
  const std::vector<at::Tensor> tensors_;
  const pid_t process_ = getpid();
  // Memory of the tensors, and their versions for autograd, when the update was begun.
  const std::vector<TensorMemory> memory_;
  const std::vector<uint32_t> autograd_versions_;

  std::mutex mutex_;
  bool is_open_ = true;
  bool is_begun_ = false;
  Version version_;
  std::vector<Change> changes_;
  // Index of the first change that has not been written.
  size_t written_ = 0;
  // Numbers of writes to the tensors when the update was begun.
  std::vector<uint64_t> writes_;
  // Events on the streams of the preparation, after which what is staged on each GPU is complete.
  std::map<c10::Device, c10::Event, DeviceOrder> events_;
};

// Operator fst::prepare_update. Reads and verifies named tensors of a checkpoint, for existing tensors of the stored
// shapes and dtypes. Or computes the changes of tensors by a chain of deltas.
c10::intrusive_ptr<Update> prepare_update(Strings paths, Strings names, const std::vector<at::Tensor>& out,
                                          const Version& version, const std::string& verify);

}  // namespace fst
