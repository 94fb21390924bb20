#include "cipher.h"

#include "error.h"

namespace fst {

namespace {

void check(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || !tensor.is_contiguous()) {
    throw_invalid_argument("a cipher takes contiguous tensors on the CPU");
  }
}

rust::Slice<const uint8_t> bytes_of(const at::Tensor& tensor) {
  check(tensor);
  return {static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes()};
}

rust::Slice<uint8_t> mutable_bytes_of(const at::Tensor& tensor) {
  check(tensor);
  return {static_cast<uint8_t*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

}  // namespace

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
