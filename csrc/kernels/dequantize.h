// Work of one thread of the dequantization kernel, and the arithmetic of the schemes, which rust/cast/scheme.rs states
// for the CPU. The code also compiles for the host: the simulated driver of the tests calls it for every thread.
#pragma once

#include "scatter.h"

namespace fst {

// Ways in which codes become numbers, with the numbers of `kernel_number` in rust/cast/dequantize_task.rs.
enum Scheme : uint8_t { SCALE = 0, FP4 = 1, MXFP4 = 2, NVFP4 = 3, NVFP4_DIV = 4, NVFP4_LAST = 5 };

// Numbers that a thread computes at a time: neighbors in the target. Equals the constant in
// rust/cast/dequantize_task.rs.
constexpr uint32_t CHUNK_NUMBERS = 8;
// Chunks of a tile. Equals the constant in rust/cast/dequantize_task.rs.
constexpr uint32_t TILE_CHUNKS = 1024;

// Matrix of codes, its scales, and the memory of its numbers. Pairs belong to rows and to columns, and strides are
// in bytes. Two codes in a byte are two columns. Same memory layout as the type of this name in
// rust/cast/dequantize_task.rs.
struct MatrixTask {
  uint64_t codes;
  uint64_t scales;        // aligned to a scale
  uint64_t global_scale;  // aligned to 4 bytes, or 0 if the scheme has none
  uint64_t target;        // aligned to a number
  uint64_t size[2];
  uint64_t begin[2];  // position of the first code in the matrix to which the scales belong
  uint64_t block[2];  // 0 for all
  uint64_t code_strides[2];
  uint64_t scale_strides[2];
  uint64_t target_strides[2];
  uint32_t first_tile;  // number of tiles of all matrices before this one
  Scheme scheme;
  Dtype from;
  Dtype scale_dtype;
  Dtype to;
};
static_assert(sizeof(MatrixTask) == 136, "must equal the size of the type in rust/cast/dequantize_task.rs");

// Matrices passed as kernel parameters.
struct MatrixBatch {
  uint32_t matrix_count;
  uint32_t tile_count;
  MatrixTask matrices[30];
};
static_assert(sizeof(MatrixBatch) == 4088, "must equal the size of the type in rust/cast/dequantize_task.rs");

// Returns the value of a 4-bit float with 2 bits of exponent and 1 of mantissa.
FST_HOST_DEVICE float from_float4(uint32_t code) {
  const uint32_t magnitude = code & 7;
  const uint32_t half = magnitude == 0 ? 0 : 0x3F000000;
  const uint32_t normal = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22;
  return float_of_bits((magnitude < 2 ? half : normal) | (code & 8) << 28);
}

// Loads a scale, and returns its value. A scale of U8 is an exponent, and its largest one is infinity.
FST_HOST_DEVICE float load_scale(Dtype dtype, uint64_t address) {
  switch (dtype) {
    case BF16:
      return float_of_bfloat(load<uint16_t>(address));
    case F16:
      return float_of_half(load<uint16_t>(address));
    case F8_E4M3:
      return Format<F8_E4M3>::value(load<uint8_t>(address));
    case F8_E8M0:
      return Format<F8_E8M0>::value(load<uint8_t>(address));
    case U8: {
      const uint32_t bits = load<uint8_t>(address);
      return float_of_bits(bits == 0 ? 0x00400000 : bits << 23);
    }
    default:
      return load<float>(address);
  }
}

// Factors of a block: a number is its code times the first one, times the second one.
struct Factors {
  float first;
  float second;
};

FST_HOST_DEVICE Factors load_factors(const MatrixTask& matrix, float global_scale, uint64_t address) {
  const float scale = load_scale(matrix.scale_dtype, address);
  switch (matrix.scheme) {
    case MXFP4:
      // The largest exponent means 2^128 here, which float does not have.
      return bits_of_float(scale) == 0x7F800000 ? Factors{power_of_two(127), 2.0f} : Factors{scale, 1.0f};
    case NVFP4:
      return {scale * global_scale, 1.0f};
    case NVFP4_DIV:
      return {scale / global_scale, 1.0f};
    case NVFP4_LAST:
      return {scale, global_scale};
    default:
      return {scale, 1.0f};
  }
}

template <Dtype FROM>
FST_HOST_DEVICE void decode_bytes(const uint32_t (&words)[2], float (&values)[CHUNK_NUMBERS]) {
#pragma unroll
  for (uint32_t i = 0; i < CHUNK_NUMBERS; ++i)
    values[i] = decode<float, FROM>(static_cast<BitsOf<FROM>>(words[i / 4] >> (i % 4 * 8) & 0xFF));
}

// Decodes bytes of one code each.
FST_HOST_DEVICE void decode_codes(Dtype from, const uint32_t (&words)[2], float (&values)[CHUNK_NUMBERS]) {
  switch (from) {
    case F8_E5M2:
      return decode_bytes<F8_E5M2>(words, values);
    case F8_E4M3FNUZ:
      return decode_bytes<F8_E4M3FNUZ>(words, values);
    case F8_E5M2FNUZ:
      return decode_bytes<F8_E5M2FNUZ>(words, values);
    case I8:
      return decode_bytes<I8>(words, values);
    default:
      return decode_bytes<F8_E4M3>(words, values);
  }
}

// Rounds numbers and stores them `stride` bytes apart.
template <Dtype TO>
FST_HOST_DEVICE void store_numbers_to(uint64_t target, uint64_t stride, uint32_t count,
                                      const float (&numbers)[CHUNK_NUMBERS]) {
  BitsOf<TO> bits[CHUNK_NUMBERS];
#pragma unroll
  for (uint32_t i = 0; i < CHUNK_NUMBERS; ++i) {
    if constexpr (TO == F64) {
      bits[i] = convert_number<double>(numbers[i]);
    } else {
      bits[i] = encode<TO>(numbers[i]);
    }
  }
  if (stride == sizeof bits[0] && count == CHUNK_NUMBERS && target % 16 == 0) {
    uint32_t words[sizeof bits / 4];
    memcpy(words, bits, sizeof bits);
    return store_words(target, words);
  }
#pragma unroll
  for (uint32_t i = 0; i < CHUNK_NUMBERS; ++i) {
    if (i < count) store(target + i * stride, bits[i]);
  }
}

FST_HOST_DEVICE void store_numbers(Dtype to, uint64_t target, uint64_t stride, uint32_t count,
                                   const float (&numbers)[CHUNK_NUMBERS]) {
  switch (to) {
    case F16:
      return store_numbers_to<F16>(target, stride, count, numbers);
    case F32:
      return store_numbers_to<F32>(target, stride, count, numbers);
    case F64:
      return store_numbers_to<F64>(target, stride, count, numbers);
    default:
      return store_numbers_to<BF16>(target, stride, count, numbers);
  }
}

// Returns whether columns of the target are contiguous, and rows are not.
FST_HOST_DEVICE bool is_transposed(const MatrixTask& matrix) {
  const uint32_t number_bytes = bytes_of(matrix.to);
  return matrix.target_strides[0] == number_bytes && matrix.target_strides[1] != number_bytes;
}

// Returns the element for rows or for columns, by a selection, since registers have no index.
FST_HOST_DEVICE uint64_t on_axis(const uint64_t (&pair)[2], bool is_row) { return is_row ? pair[0] : pair[1]; }

// Converts a chunk of a line, which is a row, or a column if `is_down`.
FST_HOST_DEVICE void run_chunk(const MatrixTask& matrix, bool is_down, uint64_t line, uint64_t first) {
  const uint64_t left = on_axis(matrix.size, is_down) - first;
  const uint32_t count = left < CHUNK_NUMBERS ? uint32_t(left) : CHUNK_NUMBERS;
  const uint64_t row = is_down ? first : line;
  const uint64_t column = is_down ? line : first;

  // Numbers that share bytes are neighbors in a row.
  const bool is_packed = matrix.scheme != SCALE;
  const bool has_pairs = is_packed && !is_down;
  const uint32_t bytes = has_pairs ? (count + 1) / 2 : count;
  const uint64_t step = on_axis(matrix.code_strides, is_down);
  const uint64_t codes =
      matrix.codes + row * matrix.code_strides[0] + (is_packed ? column / 2 : column) * matrix.code_strides[1];
  uint32_t words[2] = {0, 0};
  if (step == 1 && bytes == CHUNK_NUMBERS) {
    load_words(codes, words);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < CHUNK_NUMBERS; ++i) {
      if (i < bytes) words[i / 4] |= uint32_t(load<uint8_t>(codes + i * step)) << (i % 4 * 8);
    }
  }

