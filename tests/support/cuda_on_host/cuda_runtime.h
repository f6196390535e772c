// SPDX-License-Identifier: Apache-2.0
//
// Just enough of CUDA to run this project's kernels on the host: one thread per
// CUDA thread of a block, a real barrier, and the blocks one after the other.
#pragma once

#include <barrier>
#include <cstdint>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

struct alignas(16) int4 {
  int x, y, z, w;
};

struct alignas(16) longlong2 {
  long long x, y;
};

inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }

inline thread_local dim3 threadIdx;
inline thread_local dim3 blockIdx;
inline thread_local dim3 blockDim;
inline thread_local dim3 gridDim;
inline thread_local std::barrier<>* block_barrier = nullptr;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

template <typename Params>
void LaunchOnHost(void (*kernel)(Params), const Params& params, dim3 grid, unsigned threads) {
  std::barrier<> barrier(threads);
  std::vector<std::jthread> pool;
  for (unsigned thread = 0; thread < threads; ++thread) {
    pool.emplace_back([&, thread] {
      threadIdx = {thread};
      blockDim = {threads};
      gridDim = grid;
      block_barrier = &barrier;
      for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx = {x, y};
          kernel(params);
          barrier.arrive_and_wait();
        }
      }
    });
  }
}
