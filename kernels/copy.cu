// Kernels that move bytes between an engine's paged KV and dense payloads, and take 16-bit floats apart into planes.
//
// Compiled at run time (cuda.py), by nvcc and, with tests/kernels/cuda_on_cpu.h, by a C++ compiler: no header is
// included and no dtype occurs. All sizes, strides, counts and offsets are 64 bits and bytes; memory is named by
// address. The plan is that of runs.py, spelled out for many blocks at once:
//
//   run (block, base, page) = run_bytes bytes at bases[base] + pages[block * pages_per_block + page] * page_stride
//                             and at payloads[block] + (base * pages_per_block + page) * run_bytes
//
// A warp moves one chunk of a run at a time and then goes on to the next that no other warp has, so the number of
// blocks in a launch is free: few leave the engine its processors, and a bus is saturated long before they are.
//
// With RUN_BYTES, PAGE_STRIDE and PAGES_PER_BLOCK defined these arguments are constants and the divisions go away.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define LANES 32
#define CHUNK_BYTES 4096
#define UNROLL 4

// ---- spans: one warp, any addresses, any length

// Words as wide as source and destination can both be aligned to; bytes in front of the first and behind the last.
template <typename Word>
__device__ __forceinline__ void copy_words(u8* to, const u8* from, u64 bytes, u32 lane) {
    u64 head = (0 - (u64)from) & (sizeof(Word) - 1);
    head = head < bytes ? head : bytes;
    if (lane < head) to[lane] = from[lane];
    to += head;
    from += head;
    const u64 words = (bytes - head) / sizeof(Word);
    const Word* source = (const Word*)from;
    Word* target = (Word*)to;
    u64 at = lane;
    for (; at + (UNROLL - 1) * LANES < words; at += UNROLL * LANES) {
        Word held[UNROLL];  // all loads are under way before the first store waits for one
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) held[i] = source[at + i * LANES];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) target[at + i * LANES] = held[i];
    }
    for (; at < words; at += LANES) target[at] = source[at];
    const u64 moved = words * sizeof(Word);
    if (lane < bytes - head - moved) to[moved + lane] = from[moved + lane];
}

__device__ __forceinline__ void copy_span(u8* to, const u8* from, u64 bytes, u32 lane) {
    const u64 apart = (u64)to ^ (u64)from;
    if ((apart & 15) == 0) copy_words<uint4>(to, from, bytes, lane);
    else if ((apart & 7) == 0) copy_words<u64>(to, from, bytes, lane);
    else if ((apart & 3) == 0) copy_words<u32>(to, from, bytes, lane);
    else copy_words<u8>(to, from, bytes, lane);
}

// ---- runs

