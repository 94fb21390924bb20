// One element from one dtype to another, bit for bit as PyTorch's CUDA build casts it.
//
// Every value passes through float on its way, as in c10::convert, except that a double target takes integers and
// floats directly and a double source is rounded to float first. Where c10 uses an instruction of the GPU, so does
// this file; elsewhere it computes the same bits by integer and float arithmetic.
//
// Compiled for the host it gives the bits of c10 there. The two differ in NaNs only, as they do within PyTorch:
//   - to F16, the host keeps the sign (0x7E00, 0xFE00) and the GPU gives 0x7FFF;
//   - to BF16, the host gives 0x7FC0, and so does compute capability 7.5; from 8.0 on it is 0x7FFF;
//   - from F16 and F8_E5M2, and between F32 and F64, the host keeps the payload and the GPU may not.
// The CPU kernels of PyTorch are vectorised and differ from both in the payloads of F16 NaNs.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FST_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FST_HOST_DEVICE inline
#endif

namespace fst {

// The values of c10::ScalarType that take part in casts.
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

template <typename To, typename From>
FST_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

FST_HOST_DEVICE float float_of_bits(uint32_t bits) { return bits_as<float>(bits); }

FST_HOST_DEVICE uint32_t bits_of_float(float value) { return bits_as<uint32_t>(value); }

// 2 to a power between the smallest and the largest normal exponent of float.
FST_HOST_DEVICE float power_of_two(int exponent) { return float_of_bits(uint32_t(exponent + 127) << 23); }

// A finite float of 8 bits with a sign, MANTISSA bits of mantissa and this exponent bias.
template <int MANTISSA, int BIAS>
FST_HOST_DEVICE float from_small(uint32_t bits) {
  uint32_t magnitude = bits & 0x7F;
  bool is_normal = magnitude >> MANTISSA;
  float value = is_normal ? float_of_bits((magnitude << (23 - MANTISSA)) + (uint32_t(127 - BIAS) << 23))
                          : float(magnitude) * power_of_two(1 - BIAS - MANTISSA);
  return float_of_bits(bits_of_float(value) | (bits & 0x80) << 24);
}

// The magnitude of a float, rounded to the nearest value of such a format with ties to even, as if the format had no
// end: infinity, NaN and what is too large come out as some number above its largest one.
template <int MANTISSA, int BIAS>
FST_HOST_DEVICE uint32_t to_small(uint32_t magnitude) {
  const uint32_t rebias = uint32_t(127 - BIAS) << MANTISSA;
  if (magnitude >> 23 <= 127 - BIAS) {
    // The unit of this power of two is the smallest number of the format, so that the addition does the rounding.
    float unit = power_of_two(24 - BIAS - MANTISSA);
    return bits_of_float(float_of_bits(magnitude) + unit) - bits_of_float(unit);
  }
  const int dropped = 23 - MANTISSA;
  uint32_t half_and_tie = (uint32_t(1) << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
  return ((magnitude + half_and_tie) >> dropped) - rebias;
}

// F16 by arithmetic. c10 uses it on the GPU too for F8_E5M2, which is the upper half of an F16.
FST_HOST_DEVICE float from_half(uint32_t bits) {
  uint32_t magnitude = bits & 0x7FFF;
  // The exponent of infinity becomes float's, and the factor puts all others where they belong.
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
  uint32_t rounded = to_small<10, 15>(magnitude);
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

// For each dtype the type that holds its bits, their value as a number of C++, and the bits of a number.
template <Dtype DTYPE>
struct Format;

template <typename T>
struct Number {
  using Bits = T;
  static FST_HOST_DEVICE T value(T bits) { return bits; }
  static FST_HOST_DEVICE T of(T value) { return value; }
};

template <>
struct Format<U8> : Number<uint8_t> {};
template <>
struct Format<I8> : Number<int8_t> {};
template <>
struct Format<U16> : Number<uint16_t> {};
template <>
struct Format<I16> : Number<int16_t> {};
template <>
struct Format<U32> : Number<uint32_t> {};
template <>
struct Format<I32> : Number<int32_t> {};
template <>
struct Format<U64> : Number<uint64_t> {};
template <>
struct Format<I64> : Number<int64_t> {};
template <>
struct Format<F32> : Number<float> {};
template <>
struct Format<F64> : Number<double> {};

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

// No infinity; what is too large becomes NaN.
template <>
struct Format<F8_E4M3> {
  using Bits = uint8_t;
  static FST_HOST_DEVICE float value(uint8_t bits) {
    bool is_nan = (bits & 0x7F) == 0x7F;
    return is_nan ? float_of_bits(0x7FF00000 | uint32_t(bits & 0x80) << 24) : from_small<3, 7>(bits);
  }
  static FST_HOST_DEVICE uint8_t of(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = to_small<3, 7>(bits & 0x7FFFFFFF);
    return uint8_t((rounded < 0x7F ? rounded : 0x7F) | (bits >> 24 & 0x80));
  }
};

// What is too large becomes infinity.
template <>
struct Format<F8_E5M2> {
  using Bits = uint8_t;
  static FST_HOST_DEVICE float value(uint8_t bits) { return from_half(uint32_t(bits) << 8); }
  static FST_HOST_DEVICE uint8_t of(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t magnitude = bits & 0x7FFFFFFF;
    uint32_t rounded = to_small<2, 15>(magnitude);
    uint32_t limited = magnitude > 0x7F800000 ? 0x7F : rounded < 0x7C ? rounded : 0x7C;
    return uint8_t(limited | (bits >> 24 & 0x80));
  }
};

// No infinity and no negative zero, whose bits mean NaN; what is too large becomes NaN.
template <int MANTISSA, int BIAS>
struct UnsignedZero {
  using Bits = uint8_t;
  static FST_HOST_DEVICE float value(uint8_t bits) {
    return bits == 0x80 ? float_of_bits(0x7F800001) : from_small<MANTISSA, BIAS>(bits);
  }
  static FST_HOST_DEVICE uint8_t of(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = to_small<MANTISSA, BIAS>(bits & 0x7FFFFFFF);
    if (rounded == 0) return 0;
    return rounded < 0x80 ? uint8_t(rounded | (bits >> 24 & 0x80)) : uint8_t(0x80);
  }
};

template <>
struct Format<F8_E4M3FNUZ> : UnsignedZero<3, 8> {};
template <>
struct Format<F8_E5M2FNUZ> : UnsignedZero<2, 16> {};

// An exponent alone: the sign is dropped, and infinity becomes NaN.
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
    // A tie goes up to the next power of two, except between 2^-127 and what the format has no number for.
    bool is_up = mantissa > 0x400000 || (mantissa == 0x400000 && exponent > 0);
    return uint8_t(exponent + is_up);
  }
};

template <Dtype DTYPE>
using BitsOf = typename Format<DTYPE>::Bits;

// `Value` is what values pass through on their way to a target: double if that is F64, and float otherwise.
template <typename Value, Dtype FROM>
FST_HOST_DEVICE Value decode(BitsOf<FROM> bits) {
  return static_cast<Value>(Format<FROM>::value(bits));
}

template <Dtype TO, typename Value>
FST_HOST_DEVICE BitsOf<TO> encode(Value value) {
  return Format<TO>::of(value);
}

}  // namespace fst
