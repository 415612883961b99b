// kernels/copy.cu as a shared library for the CPU: each kernel behind a function that ctypes can call.
#include "cuda_on_cpu.h"

#include "../../kernels/copy.cu"

#define RUNS(name)                                                                                                   \
    extern "C" void launch_##name(u32 grid, u32 block, u64 seed, const u64* bases, u64 base_count, const u64* pages, \
                                  u64 pages_per_block, const u64* payloads, u64 block_count, u64 page_stride,        \
                                  u64 run_bytes) {                                                                   \
        launch(name, grid, block, seed, bases, base_count, pages, pages_per_block, payloads, block_count,            \
               page_stride, run_bytes);                                                                              \
    }

#define PLANES(name)                                                                                            \
    extern "C" void launch_##name(u32 grid, u32 block, u64 seed, const u64* elements, const u64* planes,        \
                                  u64 block_count, u64 count) {                                                 \
        launch(name, grid, block, seed, elements, planes, block_count, count);                                  \
    }

RUNS(gather_runs)
RUNS(scatter_runs)
PLANES(split_planes)
PLANES(merge_planes)
