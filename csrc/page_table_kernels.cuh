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

// One row of output, shared by the threads of `parts` thread blocks. Groups of
// columns are counted by their position: the column plus the distance from the
// address boundary to the row's start. Positions need 32 bits, columns 31;
// 2^32 is far enough above for the last step of a loop.
class RowWriter {
 public:
  // Columns [0, limit) are the row's.
  __device__ RowWriter(int32_t* out, int32_t limit, int32_t part, int32_t parts)
      : out_(out),
        lead_(static_cast<uint32_t>(Groups::Lead(out))),
        limit_(static_cast<uint32_t>(limit) + lead_),
        position_((static_cast<uint32_t>(part) * blockDim.x + threadIdx.x) * kWidth),
        step_(static_cast<uint32_t>(parts) * blockDim.x * kWidth) {}

  // Writes every group that begins before column `live`: entries of the table,
  // and 0 from `live` on.
  __device__ void WriteEntries(const PageMap& map, const int32_t* table_row, int32_t live) {
    const int32_t last_block_column = map.pages_per_block.Quotient(live > 0 ? live - 1 : 0);
    WriteUntil(
        live,
        [&](int32_t first) { return FourEntries(map, table_row, first, live, last_block_column); },
        [&](int32_t column) { return column < live ? PageTableEntry(map, table_row, column) : 0; });
  }

  // Writes 0 to the groups that follow, up to the one that holds column end - 1.
  __device__ void WriteZeros(int32_t end) {
    WriteUntil(end, [](int32_t) { return make_int4(0, 0, 0, 0); }, [](int32_t) { return 0; });
  }

 private:
  using Groups = VectorGroups<int32_t>;
  static constexpr int32_t kWidth = Groups::kWidth;

  // Goes on with the groups that begin before column `end`: four columns at a
  // time, and one by one at the ends of a row that begins or ends inside a group.
  template <typename Four, typename One>
  __device__ void WriteUntil(int32_t end, Four four, One one) {
    for (; end > 0 && position_ < static_cast<uint32_t>(end) + lead_; position_ += step_) {
      const int32_t first = static_cast<int32_t>(position_ - lead_);
      if (IsWhole()) {
        *reinterpret_cast<int4*>(out_ + first) = four(first);
      } else {
#pragma unroll 1
        for (int32_t column = first < 0 ? 0 : first; column < first + kWidth; ++column) {
          if (column + lead_ >= limit_) break;
          out_[column] = one(column);
        }
      }
    }
  }

  __device__ bool IsWhole() const { return position_ >= lead_ && position_ + kWidth <= limit_; }

  int32_t* out_;
  uint32_t lead_;
  uint32_t limit_;
  uint32_t position_;
  uint32_t step_;
};

__device__ inline void BuildPageTableRow(const PageTableParams& params, int32_t row) {
  const int32_t columns = params.block_columns * params.map.pages_per_block.divisor;
  // Each thread block keeps a mark of its own: another block's may already have
  // been replaced by this call's. Asked for first and looked at last, since only
  // the zeros depend on it.
  int32_t* mark = params.watermarks;
  int32_t end = columns;
  if (mark != nullptr) {
    mark += int64_t{row} * params.row_parts + blockIdx.x;
    end = *mark;
  }
  const int32_t live = LiveColumns(params, row);
  RowWriter writer(params.page_table + int64_t{row} * columns, columns, blockIdx.x,
                   params.row_parts);
  writer.WriteEntries(params.map, params.block_table + row * params.block_table_row_stride, live);
  writer.WriteZeros(end);
  if (mark != nullptr) {
    __syncthreads();
    if (threadIdx.x == 0 && end != live) *mark = live;
  }
}

__device__ inline void BuildKvIndicesRow(const KvIndicesParams& params, int32_t row) {
  const KvIndicesRow place = LocateKvIndicesRow(params, row);
  RowWriter writer(params.kv_indices + place.begin, place.entries, blockIdx.x, params.row_parts);
  writer.WriteEntries(params.map, params.block_table + row * params.block_table_row_stride,
                      place.mapped);
  writer.WriteZeros(place.entries);
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
