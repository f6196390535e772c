// SPDX-License-Identifier: Apache-2.0
//
// Parameters of the page-table operations, shared by the CUDA kernels and their
// CPU twins. Plain data: the launchers pass these structs by value.
#pragma once

#include <cstdint>

#include "repage/page_map.h"

namespace repage {

// Manager block table -> 2-D kernel page table.
struct PageTableParams {
  const int32_t* block_table;      // [num_rows, block_columns], row stride below, last dim dense
  int64_t block_table_row_stride;  // elements
  const int32_t* seq_lens;         // [num_rows] tokens, or null: every column is live
  int32_t* page_table;             // [table_rows, block_columns * r], contiguous
  // [table_rows, row_parts], or null. How many leading columns of each row may
  // hold something else than 0, per part, since the parts of a row run apart.
  // With it a call only touches live and stale columns; without it every column.
  int32_t* watermarks;
  int32_t num_rows;  // rows in use; rows num_rows .. table_rows - 1 become 0
  int32_t table_rows;
  int32_t block_columns;  // W
  int32_t lookahead;      // tokens past seq_lens whose blocks count as live
  int32_t row_parts;      // thread blocks that share a row; the same in every call of a table
  PageMap map;
};

// Manager block table -> CSR page indices (FlashInfer's paged_kv_indices).
struct KvIndicesParams {
  const int32_t* block_table;      // [num_rows, block_columns], row stride below, last dim dense
  int64_t block_table_row_stride;  // elements
  const int32_t* kv_indptr;        // [num_rows + 1], non-decreasing
  int32_t* kv_indices;             // [kv_indices_size]
  int64_t kv_indices_size;
  int32_t num_rows;
  int32_t block_columns;  // W
  int32_t row_parts;      // thread blocks that share a row
  PageMap map;
};

// Both forms of one attention group, in one launch. They may differ in rows.
struct GroupTablesParams {
  PageTableParams table;
  KvIndicesParams indices;
};

// Manager slots -> slots of the virtual view.
struct SlotMapParams {
  const int64_t* slot_mapping;  // [num_slots]
  int64_t* virtual_slots;       // [num_slots], may be slot_mapping itself
  int64_t num_slots;
  PageMap map;
};

// Sequence lengths -> tokens in the last page (FlashInfer's paged_kv_last_page_len).
struct LastPageLenParams {
  const int32_t* seq_lens;  // [num_rows]
  int32_t* last_page_len;   // [num_rows], may be seq_lens itself
  int64_t num_rows;
  FastDivisor page_tokens;  // P
};

}  // namespace repage
