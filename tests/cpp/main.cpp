// Every function of the installed header, against PyTorch's own: header CHECKPOINT SCRATCH_DIRECTORY. The checkpoint
// holds "a", F32 of shape [4, 6], "b", BF16 of shape [6], and "c", I64 of shape [2, 3], and metadata {"format": "pt"}.
// The first thing that is not as it should be ends the program with an error.

#include <ATen/Functions.h>
#include <fst/fst.h>

#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

const fst::Strings kNames = {"a", "b", "c"};

void check(bool is_so, const std::string& what) {
  if (!is_so) {
    throw std::runtime_error(what);
  }
}

bool is_same(const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() == b.scalar_type() && at::equal(a, b); }

// The call throws an exception of this class, and its text begins with the code.
template <typename Exception>
void check_throws(const std::string& code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Exception& error) {
    const std::string text = error.what_without_backtrace();
    check(text.starts_with("[" + code + "] "), "the wrong code: " + text);
    return;
  }
  check(false, "no error " + code);
}

fst::Tensors check_whole(const fst::Strings& paths) {
  const fst::Tensors all = fst::load_file(paths[0]);
  fst::Strings names;
  for (const auto& entry : all) {
    names.push_back(entry.key());
  }
  check(names == kNames && fst::tensor_names(paths) == kNames, "names in the order of the file");
  check(all.at("a").sizes() == at::IntArrayRef({4, 6}) && all.at("b").scalar_type() == at::kBFloat16, "what is stored");
  check(fst::metadata(paths[0]).at("format") == "pt", "metadata");
  for (const auto& entry : fst::load_files(paths)) {
    check(is_same(entry.value(), all.at(entry.key())), "load_files");
  }
  check(fst::load_file(paths[0], at::kMeta).at("a").is_meta(), "headers only");
  return all;
}

void check_parts(const fst::Strings& paths, const fst::Tensors& all) {
  const auto named = fst::load_tensors(paths, {"c", "a"}, at::kCPU, at::kHalf);
  check(named.size() == 2 && is_same(named[0], all.at("c")), "an integer keeps its dtype");
  check(is_same(named[1], all.at("a").to(at::kHalf)), "load_tensors with a dtype");
  const auto slices = fst::load_slices(paths, {{"a", 1, 2, 3}, {"b", -1, 0, 1}});
  check(is_same(slices.at(0), all.at("a").narrow(1, 2, 3)), "columns");
  check(is_same(slices.at(1), all.at("b").narrow(0, 0, 1)), "rows");
  const at::Tensor into = at::zeros({6, 4}).t();
  const void* address = into.data_ptr();
  fst::load_into(paths, {"a"}, {into});
  check(is_same(into, all.at("a")) && into.data_ptr() == address, "load_into");
}

void check_conversions(const fst::Tensors& all) {
  const auto cast = fst::cast({all.at("a"), all.at("b")}, at::kHalf);
  check(is_same(cast.at(0), all.at("a").to(at::kHalf)) && is_same(cast.at(1), all.at("b").to(at::kHalf)), "cast");
  const at::Tensor bytes = at::arange(32, at::kByte);
  const auto scattered = fst::scatter(bytes, {{0, at::kShort, {2, 3}}, {16, at::kByte, {4}}});
  check(is_same(scattered.at(0), bytes.narrow(0, 0, 12).view(at::kShort).view({2, 3})), "scatter");
  check(is_same(scattered.at(1), bytes.narrow(0, 16, 4)), "scatter behind a gap");
}

void check_saved(const std::string& directory, const fst::Tensors& all) {
  const std::string path = directory + "/saved.safetensors";
  fst::Texts metadata;
  metadata.insert("step", "7");
  fst::save_file({all.at("b"), all.at("c")}, {"b", "c"}, path, metadata);
  const fst::Tensors saved = fst::load_file(path);
  check(saved.size() == 2 && is_same(saved.at("b"), all.at("b")) && is_same(saved.at("c"), all.at("c")), "save_file");
  check(fst::metadata(path).at("step") == "7", "metadata of a saved file");
  fst::save_file({all.at("a")}, {"a"}, path);
  check(fst::tensor_names({path}) == fst::Strings{"a"} && fst::metadata(path).empty(), "a file that is replaced");
}

void check_loader(const fst::Strings& paths, const fst::Tensors& all) {
  fst::Loader loader(paths);
  check(loader.size() == 3 && loader.total_bytes() == 96 + 12 + 48, "what a loader will hand over");
  for (int64_t index = 0; index < 3; ++index) {
    const auto item = loader.next();
    check(item && item->index == index && item->name == kNames[index], "in the order of the file");
    check(is_same(item->tensor, all.at(item->name)), "a tensor of a loader");
  }
  check(!loader.next(), "a loader ends");

  fst::LoaderOptions options{.names = fst::Strings{"b", "a"}, .dtype = at::kDouble, .window_bytes = 1};
  options.order = fst::Order::kLanded;
  fst::Loader some(paths, at::kCPU, options);
  check(some.total_bytes() == 192 + 48, "bytes of what is named, as it is wanted");
  const auto item = some.next();
  check(item && is_same(item->tensor, all.at(item->name).to(at::kDouble)), "a loader with options");
  check(options.names->at(item->index) == item->name, "an index among the names");
  some.close();
  check(!some.next(), "a loader that is closed");
}

void check_errors(const fst::Strings& paths, const std::string& directory) {
  const std::string missing = directory + "/missing.safetensors";
  check_throws<c10::Error>("file-not-found", [&] { fst::load_file(missing); });
  check_throws<c10::IndexError>("tensor-not-found", [&] { fst::load_tensors(paths, {"d"}); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::load_slices(paths, {{"a", 0, 3, 2}}); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::load_into(paths, {"a"}, {at::zeros({4, 5})}); });
  check_throws<c10::ValueError>("duplicate-tensor", [&] { fst::load_files({paths[0], paths[0]}); });
  check_throws<c10::ValueError>("invalid-argument", [&] { fst::Loader(paths, at::kCPU, {.window_bytes = 0}); });
}

}  // namespace

int main(int, char** argv) {
  const fst::Strings paths = {argv[1]};
  const std::string directory = argv[2];
  try {
    const fst::Tensors all = check_whole(paths);
    check_parts(paths, all);
    check_conversions(all);
    check_saved(directory, all);
    check_loader(paths, all);
    check_errors(paths, directory);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  std::cout << "all as it should be\n";
  return 0;
}
