// Compares every cast of csrc/kernels/convert.h with PyTorch's cast, bit by bit. Covers all values of sources of up to
// 16 bits. Of wider sources, covers the values around all rounding boundaries. Prints the number of compared values.
#include "kernels/convert.h"

#include <c10/util/TypeCast.h>

#include <bit>
#include <cstdlib>
#include <iostream>
#include <random>
#include <type_traits>
#include <vector>

namespace {

uint64_t compared = 0;

template <fst::Dtype DTYPE>
struct Torch {
  using Type = fst::BitsOf<DTYPE>;
};
template <>
struct Torch<fst::BOOL> {
  using Type = bool;
};
template <>
struct Torch<fst::F16> {
  using Type = c10::Half;
};
template <>
struct Torch<fst::BF16> {
  using Type = c10::BFloat16;
};
template <>
struct Torch<fst::F8_E4M3> {
  using Type = c10::Float8_e4m3fn;
};
template <>
struct Torch<fst::F8_E5M2> {
  using Type = c10::Float8_e5m2;
};
template <>
struct Torch<fst::F8_E4M3FNUZ> {
  using Type = c10::Float8_e4m3fnuz;
};
template <>
struct Torch<fst::F8_E5M2FNUZ> {
  using Type = c10::Float8_e5m2fnuz;
};
template <>
struct Torch<fst::F8_E8M0> {
  using Type = c10::Float8_e8m0fnu;
};

template <typename T>
using Unsigned = std::conditional_t<
    sizeof(T) == 1, uint8_t,
    std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

// Returns bit patterns of a type. For up to 16 bits, returns all patterns. Otherwise, combines all exponents with
// mantissas at, just below and just above each power of two and each tie of a narrower type, and adds small and random
// numbers.
template <typename T>
std::vector<Unsigned<T>> patterns() {
  using Bits = Unsigned<T>;
  std::vector<Bits> found;
  constexpr int width = 8 * sizeof(T);
  if constexpr (width <= 16) {
    for (uint32_t bits = 0; bits < uint32_t(1) << width; ++bits) found.push_back(Bits(bits));
  } else {
    constexpr int mantissa = std::is_floating_point_v<T> ? (width == 32 ? 23 : 52) : width - 9;
    std::mt19937_64 random(1);
    for (uint64_t top = 0; top < uint64_t(1) << (width - mantissa); ++top) {
      for (int bit = 0; bit <= mantissa; ++bit) {
        for (Bits above : {Bits(0), Bits(Bits(1) << bit), Bits(~(Bits(0)))}) {
          // Makes the bits from `bit` on even, odd or all ones, with values around the tie below them.
          Bits upper = Bits(above & ~((Bits(1) << bit) - 1) & ((Bits(1) << mantissa) - 1));
          Bits tie = bit == 0 ? 0 : Bits(1) << (bit - 1);
          for (int nudge = -1; nudge <= 1; ++nudge) {
            found.push_back(Bits((Bits(top) << mantissa) + upper + tie + Bits(nudge)));
          }
        }
      }
      for (int i = 0; i < 64; ++i)
        found.push_back(Bits((Bits(top) << mantissa) | (random() & ((Bits(1) << mantissa) - 1))));
    }
    for (Bits bits = 0; bits < 70000; ++bits) {
      found.push_back(bits);
      found.push_back(Bits(0) - bits);
    }
  }
  return found;
}

template <fst::Dtype FROM, fst::Dtype TO>
void compare(const std::vector<Unsigned<fst::BitsOf<FROM>>>& sources) {
  if constexpr (FROM != TO) {
    using From = typename Torch<FROM>::Type;
    using To = typename Torch<TO>::Type;
    using Value = std::conditional_t<TO == fst::F64, double, float>;
    for (auto bits : sources) {
      From from;
      if constexpr (FROM == fst::BOOL) {
        from = bits != 0;
      } else {
        from = std::bit_cast<From>(bits);
      }
      const auto expected = std::bit_cast<Unsigned<To>>(c10::convert<To>(from));
      const auto value = fst::decode<Value, FROM>(std::bit_cast<fst::BitsOf<FROM>>(bits));
      const auto result = std::bit_cast<Unsigned<To>>(fst::encode<TO>(value));
      if (result != expected) {
        std::cerr << "from " << int(FROM) << " to " << int(TO) << std::hex << ": " << uint64_t(bits) << " gives "
                  << uint64_t(result) << ", PyTorch " << uint64_t(expected) << '\n';
        exit(1);
      }
      ++compared;
    }
  }
}

template <fst::Dtype FROM>
void compare_from() {
  const auto sources = patterns<fst::BitsOf<FROM>>();
  compare<FROM, fst::F16>(sources);
  compare<FROM, fst::BF16>(sources);
  compare<FROM, fst::F32>(sources);
  compare<FROM, fst::F64>(sources);
  compare<FROM, fst::F8_E4M3>(sources);
  compare<FROM, fst::F8_E5M2>(sources);
  compare<FROM, fst::F8_E4M3FNUZ>(sources);
  compare<FROM, fst::F8_E5M2FNUZ>(sources);
  compare<FROM, fst::F8_E8M0>(sources);
}

}  // namespace

int main() {
  compare_from<fst::BOOL>();
  compare_from<fst::U8>();
  compare_from<fst::I8>();
  compare_from<fst::U16>();
  compare_from<fst::I16>();
  compare_from<fst::U32>();
  compare_from<fst::I32>();
  compare_from<fst::U64>();
  compare_from<fst::I64>();
  compare_from<fst::F16>();
  compare_from<fst::BF16>();
  compare_from<fst::F32>();
  compare_from<fst::F64>();
  compare_from<fst::F8_E4M3>();
  compare_from<fst::F8_E5M2>();
  compare_from<fst::F8_E4M3FNUZ>();
  compare_from<fst::F8_E5M2FNUZ>();
  compare_from<fst::F8_E8M0>();
  std::cout << compared << '\n';
}
