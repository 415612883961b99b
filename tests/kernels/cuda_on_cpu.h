// What a C++ compiler needs to take kernels/copy.cu for its own: CUDA's words, and a loop in place of a GPU.
// Threads run one after the other in an order that a seed shuffles, so what depends on an order shows.
#pragma once

#define __global__
#define __device__
#define __forceinline__ inline

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

struct Dim {
    unsigned int x;
};

static thread_local Dim blockIdx, threadIdx, blockDim, gridDim;

// CUDA's: each nibble of the selector picks one of the eight bytes of (high, low) = (b, a).
static inline unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned int out = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned int byte = selector >> 4 * i & 7;
        out |= (unsigned int)(both >> 8 * byte & 0xff) << 8 * i;
    }
    return out;
}

template <typename... Arguments>
void launch(void (*kernel)(Arguments...), unsigned int grid, unsigned int block, unsigned long long seed,
            Arguments... arguments) {
    gridDim.x = grid;
    blockDim.x = block;
    const unsigned long long threads = (unsigned long long)grid * block;
    unsigned long long step = seed * 2 + 1;  // coprime with the number of threads, so each gets its turn once
    auto common = [](unsigned long long a, unsigned long long b) {
        while (b) {
            const unsigned long long rest = a % b;
            a = b;
            b = rest;
        }
        return a;
    };
    while (common(step, threads) != 1) ++step;
    for (unsigned long long turn = 0; turn < threads; ++turn) {
        const unsigned long long thread = (turn * step + seed) % threads;
        blockIdx.x = (unsigned int)(thread / block);
        threadIdx.x = (unsigned int)(thread % block);
        kernel(arguments...);
    }
}
