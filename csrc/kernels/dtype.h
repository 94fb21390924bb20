// Dtypes that take part in casts. tests/rust/dtype.rs compares this file with rust/dtype.rs, where the facts are
// stated.
#pragma once

#include <cstdint>

namespace fst {

// Values of c10::ScalarType.
enum Dtype : uint8_t {
  U8 = 0,
  I8 = 1,
  I16 = 2,
  I32 = 3,
  I64 = 4,
  F16 = 5,
  F32 = 6,
  F64 = 7,
  BOOL = 11,
  BF16 = 15,
  F8_E5M2 = 23,
  F8_E4M3 = 24,
  F8_E5M2FNUZ = 25,
  F8_E4M3FNUZ = 26,
  U16 = 27,
  U32 = 28,
  U64 = 29,
  F8_E8M0 = 44,
};

// Bit layout of an 8-bit float with a sign. Codes without the sign are finite below FINITE_END.
template <int MANTISSA, int EXPONENT_BIAS, uint32_t END>
struct Float8Layout {
  static constexpr int MANTISSA_BITS = MANTISSA;
  static constexpr int BIAS = EXPONENT_BIAS;
  static constexpr uint32_t FINITE_END = END;
};

template <Dtype DTYPE>
struct Float8;
template <>
struct Float8<F8_E5M2> : Float8Layout<2, 15, 0x7C> {};
template <>
struct Float8<F8_E4M3> : Float8Layout<3, 7, 0x7F> {};
template <>
struct Float8<F8_E5M2FNUZ> : Float8Layout<2, 16, 0x80> {};
template <>
struct Float8<F8_E4M3FNUZ> : Float8Layout<3, 8, 0x80> {};

}  // namespace fst
