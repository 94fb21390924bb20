// Casts of one element, bit for bit as in PyTorch's CUDA build.
//
// Every value passes through float, as in c10::convert, with two exceptions: a double target takes integers and floats
// directly, and a double source is rounded to float first. Where c10 uses a GPU instruction, this file does too.
// Elsewhere it computes the same bits by integer and float arithmetic.
//
// On the host, this code gives the bits of c10 on the host. The two builds of c10 differ in NaNs only:
//   - To F16: the host keeps the sign (0x7E00, 0xFE00), the GPU gives 0x7FFF.
//   - To BF16: the host and compute capability 7.5 give 0x7FC0, compute capability 8.0 and later give 0x7FFF.
//   - From F16 and F8_E5M2, and between F32 and F64: the host keeps the payload, the GPU may not.
// PyTorch's CPU kernels are vectorized and differ from both in the payloads of F16 NaNs.
#pragma once

#include <cstdint>
#include <cstring>

#include "dtype.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FST_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FST_HOST_DEVICE inline
#endif

namespace fst {

template <typename To, typename From>
FST_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "types must have the same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

FST_HOST_DEVICE float float_of_bits(uint32_t bits) { return bits_as<float>(bits); }

FST_HOST_DEVICE uint32_t bits_of_float(float value) { return bits_as<uint32_t>(value); }

// Returns 2 to a normal exponent of float.
FST_HOST_DEVICE float power_of_two(int exponent) { return float_of_bits(uint32_t(exponent + 127) << 23); }

// Returns the value of a finite 8-bit float with a sign.
template <Dtype DTYPE>
FST_HOST_DEVICE float from_float8(uint32_t bits) {
  using Format = Float8<DTYPE>;
  uint32_t magnitude = bits & 0x7F;
  bool is_normal = magnitude >> Format::MANTISSA_BITS;
  float value = is_normal
                    ? float_of_bits((magnitude << (23 - Format::MANTISSA_BITS)) + (uint32_t(127 - Format::BIAS) << 23))
                    : float(magnitude) * power_of_two(1 - Format::BIAS - Format::MANTISSA_BITS);
  return float_of_bits(bits_of_float(value) | (bits & 0x80) << 24);
}

// Rounds the magnitude of a float to a narrow float, to nearest with ties to even, as if the exponent of the narrow
// float were unbounded. Infinity, NaN and values out of range become codes above the largest finite one.
template <int MANTISSA_BITS, int BIAS>
FST_HOST_DEVICE uint32_t round_magnitude(uint32_t magnitude) {
  const uint32_t rebias = uint32_t(127 - BIAS) << MANTISSA_BITS;
  if (magnitude >> 23 <= 127 - BIAS) {
    // One unit in the last place of this power of two is the smallest subnormal, so the addition rounds.
    float unit = power_of_two(24 - BIAS - MANTISSA_BITS);
    return bits_of_float(float_of_bits(magnitude) + unit) - bits_of_float(unit);
  }
  const int dropped = 23 - MANTISSA_BITS;
  uint32_t half_and_tie = (uint32_t(1) << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
  return ((magnitude + half_and_tie) >> dropped) - rebias;
}

template <Dtype DTYPE>
FST_HOST_DEVICE uint32_t round_to_float8(uint32_t magnitude) {
  return round_magnitude<Float8<DTYPE>::MANTISSA_BITS, Float8<DTYPE>::BIAS>(magnitude);
}

// Decodes F16 by arithmetic. c10 does so on the GPU too for F8_E5M2, which is the upper half of an F16.
FST_HOST_DEVICE float from_half(uint32_t bits) {
  uint32_t magnitude = bits & 0x7FFF;
  // Maps the exponent of infinity to float's. The factor corrects all other exponents.
  float value = magnitude >> 10 ? float_of_bits((magnitude << 13) + (uint32_t(255 - 31) << 23)) * power_of_two(-112)
                                : float(magnitude) * power_of_two(-24);
  return float_of_bits(bits_of_float(value) | (bits & 0x8000) << 16);
}

FST_HOST_DEVICE uint16_t half_of_float(float value) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half(value));
#else
  uint32_t bits = bits_of_float(value);
  uint32_t sign = bits >> 16 & 0x8000;
  uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return uint16_t(sign | 0x7E00);
  uint32_t rounded = round_magnitude<10, 15>(magnitude);
  return uint16_t(sign | (rounded < 0x7C00 ? rounded : 0x7C00));
#endif
}

FST_HOST_DEVICE float float_of_half(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(bits));
#else
  return from_half(bits);
#endif
}

