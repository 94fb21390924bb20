// Work of one thread of the scatter kernel. The code also compiles for the host: the simulated driver of the tests
// calls it for every thread of a launch.
#pragma once

#include "convert.h"

namespace fst {

// Size of the wider side of a tile. Equals the constant in rust/cast/scatter.rs.
constexpr uint32_t TILE_BYTES = 16 << 10;
// Positions of a tile. Equals the constant in rust/cast/scatter.rs.
constexpr uint32_t TILE_POSITIONS = 4096;
// Number of threads in a block, for the compiler. The launch in rust/device/cuda/kernels.rs sets it.
constexpr uint32_t BLOCK_THREADS = 256;

// Rows of elements to copy or cast. They are `source_stride_bytes` apart in the source and contiguous in the target. If
// the dtypes are equal, elements are bytes. If `put_bytes` is not 0, the one row has elements of this size, and each
// goes to its position in the target, if that is at most `last_position`. Same memory layout as the type of this name
// in rust/cast/scatter.rs.
struct Task {
  uint64_t source;  // any alignment; with positions, aligned to its element
  uint64_t target;  // aligned to its element
  uint64_t row_elements;
  union {
    uint64_t source_stride_bytes;
    uint64_t positions;  // address of numbers of 32 bits
  };
  union {
    uint32_t rows;
    uint32_t last_position;
  };
  uint32_t first_tile;  // number of tiles of all tasks before this one
  Dtype from;
  Dtype to;
  uint8_t put_bytes;
  uint8_t padding[5];
};
static_assert(sizeof(Task) == 48, "must equal TASK_BYTES in rust/cast/scatter.rs");

// Tasks passed as kernel parameters. Every driver accepts parameters of 4096 bytes.
struct TaskBatch {
  uint32_t task_count;
  uint32_t tile_count;
  Task tasks[85];
};
static_assert(sizeof(TaskBatch) == 4088, "must equal the size of Batch in rust/cast/scatter.rs");

struct alignas(16) Words {
  uint32_t at[4];
};

template <typename T>
FST_HOST_DEVICE T load(uint64_t address) {
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const T*>(address);
#else
  T value;
  memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
#endif
}

template <typename T>
FST_HOST_DEVICE void store(uint64_t address, T value) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<T*>(address) = value;
#else
  memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
#endif
}

// Returns 32 bits of the 64-bit value of both words, from bit `shift` on.
FST_HOST_DEVICE uint32_t funnel(uint32_t low, uint32_t high, uint32_t shift) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, shift);
#else
  return uint32_t((uint64_t(high) << 32 | low) >> shift);
#endif
}

// Loads an element from any address, byte by byte.
template <typename T>
FST_HOST_DEVICE T load_element(uint64_t address) {
  uint8_t bytes[sizeof(T)];
#pragma unroll
  for (uint32_t i = 0; i < sizeof(T); ++i) bytes[i] = load<uint8_t>(address + i);
  T value;
  memcpy(&value, bytes, sizeof value);
  return value;
}

// Loads WORDS * 4 bytes from any address. Reads only aligned words that contain some of these bytes.
template <uint32_t WORDS>
FST_HOST_DEVICE void load_words(uint64_t address, uint32_t (&words)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
    if (address % 16 == 0) {
#pragma unroll
      for (uint32_t i = 0; i < WORDS; i += 4) {
        Words loaded = load<Words>(address + 4 * i);
        memcpy(words + i, loaded.at, sizeof loaded);
      }
      return;
    }
  }
  const uint64_t aligned = address & ~uint64_t(3);
  const uint32_t shift = uint32_t(address & 3) * 8;
  uint32_t low = load<uint32_t>(aligned);
#pragma unroll
  for (uint32_t i = 0; i + 1 < WORDS; ++i) {
    uint32_t high = load<uint32_t>(aligned + 4 * (i + 1));
    words[i] = funnel(low, high, shift);
    low = high;
  }
  uint32_t high = shift == 0 ? 0 : load<uint32_t>(aligned + 4 * WORDS);
  words[WORDS - 1] = funnel(low, high, shift);
}

// Stores WORDS * 4 bytes. The address is a multiple of that size, or of 16 if the size is larger.
template <uint32_t WORDS>
FST_HOST_DEVICE void store_words(uint64_t address, const uint32_t (&words)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (uint32_t i = 0; i < WORDS; i += 4) {
      store(address + 4 * i, Words{{words[i], words[i + 1], words[i + 2], words[i + 3]}});
    }
  } else {
    static_assert(WORDS == 2, "only 8 bytes, or multiples of 16");
    store(address, uint64_t(words[1]) << 32 | words[0]);
  }
}

// Copy and Cast have the same interface. `one` converts one element; its target is aligned to the element. `chunk`
// converts ELEMENTS elements; its target is a multiple of `alignment_bytes`. Sources have any alignment.

// Copies bytes.
struct Copy {
  static constexpr uint32_t ELEMENTS = 16;
  static constexpr uint32_t source_bytes = 1;
  static constexpr uint32_t target_bytes = 1;
  static constexpr uint32_t alignment_bytes = 16;

