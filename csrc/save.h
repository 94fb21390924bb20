// Saves tensors: fst::save_file and fst::serialize.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

#include "encryption_key.h"
#include "fst/rust/bridge.rs.h"
#include "memory_streams.h"
#include "select.h"

namespace fst {

using Metadata = std::optional<c10::Dict<std::string, std::string>>;

// Describes a tensor of any device for the core. Throws if the tensor is not dense or is quantized, before it is read.
NewTensor describe_dense(const std::string& name, const at::Tensor& tensor);

// Describes a tensor for the core. All saves and copies for them begin with it. Throws if the tensor is not dense, is
// quantized, or is not on the CPU or a GPU.
NewTensor describe(const std::string& name, const at::Tensor& tensor);

// Describes a safetensors file for the core. If no file is at `path`, the new one gets the owner and permissions of the
// file `permissions_from`, unless that is empty. The file is encrypted with the key, or else, if the metadata name the
// label of a registered key, with that.
rust::Box<NewFile> describe_file(const std::string& path, const Metadata& metadata,
                                 const std::string& permissions_from = "",
                                 const OpenEncryptionKey::Optional& key = std::nullopt);

// `torch.classes.fst.Memory`: functions of the memory of tensors. PyTorch dispatches operators on wrappers of tensors,
// but not these functions, so they also judge the wrappers themselves. `name` is the tensor's name in errors.
class Memory : public torch::CustomClassHolder {
 public:
  // Throws unless the tensor can be saved.
  static void check(const std::string& name, const at::Tensor& tensor);

  // Returns whether the elements are in a file that fst has mapped.
  static bool is_mapped(const at::Tensor& tensor);

  // Returns a contiguous copy on the same device. Reads mapped files with system calls.
  static at::Tensor copy(const std::string& name, const at::Tensor& tensor);
};

// Operator fst::save_file. Writes a temporary file, flushes it and moves it to `path`. The arguments are as in
// `describe_file`.
void save_file(at::TensorList tensors, Strings names, const std::string& path, const Metadata& metadata,
               const std::string& permissions_from = "", const OpenEncryptionKey::Optional& key = std::nullopt);

// `torch.classes.fst.FileSave`: save of one file whose tensors are known at the start, and whose values come in parts.
// Only one thread uses it. Dropping it before `close` leaves nothing behind.
class FileSave : public torch::CustomClassHolder {
 public:
  // The values of `likes` are not read, and may be on meta. The other arguments are as in `describe_file`.
  FileSave(const std::string& path, Strings names, const std::vector<at::Tensor>& likes, const Metadata& metadata,
           const std::string& permissions_from, const OpenEncryptionKey::Optional& key);
  ~FileSave() override;

  // Returns the position in `names` of each tensor, in the order of the file.
  std::vector<int64_t> order() { return {save().order.begin(), save().order.end()}; }

  // Writes the next values of the file: contiguous tensors on the CPU.
  void append(const std::vector<at::Tensor>& parts);

  // Flushes the file and moves it to its path, or discards it. Does nothing if called again.
  void close(bool discards);

 private:
  NewSave& save();

  const pid_t process_ = getpid();
  const DeviceStreams streams_ = DeviceStreams::of_cpu();
  // Empty after `close`.
  std::optional<NewSave> save_;
};

// `torch.classes.fst.CheckpointSave`: files of a checkpoint that a save replaces.
class CheckpointSave : public torch::CustomClassHolder {
 public:
  const SavedFiles& core() const { return *files_; }

 private:
  const rust::Box<SavedFiles> files_ = saved_files();
};

// Operator fst::serialize. Returns the bytes of the file that `save_file` would write, on the CPU. If a tensor is on
// the meta device, the result is a meta tensor of the same size.
at::Tensor serialize(at::TensorList tensors, Strings names, const Metadata& metadata);

}  // namespace fst
