// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA kernels and the CPU twins have in common: how many columns of a
// row are live, and the entry of one column.
#pragma once

#include <cstdint>

#include "csrc/page_table_params.h"
#include "repage/page_map.h"

namespace repage {

// Leading columns of a row that hold pages; the others hold 0. Lengths of zero
// or less mark padding rows. A live block is live with all of its pages, so
// that a sequence which grows inside its last block needs no new table.
REPAGE_HOST_DEVICE inline int32_t LiveColumns(const PageTableParams& params, int32_t row) {
  if (row >= params.num_rows) return 0;
  int32_t blocks = params.block_columns;
  if (params.seq_lens != nullptr) {
    const int32_t length = params.seq_lens[row];
    if (length <= 0) return 0;
    const int64_t tokens = int64_t{length} + params.lookahead;
    // Clamped before the division, which takes 31-bit numerators only.
    const int32_t last_token =
        static_cast<int32_t>(tokens - 1 < INT32_MAX ? tokens - 1 : INT32_MAX);
    const int32_t last_column = params.map.block_tokens.Quotient(last_token);
    if (last_column < blocks) blocks = last_column + 1;
  }
  return blocks * params.map.pages_per_block.divisor;
}

// The length of a row of the CSR form, cut to what its output can hold.
struct KvIndicesRow {
  int64_t begin;    // index of the row's first entry in kv_indices
  int32_t entries;  // entries to write
  int32_t mapped;   // leading entries that the table covers; the rest become 0
};

REPAGE_HOST_DEVICE inline KvIndicesRow LocateKvIndicesRow(const KvIndicesParams& params,
                                                          int32_t row) {
  const int64_t begin = params.kv_indptr[row];
  int64_t end = params.kv_indptr[row + 1];
  if (end > params.kv_indices_size) end = params.kv_indices_size;
  if (begin < 0 || end <= begin) return {0, 0, 0};
  const int64_t covered = int64_t{params.block_columns} * params.map.pages_per_block.divisor;
  const int64_t entries = end - begin;
  return {begin, static_cast<int32_t>(entries),
          static_cast<int32_t>(entries < covered ? entries : covered)};
}

// The entry of one column. Precondition: the row has that column.
REPAGE_HOST_DEVICE inline int32_t PageTableEntry(const PageMap& map, const int32_t* row,
                                                 int32_t column) {
  const int32_t block_column = map.pages_per_block.Quotient(column);
  const int32_t index = column - block_column * map.pages_per_block.divisor;
  return FirstPageOfBlock(map, row[block_column]) + index * static_cast<int32_t>(map.page_step);
}

}  // namespace repage
