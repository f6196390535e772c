// SPDX-License-Identifier: Apache-2.0
#include "csrc/page_table_cpu.h"

#include <algorithm>
#include <cstdint>

#include "csrc/expand_row_cpu.h"
#include "csrc/page_table_elements.h"

namespace repage::cpu {
namespace {

// Bytes of the live columns; those of the whole table where that is little anyway.
int64_t LiveBytes(const PageTableParams& params, int32_t columns) {
  constexpr int64_t kLittle = 1 << 20;
  constexpr int64_t kEntry = sizeof(int32_t);
  const int64_t whole = kEntry * params.num_rows * columns;
  if (whole < kLittle || params.seq_lens == nullptr) return whole;
  int64_t live = 0;
  for (int32_t row = 0; row < params.num_rows; ++row) live += LiveColumns(params, row);
  return kEntry * live;
}

}  // namespace

void BuildPageTable(const PageTableParams& params) {
  const int32_t columns = params.block_columns * params.map.pages_per_block.divisor;
  const RowExpander expander(params.map, params.block_columns, LiveBytes(params, columns));
  for (int32_t row = 0; row < params.table_rows; ++row) {
    int32_t* out = params.page_table + int64_t{row} * columns;
    const int32_t live = LiveColumns(params, row);
    int32_t dirty = columns;
    if (params.watermarks != nullptr) {
      int32_t* marks = params.watermarks + int64_t{row} * params.row_parts;
      dirty = *std::max_element(marks, marks + params.row_parts);
      std::fill(marks, marks + params.row_parts, live);
    }
    if (live > 0) {
      expander.Expand(params.block_table + row * params.block_table_row_stride, live, out);
    }
    if (dirty > live) std::fill(out + live, out + dirty, 0);
  }
}

void BuildKvIndices(const KvIndicesParams& params) {
  const int64_t output_bytes = params.kv_indices_size * int64_t{sizeof(int32_t)};
  const RowExpander expander(params.map, params.block_columns, output_bytes);
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const KvIndicesRow place = LocateKvIndicesRow(params, row);
    if (place.entries == 0) continue;
    int32_t* out = params.kv_indices + place.begin;
    if (place.mapped > 0) {
      expander.Expand(params.block_table + row * params.block_table_row_stride, place.mapped, out);
    }
    std::fill(out + place.mapped, out + place.entries, 0);
  }
}

void BuildGroupTables(const GroupTablesParams& params) {
  BuildPageTable(params.table);
  BuildKvIndices(params.indices);
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
