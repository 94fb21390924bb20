#include "version.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <pthread.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "error.h"

namespace fst {

namespace {

struct Contents {
  // A weak reference keeps the address from being used again.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  Version version;
  bool is_torn = false;
  uint64_t writes = 0;
};

class Registry {
 public:
  Registry() {
    // A child that is forked while another thread holds the lock would wait for it forever.
    pthread_atfork([] { instance.mutex_.lock(); }, [] { instance.mutex_.unlock(); }, [] { instance.mutex_.unlock(); });
  }

  // Calls a function with the contents of each tensor, which are new or null if they are unknown. Then calls `finish`
  // under the same lock.
  void visit(
      at::TensorList tensors, bool is_created, const std::function<void(size_t, Contents*)>& use,
      const std::function<void()>& finish = [] {}) {
    const std::scoped_lock lock(mutex_);
    for (size_t index = 0; index < tensors.size(); ++index) {
      if (tensors[index].defined() && tensors[index].has_storage()) {
        use(index, find(tensors[index].storage(), is_created));
      }
    }
    finish();
  }

 private:
  static Registry instance;

  Contents* find(const c10::Storage& storage, bool is_created) {
    c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
    const auto found = contents_.find(key);
    if (found != contents_.end() || !is_created) {
      return found == contents_.end() ? nullptr : &found->second;
    }
    if (contents_.size() >= size_max_) {
      std::erase_if(contents_, [](const auto& entry) { return entry.second.storage.expired(); });
      size_max_ = std::max(kSizeMin, 2 * contents_.size());
    }
    Contents contents{.storage = storage.getWeakStorageImpl(), .version = {}};
    return &contents_.emplace(key, std::move(contents)).first->second;
  }

  // Number of entries from which on entries of freed storages are removed.
  static constexpr size_t kSizeMin = 1024;

  friend Registry& registry();

  std::mutex mutex_;
  size_t size_max_ = kSizeMin;
  std::unordered_map<c10::StorageImpl*, Contents> contents_;
};

Registry Registry::instance;

Registry& registry() { return Registry::instance; }

std::string quoted(const Version& version) { return version ? '"' + *version + '"' : "no version"; }

}  // namespace

Version version_of(at::TensorList tensors, const std::optional<std::vector<std::string>>& names) {
  const auto describe = [&](size_t index) {
    return names && index < names->size() ? "tensor \"" + (*names)[index] + '"'
                                          : c10::str("tensor ", index, " of ", tensors.size());
  };
  std::optional<std::pair<size_t, Version>> first;
  std::string problem;
  registry().visit(tensors, false, [&](size_t index, const Contents* contents) {
    const Version version = contents == nullptr ? Version() : contents->version;
    if (contents != nullptr && contents->is_torn) {
      problem =
          describe(index) +
          " may hold a mixture of two versions, because an update that is not atomic is writing, or failed while it "
          "wrote; wait for it, or load or update all tensors again";
    } else if (!first) {
      first.emplace(index, version);
    } else if (first->second != version && problem.empty()) {
      problem = describe(first->first) + " has " + quoted(first->second) + ", but " + describe(index) + " has " +
                quoted(version) + "; update or load all of them, or call set_version";
    }
  });
  if (!problem.empty()) {
    throw_version_conflict(problem);
  }
  return first ? first->second : Version();
}

void set_version(at::TensorList tensors, const Version& version) {
  registry().visit(tensors, true, [&](size_t, Contents* contents) {
    contents->version = version;
    contents->is_torn = false;
    ++contents->writes;
  });
}

void mark_torn(at::TensorList tensors) {
  registry().visit(tensors, true, [](size_t, Contents* contents) {
    contents->is_torn = true;
    ++contents->writes;
  });
}

void forget_version(at::TensorList tensors) {
  registry().visit(tensors, false, [](size_t, Contents* contents) {
    if (contents != nullptr) {
      contents->version.reset();
      contents->is_torn = false;
      ++contents->writes;
    }
  });
}

std::vector<uint64_t> writes_of(at::TensorList tensors) {
  std::vector<uint64_t> writes(tensors.size());
  // Known from now on, so that later loads are counted.
  registry().visit(tensors, true, [&](size_t index, const Contents* contents) { writes[index] = contents->writes; });
  return writes;
}

std::optional<size_t> begin_write(at::TensorList tensors, std::vector<uint64_t>& writes) {
  std::optional<size_t> differing;
  std::vector<Contents*> visited(tensors.size());
  const auto compare = [&](size_t index, Contents* contents) {
    visited[index] = contents;
    if (!differing && contents->writes != writes[index]) {
      differing = index;
    }
  };
  registry().visit(tensors, true, compare, [&] {
    // Several tensors may have one storage, and the addresses of contents do not change.
    for (size_t index = 0; !differing && index < visited.size(); ++index) {
      if (visited[index] != nullptr) {
        ++visited[index]->writes;
      }
    }
    for (size_t index = 0; !differing && index < visited.size(); ++index) {
      if (visited[index] != nullptr) {
        writes[index] = visited[index]->writes;
      }
    }
  });
  return differing;
}

}  // namespace fst
