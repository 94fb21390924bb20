#include "encryption_key.h"

#include <utility>

#include "error.h"
#include "memory.h"

namespace fst {

namespace {

rust::Slice<const uint8_t> key_bytes_of(const at::Tensor& tensor) {
  check_vector("a key", tensor, at::kByte);
  return bytes_of(tensor);
}

}  // namespace

OpenEncryptionKey::OpenEncryptionKey(const at::Tensor& secret, const std::string& label,
                                     const std::vector<int64_t>& limits, const std::optional<at::Tensor>& salt)
    : OpenEncryptionKey(call_core([&] {
        return encryption_key(key_bytes_of(secret), to_rust(label), slice_of(limits),
                              salt ? bytes_of(*salt) : rust::Slice<const uint8_t>());
      })) {}

OpenEncryptionKey::OpenEncryptionKey(rust::Box<EncryptionKey> key) : key_(std::move(key)) {}

c10::intrusive_ptr<OpenEncryptionKey> OpenEncryptionKey::of_file(const std::string& path, const std::string& label) {
  return c10::make_intrusive<OpenEncryptionKey>(call_core([&] { return key_of_file(to_rust(path), to_rust(label)); }));
}

c10::intrusive_ptr<OpenEncryptionKey> OpenEncryptionKey::for_save() const {
  return c10::make_intrusive<OpenEncryptionKey>(call_core([&] { return key_for_save(*key_); }));
}

bool OpenEncryptionKey::rotate(const std::string& path, const c10::intrusive_ptr<OpenEncryptionKey>& key,
                               int64_t limit_ms) const {
  return call_core([&] { return rotate_key(to_rust(path), *key_, key->key(), limit_ms); });
}

void OpenEncryptionKey::derive(const at::Tensor& string, const std::vector<int64_t>& limits, const at::Tensor& salt,
                               const at::Tensor& key) {
  call_core([&] { derive_key(bytes_of(string), slice_of(limits), bytes_of(salt), mutable_bytes_of(key)); });
}

}  // namespace fst
