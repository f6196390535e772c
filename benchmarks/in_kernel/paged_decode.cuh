// SPDX-License-Identifier: Apache-2.0
//
// A small paged-decode attention kernel that reads packed manager blocks, in two versions that
// differ in one line: where a token lies. It is an example of how a kernel of your own adopts the
// packed layout, not a fast kernel.
//
// A paged kernel usually finds token t of a sequence like this:
//
//   page = page_table[row][t / P];   address = base + page * page_stride + (t % P) * token_stride
//
// With repage/ headers it can walk the engine's block table instead and needs no page table at all:
//
//   block = block_table[row][t / N]; address = base + TokenByteOffset(geometry, block, t % N, head)
//
// and if its inner loop must run over pages of P tokens (a tensor map, a tile size), PageId() gives
// the virtual page of (block, page in the block) in registers. Both are here: `ManagerBlocks` takes
// blocks, `PageTable` takes the expanded table, and `VirtualPages` takes blocks and computes pages.
//
// What to keep in mind:
//  - Pass PageMap or BlockGeometry by value, as a kernel argument. Both are plain data.
//  - Offsets are int64: packed blocks are so far apart that 32 bits overflow at block 137 of
//    Qwen3.6-35B (15,728,640 bytes a block).
//  - `base` is the layer's first byte; other layers lie between its blocks. Never read past a
//    block's last token, and never past seq_len: pages hold other layers' and old bytes there.
//  - Divide by N with the map's FastDivisor, or once per block and not per token.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "repage/page_map.h"

namespace repage::example {

// One layer, one batch. Keys and values are float; a token's content is K then V of one head.
struct PagedDecodeParams {
  const float* query;       // [num_rows, num_heads, head_dim]
  const char* kv_cache;     // first byte of the layer's block 0
  const int32_t* table;     // [num_rows, table_columns], blocks or pages (see the walkers)
  const int32_t* seq_lens;  // [num_rows]
  float* out;               // [num_rows, num_heads, head_dim]
  int32_t num_rows;
  int32_t table_columns;
  int32_t head_dim;
  BlockGeometry geometry;
  PageMap map;
};

// Walks the engine's block table.
struct ManagerBlocks {
  __device__ static int64_t TokenOffset(const PagedDecodeParams& params, const int32_t* row,
                                        int32_t token, int32_t head) {
    const int32_t column = params.map.block_tokens.Quotient(token);
    const int32_t in_block = token - column * params.map.block_tokens.divisor;
    return TokenByteOffset(params.geometry, row[column], in_block, head);
  }
};

// Walks the engine's block table, page by page: for kernels whose loads take a page id.
struct VirtualPages {
  __device__ static int64_t TokenOffset(const PagedDecodeParams& params, const int32_t* row,
                                        int32_t token, int32_t head) {
    const TokenLocation at = LocateToken(params.map, token);
    const int64_t page = PageId(params.map, row[at.block_column], at.page_index);
    return page * params.map.page_stride + head * params.geometry.head_stride +
           at.offset_in_page * params.geometry.token_stride;
  }
};

// Walks an expanded page table, as a kernel does that knows nothing of packed blocks.
struct PageTable {
  __device__ static int64_t TokenOffset(const PagedDecodeParams& params, const int32_t* row,
                                        int32_t token, int32_t head) {
    const int32_t column = params.map.page_tokens.Quotient(token);
    const int32_t in_page = token - column * params.map.page_tokens.divisor;
    return int64_t{row[column]} * params.map.page_stride + head * params.geometry.head_stride +
           in_page * params.geometry.token_stride;
  }
};

// Grid: (num_rows, num_heads). Each thread makes its own elements of the output; the softmax runs
// online, in token order, so that all walkers give the same bits.
template <typename Walker>
__global__ void PagedDecodeKernel(PagedDecodeParams params) {
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  const int32_t* table_row = params.table + int64_t{row} * params.table_columns;
  const int64_t vector = (int64_t{row} * params.geometry.num_heads + head) * params.head_dim;
  const float* query = params.query + vector;
  const float scale = 1.0F / sqrtf(static_cast<float>(params.head_dim));
  for (int32_t element = threadIdx.x; element < params.head_dim; element += blockDim.x) {
    float largest = -INFINITY;
    float sum = 0.0F;
    float weighted = 0.0F;
    for (int32_t token = 0; token < params.seq_lens[row]; ++token) {
      const int64_t offset = Walker::TokenOffset(params, table_row, token, head);
      const float* content = reinterpret_cast<const float*>(params.kv_cache + offset);
      float score = 0.0F;
      for (int32_t i = 0; i < params.head_dim; ++i) score += query[i] * content[i];
      score *= scale;
      const float before = largest;
      largest = score > largest ? score : largest;
      const float kept = expf(before - largest);
      const float weight = expf(score - largest);
      sum = sum * kept + weight;
      weighted = weighted * kept + weight * content[params.head_dim + element];
    }
    params.out[vector + element] = sum > 0.0F ? weighted / sum : 0.0F;
  }
}

}  // namespace repage::example
