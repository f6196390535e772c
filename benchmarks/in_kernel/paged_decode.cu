// SPDX-License-Identifier: Apache-2.0
//
// The example kernel behind C functions. Compiles with nvcc for a device; the tests compile the
// same file for the host, where <cuda_runtime.h> is a stand-in with LaunchOnHost.
#include <cstring>

#include "benchmarks/in_kernel/paged_decode.cuh"

namespace {

using repage::example::PagedDecodeParams;

// `walker`: 0 blocks, 1 blocks page by page, 2 an expanded page table.
auto Kernel(int walker) -> void (*)(PagedDecodeParams) {
  using namespace repage::example;
  if (walker == 0) return PagedDecodeKernel<ManagerBlocks>;
  if (walker == 1) return PagedDecodeKernel<VirtualPages>;
  return PagedDecodeKernel<PageTable>;
}

}  // namespace

// Returns a cudaError_t; 0 is success. `threads` per block; `stream` is a cudaStream_t.
extern "C" int paged_decode(int walker, const char* page_map, const int64_t* strides,
                            const float* query, const char* kv_cache, const int32_t* table,
                            const int32_t* seq_lens, float* out, int32_t num_rows,
                            int32_t table_columns, int32_t head_dim, unsigned threads,
                            void* stream) {
  PagedDecodeParams params{};
  params.query = query;
  params.kv_cache = kv_cache;
  params.table = table;
  params.seq_lens = seq_lens;
  params.out = out;
  params.num_rows = num_rows;
  params.table_columns = table_columns;
  params.head_dim = head_dim;
  // num_blocks, block_tokens, num_heads, content_bytes, block, head and token stride.
  params.geometry = {strides[0], strides[1], strides[2], strides[3],
                     strides[4], strides[5], strides[6]};
  std::memcpy(&params.map, page_map, sizeof(params.map));
  const dim3 grid(static_cast<unsigned>(num_rows), static_cast<unsigned>(strides[2]));
#ifdef __CUDACC__
  Kernel(walker)<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return static_cast<int>(cudaGetLastError());
#else
  (void)stream;
  LaunchOnHost(Kernel(walker), params, grid, threads);
  return 0;
#endif
}
