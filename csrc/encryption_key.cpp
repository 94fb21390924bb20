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

OpenEncryptionKey::OpenEncryptionKey(const at::Tensor& key, const std::string& label)
    : OpenEncryptionKey(call_core([&] { return encryption_key(key_bytes_of(key), to_rust(label)); })) {}

OpenEncryptionKey::OpenEncryptionKey(rust::Box<EncryptionKey> key) : key_(std::move(key)) {}

c10::intrusive_ptr<OpenEncryptionKey> OpenEncryptionKey::of_passphrase(const at::Tensor& passphrase, int64_t passes,
                                                                       int64_t memory_bytes, const std::string& label) {
  return c10::make_intrusive<OpenEncryptionKey>(call_core([&] {
    return key_of_passphrase(key_bytes_of(passphrase), static_cast<uint64_t>(passes),
                             static_cast<uint64_t>(memory_bytes), to_rust(label));
  }));
}

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

OpenCipher::OpenCipher(const at::Tensor& key, const at::Tensor& salt, int64_t opslimit, int64_t memlimit)
    : cipher_(call_core([&] {
        return new_cipher(bytes_of(key), bytes_of(salt), static_cast<uint64_t>(opslimit),
                          static_cast<uint64_t>(memlimit));
      })) {}

void OpenCipher::derive(const at::Tensor& string, const at::Tensor& salt, int64_t opslimit, int64_t memlimit,
                        const at::Tensor& key) {
  call_core([&] {
    derive_key(bytes_of(string), bytes_of(salt), static_cast<uint64_t>(opslimit), static_cast<uint64_t>(memlimit),
               mutable_bytes_of(key));
  });
}

}  // namespace fst
