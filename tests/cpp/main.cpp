// Checks every function of the installed header against PyTorch: header CHECKPOINT SCRATCH_DIRECTORY. The checkpoint
// contains "a", F32 of shape [4, 6]; "b", BF16 of shape [6]; "c", I64 of shape [2, 3]; and the metadata {"format":
// "pt"}. The first failed check ends the program with an error.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fst/fst.h>
#include <torch/library.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <vector>

namespace {

// Called by allocations of more bytes, if it is set.
std::function<void()> refuse_memory;
int64_t accepted_bytes = 0;

at::Tensor allocate_or_refuse(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                              std::optional<at::Layout> layout, std::optional<at::Device> device,
                              std::optional<bool> is_pinned, std::optional<at::MemoryFormat> format) {
  const auto bytes = c10::multiply_integers(size) * static_cast<int64_t>(c10::elementSize(dtype.value_or(at::kFloat)));
  if (refuse_memory && bytes > accepted_bytes) {
    refuse_memory();
  }
  return at::detail::empty_cpu(size, dtype, layout, device, is_pinned, format);
}

// Takes the place of PyTorch's own function.
TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("empty.memory_format", allocate_or_refuse); }

const fst::Strings kNames = {"a", "b", "c"};

void check(bool condition, const std::string& subject) {
  if (!condition) {
    throw std::runtime_error("failed: " + subject);
  }
}

bool is_same(const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() == b.scalar_type() && at::equal(a, b); }

// Checks that the call throws an exception of exactly this class, and that its text begins with this one.
template <typename Exception>
void check_text(const std::string& begin, const std::function<void()>& call) {
  try {
    call();
  } catch (const Exception& error) {
    const std::string text = error.what_without_backtrace();
    check(typeid(error) == typeid(Exception) && text.starts_with(begin), "wrong class or text: " + text);
    return;
  }
  check(false, "throws " + begin);
}

template <typename Exception>
void check_throws(const std::string& code, const std::function<void()>& call) {
  check_text<Exception>("[" + code + "] ", call);
}

fst::Tensors check_load_file(const fst::Strings& paths) {
  const fst::Tensors all = fst::load_file(paths[0]);
  fst::Strings names;
  for (const auto& entry : all) {
    names.push_back(entry.key());
  }
  check(names == kNames && fst::tensor_names(paths) == kNames, "names in the order of the file");
  fst::release_memory();
  fst::warm_up(at::kCPU);
  check(fst::release_memory() == 0, "nothing to prepare for the CPU");
  check(all.at("a").sizes() == at::IntArrayRef({4, 6}) && all.at("b").scalar_type() == at::kBFloat16,
        "stored shape and dtype");
  check(fst::metadata(paths[0]).at("format") == "pt", "metadata");
  for (const auto& entry : fst::load_files(paths)) {
    check(is_same(entry.value(), all.at(entry.key())), "load_files");
  }
  check(fst::load_file(paths[0], at::kMeta).at("a").is_meta(), "load_file to meta");
  return all;
}

void check_selections(const fst::Strings& paths, const fst::Tensors& all) {
  const auto named = fst::load_tensors(paths, {"c", "a"}, at::kCPU, at::kHalf);
  check(named.size() == 2 && is_same(named[0], all.at("c")), "an integer keeps its dtype");
  check(is_same(named[1], all.at("a").to(at::kHalf)), "load_tensors with a dtype");
  const auto partly = fst::load_file(paths[0], at::kCPU, {{"b", std::nullopt}, {"*", at::kHalf}});
  check(is_same(partly.at("a"), all.at("a").to(at::kHalf)) && is_same(partly.at("b"), all.at("b")),
        "load_file with dtypes by patterns");
  const auto slices = fst::load_slices(paths, {{"a", 1, 2, 3}, {"b", -1, 0, 1}});
  check(is_same(slices.at(0), all.at("a").narrow(1, 2, 3)), "load_slices of columns");
  check(is_same(slices.at(1), all.at("b").narrow(0, 0, 1)), "load_slices of rows");
  const auto regions = fst::load_boxes(paths, {{"a", {{0, 2, 3}, {1, 4}}}, {"b", {{5, 1, 7}}}}, at::kCPU, at::kHalf);
  check(is_same(regions.at(0), all.at("a").slice(0, 0, 4, 3).slice(1, 1, 5).to(at::kHalf)), "load_boxes with steps");
  check(is_same(regions.at(1), all.at("b").slice(0, 5, 6).to(at::kHalf)), "load_boxes of one index");
  const at::Tensor output = at::zeros({6, 4}).t();
  const void* address = output.data_ptr();
  fst::load_into(paths, {"a"}, {output});
  check(is_same(output, all.at("a")) && output.data_ptr() == address, "load_into");
  const fst::Strings rules = {"t = cat(0, transpose(a, 0, 1), transpose(a, 0, 1))"};
  const auto transposed = at::cat({all.at("a").t(), all.at("a").t()});
  check(is_same(fst::load_recipe(paths, {"t"}, rules, at::kCPU, at::kHalf).at(0), transposed.to(at::kHalf)),
        "load_recipe");
  const at::Tensor filled = at::zeros_like(transposed);
  fst::load_recipe_into(paths, {"t"}, rules, {filled});
  check(is_same(filled, transposed), "load_recipe_into");
}

