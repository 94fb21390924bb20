// Runs launches of translated kernels, and stops at the first access to memory that a GPU would refuse.
//
// Reads launches from a file and writes the targets of all launches to another one.
// The fields of a launch are as in `Launch`, then follow its tasks and its source, see
// tests/python/kernels/launches.py and matrices.py. Tasks have addresses relative to the source and the target. Source,
// target, tasks and parameters each have pages of their own between pages that cannot be accessed.
#define _DEFAULT_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ptx.h"

enum {
  GUARD_BYTES = 1 << 16,
  TARGET_FILL = 0xEE,
  SOURCE_FILL = 0xA7,
  TASK_BYTES = 48,
  MATRIX_BYTES = 136,
  PUT_BYTES_AT = 42,
  BATCH_BYTES = 4088
};

// Kernel, and where it finds its tasks.
enum { SCATTER, SCATTER_INLINE, DEQUANTIZE };

typedef struct {
  uint64_t kernel;
  uint64_t blocks, threads;
  uint64_t seed;  // for the order of the threads
  uint64_t source_bytes, is_source_at_end;
  uint64_t target_bytes;
  uint64_t task_count, tile_count;
} Launch;

// Memory that is a part of an allocation of whole pages, at its beginning or its end.
typedef struct {
  const char* name;
  uint8_t* pages;
  uint64_t pages_bytes;
  uint8_t* begin;
  uint64_t bytes;
} Region;

static Region source, target, tasks, batch;
static uint32_t current_line;

static void fail(const char* what) {
  fprintf(stderr, "PTX line %u: %s\n", current_line, what);
  exit(1);
}

uint64_t checked(uint64_t address, uint32_t bytes, uint32_t line) {
  current_line = line;
  if (address % bytes != 0) fail("access is not aligned to its size");
  return address;
}

static void on_fault(int number, siginfo_t* info, void* context) {
  (void)context;
  const Region* all[] = {&source, &target, &tasks, &batch};
  if (number == SIGFPE) fail("division by zero");
  for (int i = 0; i < 4; ++i) {
    const int64_t offset = (int64_t)info->si_addr - (int64_t)all[i]->begin;
    if (offset < -GUARD_BYTES || offset >= (int64_t)all[i]->bytes + GUARD_BYTES) continue;
    char text[200];
    snprintf(text, sizeof text, "access at byte %lld of the %s, which has %llu bytes", (long long)offset, all[i]->name,
             (unsigned long long)all[i]->bytes);
    fail(text);
  }
  fail("access far from any memory");
}

static Region region(const char* name, uint64_t bytes, int is_at_end, int fill) {
  const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  Region made = {.name = name, .bytes = bytes};
  made.pages_bytes = (bytes + page - 1) / page * page;
  uint8_t* pages =
      mmap(NULL, made.pages_bytes + 2 * GUARD_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) abort();
  made.pages = pages + GUARD_BYTES;
  if (made.pages_bytes > 0 && mprotect(made.pages, made.pages_bytes, PROT_READ | PROT_WRITE) != 0) abort();
  memset(made.pages, fill, made.pages_bytes);
  made.begin = is_at_end ? made.pages + made.pages_bytes - bytes : made.pages;
  return made;
}

// Returns whether the bytes around the region still have the value.
static int is_filled_around(const Region* made, uint8_t fill) {
  for (const uint8_t* at = made->pages; at < made->pages + made->pages_bytes; ++at) {
    if ((at < made->begin || at >= made->begin + made->bytes) && *at != fill) return 0;
  }
  return 1;
}

static void drop(const Region* made) { munmap(made->pages - GUARD_BYTES, made->pages_bytes + 2 * GUARD_BYTES); }

static uint32_t below(uint64_t* state, uint32_t end) {
  *state = *state * 6364136223846793005ULL + 1442695040888963407ULL;
  return (uint32_t)((*state >> 32) * end >> 32);
}