  float numbers[CHUNK_NUMBERS];
  if (is_packed) {
    const uint32_t half = is_down ? uint32_t(column & 1) * 4 : 0;
#pragma unroll
    for (uint32_t i = 0; i < CHUNK_NUMBERS; ++i)
      numbers[i] = from_float4(has_pairs ? words[0] >> (4 * i) : words[i / 4] >> (i % 4 * 8) >> half);
  } else {
    decode_codes(matrix.from, words, numbers);
  }

  const float global_scale = matrix.scheme < NVFP4 ? 1.0f : load<float>(matrix.global_scale);
  const uint64_t line_block = on_axis(matrix.block, !is_down);
  const uint64_t line_at = on_axis(matrix.begin, !is_down) + line;
  const uint64_t block = on_axis(matrix.block, is_down);
  const uint64_t at = on_axis(matrix.begin, is_down) + first;
  const uint64_t number = block == 0 ? 0 : quotient(at, block);
  const uint64_t scale_step = on_axis(matrix.scale_strides, is_down);
  uint64_t scale = matrix.scales + number * scale_step;
  if (line_block != 0) scale += quotient(line_at, line_block) * on_axis(matrix.scale_strides, !is_down);
  // Index in the chunk at which the next block begins.
  uint64_t next = block == 0 ? CHUNK_NUMBERS : (number + 1) * block - at;
  Factors factors = load_factors(matrix, global_scale, scale);
#pragma unroll
  for (uint32_t i = 0; i < CHUNK_NUMBERS; ++i) {
    if (i == next && i < count) {
      scale += scale_step;
      next += block;
      factors = load_factors(matrix, global_scale, scale);
    }
    numbers[i] = numbers[i] * factors.first * factors.second;
  }
  const uint64_t target = matrix.target + row * matrix.target_strides[0] + column * matrix.target_strides[1];
  store_numbers(matrix.to, target, on_axis(matrix.target_strides, is_down), count, numbers);
}

