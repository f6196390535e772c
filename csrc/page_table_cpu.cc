// SPDX-License-Identifier: Apache-2.0
#include "csrc/page_table_cpu.h"

#include <algorithm>
#include <cstdint>

#include "csrc/page_table_elements.h"

namespace repage::cpu {
namespace {

// Compiled once more for wider vectors and chosen at load time, where the compiler can.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define REPAGE_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define REPAGE_VECTOR_CLONES
#endif

constexpr int32_t kLanes = 16;

// Writes `columns` entries of one row, kLanes at a time: what runs past a block's
// last page is written again by the next block. Lanes past a page may wrap, hence unsigned.
REPAGE_VECTOR_CLONES
void ExpandRow(const PageMap& map, const int32_t* row, int32_t columns, int32_t* out) {
  const int32_t pages_per_block = map.pages_per_block.divisor;
  const int32_t page_step = static_cast<int32_t>(map.page_step);
  const int32_t rounded = (pages_per_block + kLanes - 1) / kLanes * kLanes;
  uint32_t offsets[kLanes];
  for (int32_t lane = 0; lane < kLanes; ++lane) {
    offsets[lane] = static_cast<uint32_t>(lane) * static_cast<uint32_t>(page_step);
  }
  const uint32_t vector_step = kLanes * static_cast<uint32_t>(page_step);
  const int32_t* const end = out + columns;
  for (; end - out >= rounded; out += pages_per_block) {
    uint32_t first = static_cast<uint32_t>(FirstPageOfBlock(map, *row++));
    for (int32_t index = 0; index < pages_per_block; index += kLanes) {
      for (int32_t lane = 0; lane < kLanes; ++lane) {
        out[index + lane] = static_cast<int32_t>(first + offsets[lane]);
      }
      first += vector_step;
    }
  }
  // The blocks near the end of the row have no room for whole vectors.
  while (out < end) {
    const int32_t first = FirstPageOfBlock(map, *row++);
    const int32_t pages = static_cast<int32_t>(std::min<int64_t>(pages_per_block, end - out));
    for (int32_t index = 0; index < pages; ++index) out[index] = first + index * page_step;
    out += pages;
  }
}

}  // namespace

void BuildPageTable(const PageTableParams& params) {
  const int32_t columns = params.block_columns * params.map.pages_per_block.divisor;
  for (int32_t row = 0; row < params.table_rows; ++row) {
    int32_t* out = params.page_table + int64_t{row} * columns;
    const int32_t live = LiveColumns(params, row);
    int32_t dirty = columns;
    if (params.watermarks != nullptr) {
      int32_t* marks = params.watermarks + int64_t{row} * kRowParts;
      dirty = *std::max_element(marks, marks + kRowParts);
      std::fill(marks, marks + kRowParts, live);
    }
    if (live > 0) {
      ExpandRow(params.map, params.block_table + row * params.block_table_row_stride, live, out);
    }
    if (dirty > live) std::fill(out + live, out + dirty, 0);
  }
}

void BuildKvIndices(const KvIndicesParams& params) {
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const KvIndicesRow place = LocateKvIndicesRow(params, row);
    if (place.entries == 0) continue;
    int32_t* out = params.kv_indices + place.begin;
    if (place.mapped > 0) {
      ExpandRow(params.map, params.block_table + row * params.block_table_row_stride, place.mapped,
                out);
    }
    std::fill(out + place.mapped, out + place.entries, 0);
  }
}

void MapSlots(const SlotMapParams& params) {
  for (int64_t i = 0; i < params.num_slots; ++i) {
    params.virtual_slots[i] = VirtualSlot(params.map, params.slot_mapping[i]);
  }
}

void LastPageLen(const LastPageLenParams& params) {
  for (int64_t i = 0; i < params.num_rows; ++i) {
    params.last_page_len[i] = LastPageLength(params.page_tokens, params.seq_lens[i]);
  }
}

}  // namespace repage::cpu