// Runs all threads of a launch in random order. They do not wait for each other, so any order is one of a GPU.
static void run(const Launch* launch, const Kernel* kernel, const uint64_t* parameters) {
  const uint32_t count = (uint32_t)(launch->blocks * launch->threads);
  uint32_t* order = malloc(count * sizeof *order);
  if (!order) abort();
  uint64_t state = launch->seed;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t other = below(&state, i + 1);
    order[i] = order[other];
    order[other] = i;
  }
  for (uint32_t i = 0; i < count; ++i) {
    Place at = {.threads = (uint32_t)launch->threads, .blocks = (uint32_t)launch->blocks};
    at.thread = order[i] % at.threads;
    at.block = order[i] / at.threads;
    kernel->run(&at, parameters);
  }
  free(order);
}

static const Kernel* find(const char* name) {
  for (const Kernel* kernel = kernels; kernel->name; ++kernel) {
    if (strcmp(kernel->name, name) == 0) return kernel;
  }
  fail("the PTX has no such kernel");
  return NULL;
}

// Makes the addresses of a task absolute.
static void relocate(uint64_t kernel, uint8_t* task) {
  uint64_t fields[4];
  memcpy(fields, task, sizeof fields);
  const uint64_t at_source = (uint64_t)source.begin, at_target = (uint64_t)target.begin;
  fields[0] += at_source;
  if (kernel == DEQUANTIZE) {
    fields[1] += at_source;
    fields[2] += at_source;
    fields[3] += at_target;
  } else {
    fields[1] += at_target;
    if (task[PUT_BYTES_AT] > 0) fields[3] += at_source;
  }
  memcpy(task, fields, sizeof fields);
}

static void read_all(void* to, uint64_t bytes, FILE* file) {
  if (fread(to, 1, bytes, file) != bytes) abort();
}

int main(int count, char** arguments) {
  if (count != 3) return 2;
  FILE* in = fopen(arguments[1], "rb");
  FILE* out = fopen(arguments[2], "wb");
  if (!in || !out) return 2;
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &action, NULL);
  sigaction(SIGBUS, &action, NULL);
  sigaction(SIGFPE, &action, NULL);
  Launch launch;
  while (fread(&launch, sizeof launch, 1, in) == 1) {
    source = region("source", launch.source_bytes, (int)launch.is_source_at_end, SOURCE_FILL);
    target = region("target", launch.target_bytes, 1, TARGET_FILL);
    const uint64_t task_bytes = launch.kernel == DEQUANTIZE ? MATRIX_BYTES : TASK_BYTES;
    tasks = region("tasks", launch.task_count * task_bytes, 1, 0);
    batch = region("parameter", BATCH_BYTES, 1, 0);
    read_all(tasks.begin, tasks.bytes, in);
    read_all(source.begin, source.bytes, in);
    for (uint64_t i = 0; i < launch.task_count; ++i) relocate(launch.kernel, tasks.begin + i * task_bytes);
    const uint32_t counts[2] = {(uint32_t)launch.task_count, (uint32_t)launch.tile_count};
    if (launch.kernel != SCATTER) {
      if (sizeof counts + tasks.bytes > BATCH_BYTES) return 2;
      memcpy(batch.begin, counts, sizeof counts);
      memcpy(batch.begin + sizeof counts, tasks.begin, tasks.bytes);
      mprotect(batch.pages, batch.pages_bytes, PROT_READ);
      const uint64_t parameters[] = {(uint64_t)batch.begin};
      run(&launch, find(launch.kernel == DEQUANTIZE ? "fst_dequantize" : "fst_scatter_inline"), parameters);
    } else {
      mprotect(tasks.pages, tasks.pages_bytes, PROT_READ);
      const uint64_t address = (uint64_t)tasks.begin;
      const uint64_t parameters[] = {(uint64_t)&address, (uint64_t)&counts[0], (uint64_t)&counts[1]};
      run(&launch, find("fst_scatter"), parameters);
    }
    if (!is_filled_around(&target, TARGET_FILL)) fail("a thread has written outside the target");
    if (fwrite(target.begin, 1, target.bytes, out) != target.bytes) return 2;
    drop(&source);
    drop(&target);
    drop(&tasks);
    drop(&batch);
  }
  return fclose(out) == 0 ? 0 : 2;
}
