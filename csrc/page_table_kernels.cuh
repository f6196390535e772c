// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels. They use nothing but built-in indices, 16-byte stores and a
// block barrier, so that the tests can also compile this file for the host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "csrc/launch_shape.h"
#include "csrc/page_table_elements.h"

namespace repage {

// At least 6 of these blocks run on a processor at a time, which leaves 40
// registers a thread: 1536 threads are all that some take (sm_86, sm_120: CUDA
// C++ Programming Guide 13.0, "Technical Specifications per Compute
// Capability").
inline constexpr int32_t kBlocksPerProcessor = 6;

// A group of consecutive output elements whose address is a multiple of 16
// bytes. A row may start anywhere, so groups are counted from the last such
// address at or before the row's start: group 0 may begin before column 0.
template <typename T>
struct VectorGroups {
  static constexpr int32_t kWidth = 16 / sizeof(T);

  // Elements between the address boundary and `row`.
  __device__ static int32_t Lead(const T* row) {
    return static_cast<int32_t>((reinterpret_cast<uintptr_t>(row) / sizeof(T)) % kWidth);
  }
};

// Entries of four consecutive columns, the first of which is live. Columns from
// `live` on become 0. `last_block_column` holds the last live page: loads never
// go past it, and never wait for each other.
__device__ inline int4 FourEntries(const PageMap& map, const int32_t* table_row, int32_t first,
                                   int32_t live, int32_t last_block_column) {
  constexpr int32_t kWidth = 4;
  const int32_t pages = map.pages_per_block.divisor;
  const int32_t page_step = static_cast<int32_t>(map.page_step);
  const int32_t block_column = map.pages_per_block.Quotient(first);
  int32_t values[kWidth];
  if (pages >= kWidth - 1) {
    // Four columns lie in at most two blocks.
    const int32_t next_column =
        block_column < last_block_column ? block_column + 1 : last_block_column;
    const int32_t block = table_row[block_column];
    const int32_t next_block = table_row[next_column];
    const int32_t index = first - block_column * pages;
    const int32_t base = FirstPageOfBlock(map, block) + index * page_step;
    const int32_t next_base = FirstPageOfBlock(map, next_block) + (index - pages) * page_step;
#pragma unroll
    for (int32_t i = 0; i < kWidth; ++i) {
      values[i] = (index + i < pages ? base : next_base) + i * page_step;
    }
  } else {
#pragma unroll
    for (int32_t i = 0; i < kWidth; ++i) {
      const int32_t column = first + i < live ? first + i : first;
      values[i] = PageTableEntry(map, table_row, column);
    }
  }
#pragma unroll
  for (int32_t i = 1; i < kWidth; ++i) {
    if (first + i >= live) values[i] = 0;
  }
  return make_int4(values[0], values[1], values[2], values[3]);
}

// Writes columns [0, live) of one row with entries of the table and columns
// [live, end) with 0. The threads of `parts` thread blocks share the row.
__device__ inline void WriteRow(const PageMap& map, const int32_t* table_row, int32_t* out,
                                int32_t live, int32_t end, int32_t part, int32_t parts) {
  using Groups = VectorGroups<int32_t>;
  const int32_t last_block_column = map.pages_per_block.Quotient(live > 0 ? live - 1 : 0);
  const int64_t step = int64_t{parts} * blockDim.x * Groups::kWidth;
  int64_t column = (int64_t{part} * blockDim.x + threadIdx.x) * Groups::kWidth - Groups::Lead(out);
  for (; column < end; column += step) {
    if (column >= 0 && column + Groups::kWidth <= end) {
      const int32_t first = static_cast<int32_t>(column);
      int4 entries = make_int4(0, 0, 0, 0);
      if (first < live) entries = FourEntries(map, table_row, first, live, last_block_column);
      *reinterpret_cast<int4*>(out + first) = entries;
    } else {
      // The ends of a row that begins or ends inside a group.
#pragma unroll 1
      for (int32_t i = 0; i < Groups::kWidth; ++i) {
        const int64_t only = column + i;
        if (only < 0 || only >= end) continue;
        const int32_t at = static_cast<int32_t>(only);
        out[at] = at < live ? PageTableEntry(map, table_row, at) : 0;
      }
    }
  }
}

__device__ inline void BuildPageTableRow(const PageTableParams& params, int32_t row) {
  const int32_t columns = params.block_columns * params.map.pages_per_block.divisor;
  const int32_t live = LiveColumns(params, row);
  int32_t end = columns;
  if (params.watermarks != nullptr) {
    // Each thread block keeps its own mark: another block's mark may already
    // have been replaced by this call's.
    int32_t* mark = params.watermarks + int64_t{row} * params.row_parts + blockIdx.x;
    const int32_t dirty = *mark;
    end = dirty > live ? dirty : live;
    __syncthreads();
    if (threadIdx.x == 0 && dirty != live) *mark = live;
  }
  WriteRow(params.map, params.block_table + row * params.block_table_row_stride,
           params.page_table + int64_t{row} * columns, live, end, blockIdx.x, params.row_parts);
}

__device__ inline void BuildKvIndicesRow(const KvIndicesParams& params, int32_t row) {
  const KvIndicesRow place = LocateKvIndicesRow(params, row);
  WriteRow(params.map, params.block_table + row * params.block_table_row_stride,
           params.kv_indices + place.begin, place.mapped, place.entries, blockIdx.x,
           params.row_parts);
}

// Grid: (row_parts, any), blocks of kThreadsPerBlock threads.
__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksPerProcessor)
    BuildPageTableKernel(PageTableParams params) {
  for (int32_t row = blockIdx.y; row < params.table_rows; row += gridDim.y) {
    BuildPageTableRow(params, row);
  }
}

