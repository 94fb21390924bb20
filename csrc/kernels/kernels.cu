// Device kernels. rust/device/cuda/kernels.rs describes their parameters.
#include "dequantize.h"
#include "scatter.h"

// Reads the tasks from device memory.
extern "C" __global__ void __launch_bounds__(fst::BLOCK_THREADS)
    fst_scatter(const fst::Task* __restrict__ tasks, uint32_t task_count, uint32_t tile_count) {
  fst::run_thread(tasks, task_count, tile_count, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}

// Takes the tasks as parameters, so no upload is needed and nothing has to outlive the call.
extern "C" __global__ void __launch_bounds__(fst::BLOCK_THREADS)
    fst_scatter_inline(const __grid_constant__ fst::TaskBatch batch) {
  fst::run_thread(batch.tasks, batch.task_count, batch.tile_count, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}

// Takes the matrices as parameters.
extern "C" __global__ void __launch_bounds__(fst::BLOCK_THREADS)
    fst_dequantize(const __grid_constant__ fst::MatrixBatch batch) {
  fst::run_dequantize_thread(batch.matrices, batch.matrix_count, batch.tile_count, blockIdx.x, gridDim.x, threadIdx.x,
                             blockDim.x);
}
