// SPDX-License-Identifier: Apache-2.0
#include "csrc/page_table_cpu.h"

#include <algorithm>
#include <cstdint>

#include "csrc/page_table_elements.h"

namespace repage::cpu {
namespace {

// Writes the pages of whole blocks, then of the part of a block that is left.
void ExpandRow(const PageMap& map, const int32_t* row, int32_t columns, int32_t* out) {
  const int32_t pages_per_block = map.pages_per_block.divisor;
  const int32_t page_step = static_cast<int32_t>(map.page_step);
  const int32_t whole_blocks = map.pages_per_block.Quotient(columns);
  for (int32_t block = 0; block < whole_blocks; ++block, out += pages_per_block) {
    const int32_t first = FirstPageOfBlock(map, row[block]);
    for (int32_t index = 0; index < pages_per_block; ++index) {
      out[index] = first + index * page_step;
    }
  }
  const int32_t rest = columns - whole_blocks * pages_per_block;
  if (rest == 0) return;
  const int32_t first = FirstPageOfBlock(map, row[whole_blocks]);
  for (int32_t index = 0; index < rest; ++index) out[index] = first + index * page_step;
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