template <bool GATHER>
__device__ __forceinline__ void move_runs(
    const u64* bases, u64 base_count, const u64* pages, u64 pages_per_block, const u64* payloads, u64 block_count,
    u64 page_stride, u64 run_bytes) {
#ifdef RUN_BYTES
    run_bytes = RUN_BYTES;
    page_stride = PAGE_STRIDE;
    pages_per_block = PAGES_PER_BLOCK;
#endif
    const u64 chunks = (run_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    const u64 items = block_count * base_count * pages_per_block * chunks;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 warps = (u64)gridDim.x * blockDim.x / LANES;
    const u32 lane = (u32)(thread % LANES);
    for (u64 item = thread / LANES; item < items; item += warps) {
        const u64 run = item / chunks;
        const u64 start = (item - run * chunks) * CHUNK_BYTES;
        const u64 base_run = run / pages_per_block;
        const u64 page = run - base_run * pages_per_block;
        const u64 block = base_run / base_count;
        const u64 base = base_run - block * base_count;
        u8* paged = (u8*)(bases[base] + pages[block * pages_per_block + page] * page_stride + start);
        u8* dense = (u8*)(payloads[block] + (base * pages_per_block + page) * run_bytes + start);
        const u64 left = run_bytes - start;
        const u64 bytes = left < CHUNK_BYTES ? left : CHUNK_BYTES;
        if (GATHER) copy_span(dense, paged, bytes, lane);
        else copy_span(paged, dense, bytes, lane);
    }
}

extern "C" __global__ void gather_runs(
    const u64* bases, u64 base_count, const u64* pages, u64 pages_per_block, const u64* payloads, u64 block_count,
    u64 page_stride, u64 run_bytes) {
    move_runs<true>(bases, base_count, pages, pages_per_block, payloads, block_count, page_stride, run_bytes);
}

extern "C" __global__ void scatter_runs(
    const u64* bases, u64 base_count, const u64* pages, u64 pages_per_block, const u64* payloads, u64 block_count,
    u64 page_stride, u64 run_bytes) {
    move_runs<false>(bases, base_count, pages, pages_per_block, payloads, block_count, page_stride, run_bytes);
}

// ---- planes of 16-bit floats: first the low bytes of all elements, then the high ones (planes.py, width 2)

#define GROUP 16

// Four words of eight elements and four more: their low bytes, and their high bytes.
__device__ __forceinline__ uint4 even_bytes(uint4 a, uint4 b) {
    uint4 out;
    out.x = __byte_perm(a.x, a.y, 0x6420);
    out.y = __byte_perm(a.z, a.w, 0x6420);
    out.z = __byte_perm(b.x, b.y, 0x6420);
    out.w = __byte_perm(b.z, b.w, 0x6420);
    return out;
}

__device__ __forceinline__ uint4 odd_bytes(uint4 a, uint4 b) {
    uint4 out;
    out.x = __byte_perm(a.x, a.y, 0x7531);
    out.y = __byte_perm(a.z, a.w, 0x7531);
    out.z = __byte_perm(b.x, b.y, 0x7531);
    out.w = __byte_perm(b.z, b.w, 0x7531);
    return out;
}

__device__ __forceinline__ uint4 woven(u32 low_a, u32 high_a, u32 low_b, u32 high_b) {
    uint4 out;
    out.x = __byte_perm(low_a, high_a, 0x5140);
    out.y = __byte_perm(low_a, high_a, 0x7362);
    out.z = __byte_perm(low_b, high_b, 0x5140);
    out.w = __byte_perm(low_b, high_b, 0x7362);
    return out;
}

// A thread moves a group of 16 elements: 32 bytes on the one side, 16 on each plane of the other. `count` elements a
// block; the high plane of an odd count lies at an odd address, and then bytes are moved one by one.
template <bool SPLIT>
__device__ __forceinline__ void move_planes(const u64* elements, const u64* planes, u64 block_count, u64 count) {
    const u64 groups = (count + GROUP - 1) / GROUP;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 item = thread; item < block_count * groups; item += threads) {
        const u64 block = item / groups;
        const u64 first = (item - block * groups) * GROUP;
        u8* whole = (u8*)(elements[block] + 2 * first);
        u8* low = (u8*)(planes[block] + first);
        u8* high = low + count;
        if (first + GROUP <= count && (((u64)whole | (u64)low | (u64)high) & 15) == 0) {
            uint4* pair = (uint4*)whole;
            if (SPLIT) {
                const uint4 a = pair[0], b = pair[1];
                *(uint4*)low = even_bytes(a, b);
                *(uint4*)high = odd_bytes(a, b);
            } else {
                const uint4 l = *(const uint4*)low, h = *(const uint4*)high;
                pair[0] = woven(l.x, h.x, l.y, h.y);
                pair[1] = woven(l.z, h.z, l.w, h.w);
            }
            continue;
        }
        const u64 left = count - first < GROUP ? count - first : GROUP;
        for (u64 i = 0; i < left; ++i) {
            if (SPLIT) {
                low[i] = whole[2 * i];
                high[i] = whole[2 * i + 1];
            } else {
                whole[2 * i] = low[i];
                whole[2 * i + 1] = high[i];
            }
        }
    }
}

extern "C" __global__ void split_planes(const u64* elements, const u64* planes, u64 block_count, u64 count) {
    move_planes<true>(elements, planes, block_count, count);
}

extern "C" __global__ void merge_planes(const u64* elements, const u64* planes, u64 block_count, u64 count) {
    move_planes<false>(elements, planes, block_count, count);
}