// Grid: (row_parts, any), blocks of kThreadsPerBlock threads.
__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksPerProcessor)
    BuildKvIndicesKernel(KvIndicesParams params) {
  for (int32_t row = blockIdx.y; row < params.num_rows; row += gridDim.y) {
    BuildKvIndicesRow(params, row);
  }
}

// Grid: (row_parts, 2 * any), blocks of kThreadsPerBlock threads; both
// row_parts are equal. Rows of the two forms alternate, so that neither waits
// for the other.
__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksPerProcessor)
    BuildGroupTablesKernel(GroupTablesParams params) {
  const int32_t step = static_cast<int32_t>(gridDim.y / 2);
  if (blockIdx.y % 2 == 0) {
    for (int32_t row = blockIdx.y / 2; row < params.table.table_rows; row += step) {
      BuildPageTableRow(params.table, row);
    }
  } else {
    for (int32_t row = blockIdx.y / 2; row < params.indices.num_rows; row += step) {
      BuildKvIndicesRow(params.indices, row);
    }
  }
}

// Grid: any, one-dimensional.
__global__ void __launch_bounds__(kThreadsPerBlock) MapSlotsKernel(SlotMapParams params) {
  using Groups = VectorGroups<int64_t>;
  const int32_t lead = Groups::Lead(params.virtual_slots);
  const int64_t step = int64_t{gridDim.x} * blockDim.x * Groups::kWidth;
  int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * Groups::kWidth - lead;
  for (; i < params.num_slots; i += step) {
    if (i >= 0 && i + 1 < params.num_slots) {
      const int64_t first = VirtualSlot(params.map, params.slot_mapping[i]);
      const int64_t second = VirtualSlot(params.map, params.slot_mapping[i + 1]);
      *reinterpret_cast<longlong2*>(params.virtual_slots + i) = make_longlong2(first, second);
    } else {
      const int64_t only = i < 0 ? i + 1 : i;
      params.virtual_slots[only] = VirtualSlot(params.map, params.slot_mapping[only]);
    }
  }
}

// Grid: any, one-dimensional.
__global__ void __launch_bounds__(kThreadsPerBlock) LastPageLenKernel(LastPageLenParams params) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 1
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < params.num_rows; i += step) {
    params.last_page_len[i] = LastPageLength(params.page_tokens, params.seq_lens[i]);
  }
}

}  // namespace repage
