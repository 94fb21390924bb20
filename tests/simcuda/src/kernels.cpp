// Runs the code of the device kernels on the host, thread by thread.
#include "kernels/dequantize.h"
#include "kernels/scatter.h"

// Addresses in the tasks are host addresses. Blocks run one after another, from the last to the first, since kernels
// may not depend on their order.
extern "C" void fst_sim_scatter(const fst::Task* tasks, uint32_t task_count, uint32_t tile_count, uint32_t blocks,
                                uint32_t threads) {
  for (uint32_t block = blocks; block-- > 0;) {
    for (uint32_t thread = 0; thread < threads; ++thread) {
      fst::run_thread(tasks, task_count, tile_count, block, blocks, thread, threads);
    }
  }
}

extern "C" void fst_sim_dequantize(const fst::MatrixTask* matrices, uint32_t matrix_count, uint32_t tile_count,
                                   uint32_t blocks, uint32_t threads) {
  for (uint32_t block = blocks; block-- > 0;) {
    for (uint32_t thread = 0; thread < threads; ++thread) {
      fst::run_dequantize_thread(matrices, matrix_count, tile_count, block, blocks, thread, threads);
    }
  }
}
