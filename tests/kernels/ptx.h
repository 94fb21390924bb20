// Operations of PTX that C lacks, for kernels that tests/python/kernels/ptx.py has translated.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

// Thread of a launch.
typedef struct {
  uint32_t thread, threads, block, blocks;
} Place;

// Runs one thread. The parameters are given by their addresses.
typedef struct {
  const char* name;
  void (*run)(const Place* at, const uint64_t* parameters);
} Kernel;

// The kernels of the PTX. An entry without a name ends the table.
extern const Kernel kernels[];

// Checks an access to memory: a GPU refuses one that is not aligned to its size. Returns the address.
uint64_t checked(uint64_t address, uint32_t bytes, uint32_t line);

// Integers in memory that other types may share.
typedef uint8_t Bits8;
typedef uint16_t __attribute__((may_alias)) Bits16;
typedef uint32_t __attribute__((may_alias)) Bits32;
typedef uint64_t __attribute__((may_alias)) Bits64;

#define POISON 0xE7E7E7E7E7E7E7E7

// A shift by the width or more shifts all bits out.
#define SHIFT(direction, value, by) \
  ((by) < 8 * sizeof(value) ? (value)direction(by) : (value)direction(8 * sizeof(value) - 1) direction 1)

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline double double_of(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// GPUs have one NaN for the results of operations on float.
static inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return isnan(value) ? 0x7FFFFFFF : bits;
}

static inline uint64_t bits_of_double(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Rounds a float to the bits of the nearest 16-bit float.
static inline uint16_t narrow(float value, int mantissa_bits, int exponent_bits) {
  if (isnan(value)) return 0x7FFF;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint16_t infinity = (uint16_t)(((1 << exponent_bits) - 1) << mantissa_bits);
  const uint16_t sign = signbit(value) ? 0x8000 : 0;
  if (value == 0) return sign;
  int exponent = 0;
  frexpf(value, &exponent);
  exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
  const double units = nearbyint(ldexp(value, mantissa_bits - exponent));
  if (isinf(value)) return sign | infinity;
  // Units of a normal number include the leading bit, which adds one to the exponent. So does rounding up.
  uint32_t bits = ((uint32_t)(exponent + bias - 1) << mantissa_bits) + (uint32_t)fabs(units);
  return sign | (bits < infinity ? (uint16_t)bits : infinity);
}

// Returns the value of a 16-bit float.
static inline float widen(uint16_t bits, int mantissa_bits, int exponent_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const uint32_t mantissa = bits & ((1U << mantissa_bits) - 1);
  float magnitude;
  if (exponent == (1 << exponent_bits) - 1) {
    magnitude = mantissa ? NAN : INFINITY;
  } else if (exponent == 0) {
    magnitude = ldexpf((float)mantissa, 1 - bias - mantissa_bits);
  } else {
    magnitude = ldexpf((float)(mantissa | 1U << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

// Returns the low 32 bits of both words, shifted right by the low 5 bits of `by`.
static inline uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t by) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> (by & 31));
}

// Selects four of eight bytes. Bit 3 of a selector replicates the byte's sign instead.
static inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t bytes = (uint64_t)high << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i);
    uint8_t byte = (uint8_t)(bytes >> (8 * (selector & 7)));
    if (selector & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= (uint32_t)byte << (8 * i);
  }
  return result;
}

// Replaces a field of `length` bits from `position` on.
static inline uint64_t insert_field(uint64_t field, uint64_t value, uint32_t position, uint32_t length) {
  const uint64_t ones = SHIFT(<<, UINT64_C(1), length & 0xFF) - 1;
  const uint64_t mask = SHIFT(<<, ones, position & 0xFF);
  return (SHIFT(<<, field, position & 0xFF) & mask) | (value & ~mask);
}
