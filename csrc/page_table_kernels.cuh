// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels. They use nothing but built-in indices, 16-byte stores and a
// block barrier, so that the tests can also compile this file for the host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "csrc/page_table_elements.h"

namespace repage {

inline constexpr int32_t kThreadsPerBlock = 256;

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

// Writes columns [0, live) of one row with entries of the table and columns
// [live, end) with 0. The threads of `parts` thread blocks share the row.
__device__ inline void WriteRow(const PageMap& map, const int32_t* table_row, int32_t* out,
                                int32_t live, int32_t end, int32_t part, int32_t parts) {
  using Groups = VectorGroups<int32_t>;
  const int32_t lead = Groups::Lead(out);
  const int64_t step = int64_t{parts} * blockDim.x * Groups::kWidth;
  int64_t column = (int64_t{part} * blockDim.x + threadIdx.x) * Groups::kWidth - lead;
  for (; column < end; column += step) {
    const int32_t first = column < 0 ? 0 : static_cast<int32_t>(column);
    const int32_t last = static_cast<int32_t>(
        column + Groups::kWidth < end ? column + Groups::kWidth : end);  // one past
    int32_t values[Groups::kWidth] = {0, 0, 0, 0};
    const int32_t last_live = last < live ? last : live;
    if (first < last_live) {
      ColumnCursor cursor(map, table_row, first);
      const int32_t offset = first - static_cast<int32_t>(column);
#pragma unroll
      for (int32_t i = 0; i < Groups::kWidth; ++i) {
        if (i < offset || first + (i - offset) >= last_live) continue;
        values[i] = cursor.Entry();
        if (first + (i - offset) + 1 < last_live) cursor.Advance();
      }
    }
    if (last - column == Groups::kWidth && column >= 0) {
      *reinterpret_cast<int4*>(out + column) =
          make_int4(values[0], values[1], values[2], values[3]);
    } else {
#pragma unroll
      for (int32_t i = 0; i < Groups::kWidth; ++i) {
        if (column + i >= first && column + i < last) out[column + i] = values[i];
      }
    }
  }
}

// Grid: (kRowParts, table_rows).
__global__ void BuildPageTableKernel(PageTableParams params) {
  const int32_t columns = params.block_columns * params.map.pages_per_block.divisor;
  for (int32_t row = blockIdx.y; row < params.table_rows; row += gridDim.y) {
    const int32_t live = LiveColumns(params, row);
    int32_t end = columns;
    if (params.watermarks != nullptr) {
      // Each thread block keeps its own mark: another block's mark may already
      // have been replaced by this call's.
      int32_t* mark = params.watermarks + int64_t{row} * kRowParts + blockIdx.x;
      const int32_t dirty = *mark;
      end = dirty > live ? dirty : live;
      __syncthreads();
      if (threadIdx.x == 0) *mark = live;
    }
    WriteRow(params.map, params.block_table + row * params.block_table_row_stride,
             params.page_table + int64_t{row} * columns, live, end, blockIdx.x, gridDim.x);
  }
}

// Grid: (kRowParts, num_rows).
__global__ void BuildKvIndicesKernel(KvIndicesParams params) {
  for (int32_t row = blockIdx.y; row < params.num_rows; row += gridDim.y) {
    const KvIndicesRow place = LocateKvIndicesRow(params, row);
    WriteRow(params.map, params.block_table + row * params.block_table_row_stride,
             params.kv_indices + place.begin, place.mapped, place.entries, blockIdx.x, gridDim.x);
  }
}

// Grid: any, one-dimensional.
__global__ void MapSlotsKernel(SlotMapParams params) {
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
__global__ void LastPageLenKernel(LastPageLenParams params) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < params.num_rows; i += step) {
    params.last_page_len[i] = LastPageLength(params.page_tokens, params.seq_lens[i]);
  }
}

}  // namespace repage