void check_update(const fst::Strings& paths, const fst::Tensors& all) {
  const std::vector<at::Tensor> outputs = {at::zeros({4, 6}), at::zeros({2, 3}, at::kLong)};
  const auto update = fst::prepare_update(paths, {"a", "c"}, outputs, "2");
  check(update.version() == "2" && update.staged_bytes() == 96 + 48, "prepared update");
  check(is_same(outputs[0], at::zeros({4, 6})) && !fst::version_of(outputs), "nothing changes before the commit");
  update.commit();
  check(is_same(outputs[0], all.at("a")) && is_same(outputs[1], all.at("c")), "committed update");
  check(fst::version_of(outputs) == "2" && update.staged_bytes() == 0, "version of updated tensors");
  const auto dropped = fst::prepare_update(paths, {"a"}, {outputs[0]});
  dropped.rollback();
  check_throws<c10::ValueError>("invalid-argument", [&] { dropped.commit(); });
  fst::set_version({outputs[0]}, "3");
  check_throws<c10::ValueError>("version", [&] { fst::version_of(outputs, fst::Strings{"a", "c"}); });
}

void check_conversions(const fst::Tensors& all) {
  const auto cast = fst::cast({all.at("a"), all.at("b")}, at::kHalf);
  check(is_same(cast.at(0), all.at("a").to(at::kHalf)) && is_same(cast.at(1), all.at("b").to(at::kHalf)), "cast");
  const at::Tensor bytes = at::arange(32, at::kByte);
  const auto scattered = fst::scatter(bytes, {{0, at::kShort, {2, 3}}, {16, at::kByte, {4}}});
  check(is_same(scattered.at(0), bytes.narrow(0, 0, 12).view(at::kShort).view({2, 3})), "scatter");
  check(is_same(scattered.at(1), bytes.narrow(0, 16, 4)), "scatter after a gap");
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void check_save(const std::string& directory, const fst::Tensors& all) {
  const std::string path = directory + "/saved.safetensors";
  fst::Texts metadata;
  metadata.insert("step", "7");
  fst::save_file({all.at("b"), all.at("c")}, {"b", "c"}, path, metadata);
  const fst::Tensors saved = fst::load_file(path);
  check(saved.size() == 2 && is_same(saved.at("b"), all.at("b")) && is_same(saved.at("c"), all.at("c")), "save_file");
  check(fst::metadata(path).at("step") == "7", "metadata of a saved file");
  const at::Tensor bytes = fst::serialize({all.at("b"), all.at("c")}, {"b", "c"}, metadata);
  const std::string serialized(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  check(bytes.scalar_type() == at::kByte && serialized == contents(path), "serialize");
  fst::save_file({all.at("a")}, {"a"}, path);
  check(fst::tensor_names({path}) == fst::Strings{"a"} && fst::metadata(path).empty(),
        "save_file over an existing file");
}

fst::Loader::Item next_item(fst::Loader& loader) {
  auto item = loader.next();
  if (!item) {
    throw std::runtime_error("failed: the loader ended early");
  }
  return *std::move(item);
}

void check_loader(const fst::Strings& paths, const fst::Tensors& all) {
  fst::Loader loader(paths);
  check(loader.size() == 3 && loader.total_bytes() == 96 + 12 + 48, "size and bytes of a loader");
  for (int64_t index = 0; index < 3; ++index) {
    const auto item = next_item(loader);
    check(item.index == index && item.name == kNames[index], "order of a loader");
    check(is_same(item.tensor, all.at(item.name)), "tensor of a loader");
  }
  check(!loader.next(), "end of a loader");

  const fst::Strings names = {"b", "a"};
  fst::LoaderOptions options{.names = names, .dtype = at::kDouble, .window_bytes = 1};
  options.order = fst::Order::kReady;
  fst::Loader selected(paths, at::kCPU, options);
  check(selected.total_bytes() == 192 + 48, "bytes of the named tensors in the requested dtype");
  const auto item = next_item(selected);
  check(is_same(item.tensor, all.at(item.name).to(at::kDouble)), "loader with options");
  check(names.at(item.index) == item.name, "index among the names");
  fst::Loader partly(paths, at::kCPU, {.dtype = {{"a*", at::kDouble}}});
  check(partly.total_bytes() == 192 + 12 + 48, "loader with dtypes by patterns");
  selected.close();
  check(!selected.next(), "closed loader");
}

// The directory has a copy of "a" that is encrypted with the key in model.key: the bytes from 0 to 31.
void check_encryption(const std::string& directory, const fst::Tensors& all) {
  const std::string secret = directory + "/secret.safetensors";
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::load_file(secret); });
  std::vector<uint8_t> bytes(32);
  std::iota(bytes.begin(), bytes.end(), uint8_t{0});
  const std::string saved = directory + "/saved.safetensors";
  fst::Texts metadata;
  metadata.insert("fst.encryption", "my models");
  for (const auto& key :
       {fst::EncryptionKey(bytes, "my models"), fst::EncryptionKey::from_file(directory + "/model.key", "my models")}) {
    key.register_key();
    check(is_same(fst::load_file(secret).at("a"), all.at("a")), "encrypted file");
    fst::verify({secret});
    fst::save_file({all.at("b")}, {"b"}, saved, metadata);
    check(is_same(fst::load_file(saved).at("b"), all.at("b")), "save of an encrypted file");
    key.unregister_key();
    check_throws<c10::ValueError>("invalid-argument", [&] { fst::load_file(saved); });
  }
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::load_file(secret); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::save_file({all.at("b")}, {"b"}, saved, metadata); });
}