// Converts one thread's part of a tile. Neighboring threads have neighboring chunks of a row, or neighboring columns of
// a transposed target, whose codes are neighbors.
FST_HOST_DEVICE void run_matrix_tile(const MatrixTask& matrix, uint32_t tile, uint32_t thread, uint32_t threads) {
  const bool is_down = is_transposed(matrix);
  const uint64_t lines = on_axis(matrix.size, !is_down);
  const uint64_t line_chunks = (on_axis(matrix.size, is_down) + CHUNK_NUMBERS - 1) / CHUNK_NUMBERS;
  const uint64_t begin = uint64_t(tile) * TILE_CHUNKS;
  const uint64_t left = lines * line_chunks - begin;
  const uint64_t end = begin + (left < TILE_CHUNKS ? left : TILE_CHUNKS);
  for (uint64_t chunk = begin + thread; chunk < end; chunk += threads) {
    const uint64_t divisor = is_down ? lines : line_chunks;
    const uint64_t outer = quotient(chunk, divisor);
    const uint64_t inner = chunk - outer * divisor;
    run_chunk(matrix, is_down, is_down ? inner : outer, (is_down ? outer : inner) * CHUNK_NUMBERS);
  }
}

// Runs one thread of a launch. Blocks stride over the tiles, so any number of blocks works.
FST_HOST_DEVICE void run_dequantize_thread(const MatrixTask* matrices, uint32_t matrix_count, uint32_t tile_count,
                                           uint32_t block, uint32_t blocks, uint32_t thread, uint32_t threads) {
  for (uint64_t tile = block; tile < tile_count; tile += blocks) {
    const MatrixTask& matrix = matrices[task_of_tile(matrices, matrix_count, uint32_t(tile))];
    run_matrix_tile(matrix, uint32_t(tile) - matrix.first_tile, thread, threads);
  }
}

}  // namespace fst