  FST_HOST_DEVICE explicit Copy(const Task&) {}

  FST_HOST_DEVICE void one(uint64_t source, uint64_t target) const { store(target, load<uint8_t>(source)); }

  FST_HOST_DEVICE void chunk(uint64_t source, uint64_t target) const {
    uint32_t words[ELEMENTS / 4];
    load_words(source, words);
    store_words(target, words);
  }
};

FST_HOST_DEVICE uint32_t bytes_of(Dtype dtype) {
  switch (dtype) {
    case U64:
    case I64:
    case F64:
      return 8;
    case U32:
    case I32:
    case F32:
      return 4;
    case U16:
    case I16:
    case F16:
    case BF16:
      return 2;
    default:
      return 1;
  }
}

// Lists of the dtypes that are cast. Only floats are targets.
#define FST_INTEGERS(CASE) CASE(BOOL) CASE(U8) CASE(I8) CASE(U16) CASE(I16) CASE(U32) CASE(I32) CASE(U64) CASE(I64)
#define FST_FLOATS(CASE) \
  CASE(F16)              \
  CASE(BF16) CASE(F32) CASE(F8_E4M3) CASE(F8_E5M2) CASE(F8_E4M3FNUZ) CASE(F8_E5M2FNUZ) CASE(F8_E8M0)

// Casts in two steps, through `Value`. One function per source and one per target is much less code than one per pair.
// All threads of a block take the same branches.
template <typename Value>
struct Cast {
  static constexpr uint32_t ELEMENTS = 8;
  const Dtype from;
  const Dtype to;
  const uint32_t source_bytes;
  const uint32_t target_bytes;
  const uint32_t alignment_bytes;

  FST_HOST_DEVICE explicit Cast(const Task& task)
      : from(task.from),
        to(task.to),
        source_bytes(bytes_of(from)),
        target_bytes(bytes_of(to)),
        alignment_bytes(target_bytes == 1 ? 8 : 16) {}

  FST_HOST_DEVICE void one(uint64_t source, uint64_t target) const {
    Value value[1];
    load_values(source, value);
    store_values(target, value);
  }

  FST_HOST_DEVICE void chunk(uint64_t source, uint64_t target) const {
    Value values[ELEMENTS];
    load_values(source, values);
    store_values(target, values);
  }

 private:
  template <Dtype FROM, uint32_t COUNT>
  static FST_HOST_DEVICE void load_values_from(uint64_t source, Value (&values)[COUNT]) {
    BitsOf<FROM> bits[COUNT];
    if constexpr (COUNT == 1) {
      bits[0] = load_element<BitsOf<FROM>>(source);
    } else {
      uint32_t words[sizeof bits / 4];
      load_words(source, words);
      memcpy(bits, words, sizeof bits);
    }
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) values[i] = decode<Value, FROM>(bits[i]);
  }

  template <Dtype TO, uint32_t COUNT>
  static FST_HOST_DEVICE void store_values_to(uint64_t target, const Value (&values)[COUNT]) {
    BitsOf<TO> bits[COUNT];
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) bits[i] = encode<TO>(values[i]);
    if constexpr (COUNT == 1) {
      store(target, bits[0]);
    } else {
      uint32_t words[sizeof bits / 4];
      memcpy(words, bits, sizeof bits);
      store_words(target, words);
    }
  }

  template <uint32_t COUNT>
  FST_HOST_DEVICE void load_values(uint64_t source, Value (&values)[COUNT]) const {
    switch (from) {
#define FST_FROM(DTYPE) \
  case DTYPE:           \
    return load_values_from<DTYPE>(source, values);
      FST_INTEGERS(FST_FROM)
      FST_FLOATS(FST_FROM)
      FST_FROM(F64)
#undef FST_FROM
    }
  }

  template <uint32_t COUNT>
  FST_HOST_DEVICE void store_values(uint64_t target, const Value (&values)[COUNT]) const {
    if constexpr (sizeof(Value) == sizeof(double)) return store_values_to<F64>(target, values);
    switch (to) {
#define FST_TO(DTYPE) \
  case DTYPE:         \
    return store_values_to<DTYPE>(target, values);
      FST_FLOATS(FST_TO)
#undef FST_TO
      default:
        return;
    }
  }
};

// Divides. Avoids the slow 64-bit division if possible.
FST_HOST_DEVICE uint64_t quotient(uint64_t value, uint64_t divisor) {
  const bool is_small = (value | divisor) >> 32 == 0;
  return is_small ? uint32_t(value) / uint32_t(divisor) : value / divisor;
}

// Returns the row of an element.
FST_HOST_DEVICE uint64_t row_of(const Task& task, uint64_t element) {
  return task.rows == 1 ? 0 : quotient(element, task.row_elements);
}

