#include "cipher.h"

#include "error.h"
#include "memory.h"

namespace fst {

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