FST_HOST_DEVICE uint16_t bfloat_of_float(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __bfloat16_as_ushort(__float2bfloat16(value));
#else
  uint32_t bits = bits_of_float(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
#endif
}

FST_HOST_DEVICE float float_of_bfloat(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  return __bfloat162float(__ushort_as_bfloat16(bits));
#else
  return float_of_bits(uint32_t(bits) << 16);
#endif
}

// Storage type of a dtype, with conversions to and from arithmetic types.
template <Dtype DTYPE>
struct Format;

template <typename T>
struct Number {
  using Bits = T;
  static FST_HOST_DEVICE T value(T bits) { return bits; }
  static FST_HOST_DEVICE T of(T value) { return value; }
};

#define FST_NUMBER(DTYPE, TYPE) \
  template <>                   \
  struct Format<DTYPE> : Number<TYPE> {};
FST_NUMBER(U8, uint8_t)
FST_NUMBER(I8, int8_t)
FST_NUMBER(U16, uint16_t)
FST_NUMBER(I16, int16_t)
FST_NUMBER(U32, uint32_t)
FST_NUMBER(I32, int32_t)
FST_NUMBER(U64, uint64_t)
FST_NUMBER(I64, int64_t)
FST_NUMBER(F32, float)
FST_NUMBER(F64, double)
#undef FST_NUMBER

template <>
struct Format<BOOL> {
  using Bits = uint8_t;
  static FST_HOST_DEVICE uint8_t value(uint8_t bits) { return bits != 0; }
};

template <>
struct Format<F16> {
  using Bits = uint16_t;
  static FST_HOST_DEVICE float value(uint16_t bits) { return float_of_half(bits); }
  static FST_HOST_DEVICE uint16_t of(float value) { return half_of_float(value); }
};

template <>
struct Format<BF16> {
  using Bits = uint16_t;
  static FST_HOST_DEVICE float value(uint16_t bits) { return float_of_bfloat(bits); }
  static FST_HOST_DEVICE uint16_t of(float value) { return bfloat_of_float(value); }
};

// Has no infinity. Values out of range become NaN.
template <>
struct Format<F8_E4M3> {
  using Bits = uint8_t;
  static FST_HOST_DEVICE float value(uint8_t bits) {
    bool is_nan = (bits & 0x7F) == 0x7F;
    return is_nan ? float_of_bits(0x7FF00000 | uint32_t(bits & 0x80) << 24) : from_float8<F8_E4M3>(bits);
  }
  static FST_HOST_DEVICE uint8_t of(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = round_to_float8<F8_E4M3>(bits & 0x7FFFFFFF);
    return uint8_t((rounded < Float8<F8_E4M3>::FINITE_END ? rounded : 0x7F) | (bits >> 24 & 0x80));
  }
};

// Has infinity and NaN as the wider formats do.
template <>
struct Format<F8_E5M2> {
  using Bits = uint8_t;
  static FST_HOST_DEVICE float value(uint8_t bits) { return from_half(uint32_t(bits) << 8); }
  static FST_HOST_DEVICE uint8_t of(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t magnitude = bits & 0x7FFFFFFF;
    uint32_t rounded = round_to_float8<F8_E5M2>(magnitude);
    uint32_t limited = magnitude > 0x7F800000 ? 0x7F : rounded < Float8<F8_E5M2>::FINITE_END ? rounded : 0x7C;
    return uint8_t(limited | (bits >> 24 & 0x80));
  }
};

// Has neither infinity nor negative zero: the code of the latter is the only NaN. Values out of range become NaN.
template <Dtype DTYPE>
struct UnsignedZero {
  using Bits = uint8_t;
  static FST_HOST_DEVICE float value(uint8_t bits) {
    return bits == 0x80 ? float_of_bits(0x7F800001) : from_float8<DTYPE>(bits);
  }
  static FST_HOST_DEVICE uint8_t of(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = round_to_float8<DTYPE>(bits & 0x7FFFFFFF);
    if (rounded == 0) return 0;
    return rounded < Float8<DTYPE>::FINITE_END ? uint8_t(rounded | (bits >> 24 & 0x80)) : uint8_t(0x80);
  }
};

template <>
struct Format<F8_E4M3FNUZ> : UnsignedZero<F8_E4M3FNUZ> {};
template <>
struct Format<F8_E5M2FNUZ> : UnsignedZero<F8_E5M2FNUZ> {};

// Has an exponent only. The sign is dropped, and infinity becomes NaN.
template <>
struct Format<F8_E8M0> {
  using Bits = uint8_t;
  static FST_HOST_DEVICE float value(uint8_t bits) {
    return float_of_bits(bits == 0 ? 0x00400000 : bits == 0xFF ? 0x7F800001 : uint32_t(bits) << 23);
  }
  static FST_HOST_DEVICE uint8_t of(float value) {
    uint32_t exponent = bits_of_float(value) >> 23 & 0xFF;
    uint32_t mantissa = bits_of_float(value) & 0x7FFFFF;
    if (exponent == 0xFF) return 0xFF;
    // Ties round up to the next power of two, except below 2^-127, the smallest number.
    bool is_up = mantissa > 0x400000 || (mantissa == 0x400000 && exponent > 0);
    return uint8_t(exponent + is_up);
  }
};

template <Dtype DTYPE>
using BitsOf = typename Format<DTYPE>::Bits;

template <typename To, typename From>
FST_HOST_DEVICE To convert_number(From value) {
  return static_cast<To>(value);
}

#if defined(__CUDA_ARCH__)
// Written as an instruction, which makes a signaling NaN quiet. The compiler would not: it converts the NaNs that
// formats have as constants, and keeps them signaling.
template <>
FST_HOST_DEVICE double convert_number<double, float>(float value) {
  double converted;
  asm("cvt.f64.f32 %0, %1;" : "=d"(converted) : "f"(value));
  return converted;
}
#endif

// Converts a source element to the intermediate type: double if the target is F64, float otherwise.
template <typename Value, Dtype FROM>
FST_HOST_DEVICE Value decode(BitsOf<FROM> bits) {
  return convert_number<Value>(Format<FROM>::value(bits));
}

template <Dtype TO, typename Value>
FST_HOST_DEVICE BitsOf<TO> encode(Value value) {
  return Format<TO>::of(value);
}

}  // namespace fst
