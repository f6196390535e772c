// SPDX-License-Identifier: Apache-2.0
#include "csrc/page_table_cpu.h"

#include <algorithm>
#include <cstdint>

#include "csrc/expand_row_cpu.h"
#include "csrc/page_table_elements.h"

namespace repage::cpu {
namespace {

// What a call writes first goes into the caches, and what follows past them: no cache would keep it
// until it is read or written again, and a store into a cache reads its line from memory first.
// Measured with 32 MiB of L3 (benchmarks/page_tables.py): a fifth to a quarter less time for tables
// of 64 MiB, and no more for smaller ones.
class OutputCounter {
 public:
  // Counts a row of entries; true where it goes past the caches.
  bool Add(int32_t entries) {
    const bool past_caches = bytes_ >= kIntoCaches;
    bytes_ += int64_t{sizeof(int32_t)} * entries;
    return past_caches;
  }

 private:
  static constexpr int64_t kIntoCaches = 16 << 20;
  int64_t bytes_ = 0;
};

}  // namespace

void BuildPageTable(const PageTableParams& params) {
  const int32_t columns = params.block_columns * params.map.pages_per_block.divisor;
  const RowExpander expander(params.map, params.block_columns);
  OutputCounter output;
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
      expander.Expand(params.block_table + row * params.block_table_row_stride, live,
                      output.Add(live), out);
    }
    if (dirty > live) std::fill(out + live, out + dirty, 0);
  }
}

void BuildKvIndices(const KvIndicesParams& params) {
  const RowExpander expander(params.map, params.block_columns);
  OutputCounter output;
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const KvIndicesRow place = LocateKvIndicesRow(params, row);
    if (place.entries == 0) continue;
    int32_t* out = params.kv_indices + place.begin;
    if (place.mapped > 0) {
      expander.Expand(params.block_table + row * params.block_table_row_stride, place.mapped,
                      output.Add(place.mapped), out);
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