void check_errors(const fst::Strings& paths, const std::string& directory, const fst::Tensors& all) {
  const std::string missing = directory + "/missing.safetensors";
  check_throws<c10::Error>("file-not-found", [&] { fst::load_file(missing); });
  check_throws<c10::IndexError>("tensor-not-found", [&] { fst::load_tensors(paths, {"d"}); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::load_slices(paths, {{"a", 0, 3, 2}}); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::load_boxes(paths, {{"a", {{0, 2, 4}, {0, 1}}}}); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::load_file(paths[0], at::kCPU, {{"z*", at::kHalf}}); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::serialize({all.at("a")}, {}); });
  check_throws<c10::NotImplementedError>("unsupported-dtype",
                                         [&] { fst::serialize({at::zeros({1}, at::kComplexDouble)}, {"z"}); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::load_into(paths, {"a"}, {at::zeros({4, 5})}); });
  check_throws<c10::ValueError>("duplicate-tensor", [&] { fst::load_files({paths[0], paths[0]}); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::Loader(paths, at::kCPU, {.window_bytes = 0}); });
}

// Only a lack of memory is an OutOfMemoryError, with the file and the tensor. Loads need little memory beside the
// tensors.
void check_memory(const fst::Strings& paths, const std::string& directory) {
  const auto load = [&] { fst::load_tensors(paths, {"a"}, at::kCPU, at::kHalf); };
  refuse_memory = [] { TORCH_CHECK(false, "an illegal memory access was encountered"); };
  check_text<c10::Error>("an illegal", load);
  refuse_memory = [] {
    TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 48 bytes");
  };
  check_text<c10::OutOfMemoryError>("[out-of-memory] " + paths[0] + ": tensor \"a\": needs 48 bytes on cpu", load);
  refuse_memory = nullptr;
  const std::string large = directory + "/large.safetensors";
  const auto values = at::arange(1 << 20).view({1 << 10, 1 << 10}).to(at::kFloat);
  fst::save_file({values}, {"x"}, large);
  // PyTorch copies the elements from scratch memory.
  const at::Tensor output = at::zeros({1 << 10, 1 << 10}).t();
  int refusals = 0;
  refuse_memory = [&] {
    ++refusals;
    C10_THROW_ERROR(OutOfMemoryError, "no room");
  };
  accepted_bytes = 1 << 20;
  fst::load_into({large}, {"x"}, {output});
  check(refusals == 1 && is_same(output, values), "load with little memory");
  accepted_bytes = 0;
  check_text<c10::OutOfMemoryError>("[out-of-memory] " + large + ": tensor \"x\": needs ",
                                    [&] { fst::load_into({large}, {"x"}, {output}); });
  refuse_memory = nullptr;
}

}  // namespace

int main(int, char** argv) {
  const fst::Strings paths = {argv[1]};
  const std::string directory = argv[2];
  try {
    const fst::Tensors all = check_load_file(paths);
    check_selections(paths, all);
    check_update(paths, all);
    check_conversions(all);
    check_save(directory, all);
    check_loader(paths, all);
    check_encryption(directory, all);
    check_errors(paths, directory, all);
    check_memory(paths, directory);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  std::cout << "all checks passed\n";
  return 0;
}