// Converts one thread's part of a tile. All threads of a block share the tile.
template <typename Work>
FST_HOST_DEVICE void run_tile(const Task& task, uint32_t tile, uint32_t thread, uint32_t threads) {
  const Work work(task);
  const uint32_t tile_elements =
      TILE_BYTES / (work.source_bytes > work.target_bytes ? work.source_bytes : work.target_bytes);
  const uint64_t begin = uint64_t(tile) * tile_elements;
  const uint64_t left = task.rows * task.row_elements - begin;
  const uint32_t count = left < tile_elements ? uint32_t(left) : tile_elements;
  const uint64_t target = task.target + begin * work.target_bytes;
  // If the tile is not aligned for a chunk, the first chunk begins before the tile.
  const uint32_t before = uint32_t(target) % work.alignment_bytes / work.target_bytes;

  for (uint32_t at = thread * Work::ELEMENTS; at < before + count; at += threads * Work::ELEMENTS) {
    const uint32_t first = at < before ? 0 : at - before;
    const uint32_t end = at + Work::ELEMENTS < before + count ? at + Work::ELEMENTS - before : count;
    uint64_t row = row_of(task, begin + first);
    uint64_t column = begin + first - row * task.row_elements;
    uint64_t source = task.source + row * task.source_stride_bytes + column * work.source_bytes;
    if (end - first == Work::ELEMENTS && column + Work::ELEMENTS <= task.row_elements) {
      work.chunk(source, target + first * work.target_bytes);
      continue;
    }
    for (uint32_t element = first; element < end; ++element) {
      if (column == task.row_elements) {
        column = 0;
        source = task.source + ++row * task.source_stride_bytes;
      }
      work.one(source, target + element * work.target_bytes);
      ++column;
      source += work.source_bytes;
    }
  }
}

// Writes one thread's elements of a tile to their positions.
template <typename T>
FST_HOST_DEVICE void put_tile(const Task& task, uint32_t tile, uint32_t thread, uint32_t threads) {
  // The compiler moves no load over a store. So several elements are loaded before the first is stored.
  constexpr uint32_t ELEMENTS = 4;
  const uint64_t begin = uint64_t(tile) * TILE_POSITIONS;
  const uint64_t left = task.row_elements - begin;
  const uint32_t count = left < TILE_POSITIONS ? uint32_t(left) : TILE_POSITIONS;
  const uint64_t positions = task.positions + begin * sizeof(uint32_t);
  const uint64_t source = task.source + begin * sizeof(T);

  for (uint32_t first = thread; first < count; first += threads * ELEMENTS) {
    uint32_t at[ELEMENTS];
    T values[ELEMENTS];
#pragma unroll
    for (uint32_t i = 0; i < ELEMENTS; ++i) {
      const uint32_t element = first + i * threads;
      if (element >= count) break;
      at[i] = load<uint32_t>(positions + element * sizeof(uint32_t));
      values[i] = load<T>(source + element * sizeof(T));
    }
#pragma unroll
    for (uint32_t i = 0; i < ELEMENTS; ++i) {
      if (first + i * threads < count && at[i] <= task.last_position)
        store(task.target + at[i] * uint64_t(sizeof(T)), values[i]);
    }
  }
}

// The host has validated the table: all casts are in the lists of `Cast`.
FST_HOST_DEVICE void run_tile_of(const Task& task, uint32_t tile, uint32_t thread, uint32_t threads) {
  switch (task.put_bytes) {
    case 0:
      break;
    case 1:
      return put_tile<uint8_t>(task, tile, thread, threads);
    case 2:
      return put_tile<uint16_t>(task, tile, thread, threads);
    case 4:
      return put_tile<uint32_t>(task, tile, thread, threads);
    case 8:
      return put_tile<uint64_t>(task, tile, thread, threads);
    default:
      return put_tile<Words>(task, tile, thread, threads);
  }
  if (task.from == task.to) return run_tile<Copy>(task, tile, thread, threads);
  if (task.to == F64) return run_tile<Cast<double>>(task, tile, thread, threads);
  return run_tile<Cast<float>>(task, tile, thread, threads);
}

// Returns the last task that begins at or before the tile.
template <typename AnyTask>
FST_HOST_DEVICE uint32_t task_of_tile(const AnyTask* tasks, uint32_t task_count, uint32_t tile) {
  uint32_t begin = 0;
  uint32_t end = task_count;
  while (end - begin > 1) {
    uint32_t middle = begin + (end - begin) / 2;
    (tasks[middle].first_tile <= tile ? begin : end) = middle;
  }
  return begin;
}

// Runs one thread of a launch. Blocks stride over the tiles, so any number of blocks works.
FST_HOST_DEVICE void run_thread(const Task* tasks, uint32_t task_count, uint32_t tile_count, uint32_t block,
                                uint32_t blocks, uint32_t thread, uint32_t threads) {
  for (uint64_t tile = block; tile < tile_count; tile += blocks) {
    const Task& task = tasks[task_of_tile(tasks, task_count, uint32_t(tile))];
    run_tile_of(task, uint32_t(tile) - task.first_tile, thread, threads);
  }
}

}  // namespace fst
