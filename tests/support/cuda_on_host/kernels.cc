// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels, compiled for the host, behind C functions.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "csrc/launch_shape.h"
#include "csrc/page_table_kernels.cuh"

namespace repage {
namespace {

PageMap ReadPageMap(const char* bytes) {
  PageMap map;
  std::memcpy(&map, bytes, sizeof(map));
  return map;
}

dim3 Grid(GridShape shape) {
  return {static_cast<unsigned>(shape.x), static_cast<unsigned>(shape.y)};
}

}  // namespace
}  // namespace repage

extern "C" {

using namespace repage;

void build_page_table(const char* map, const int32_t* block_table, int64_t row_stride,
                      const int32_t* seq_lens, int32_t* page_table, int32_t* watermarks,
                      int32_t num_rows, int32_t table_rows, int32_t block_columns,
                      int32_t lookahead, int32_t row_parts, unsigned threads) {
  if (table_rows == 0 || block_columns == 0) return;
  const PageTableParams params{block_table, row_stride, seq_lens,        page_table,
                               watermarks,  num_rows,   table_rows,      block_columns,
                               lookahead,   row_parts,  ReadPageMap(map)};
  LaunchOnHost(BuildPageTableKernel, params, Grid(RowGrid(table_rows, row_parts)), threads);
}

void build_kv_indices(const char* map, const int32_t* block_table, int64_t row_stride,
                      const int32_t* kv_indptr, int32_t* kv_indices, int64_t kv_indices_size,
                      int32_t num_rows, int32_t block_columns, int32_t row_parts,
                      unsigned threads) {
  if (num_rows == 0 || kv_indices_size == 0) return;
  const KvIndicesParams params{block_table,   row_stride,      kv_indptr,
                               kv_indices,    kv_indices_size, num_rows,
                               block_columns, row_parts,       ReadPageMap(map)};
  LaunchOnHost(BuildKvIndicesKernel, params, Grid(RowGrid(num_rows, row_parts)), threads);
}

void build_group_tables(const char* map, const int32_t* block_table, int64_t row_stride,
                        const int32_t* seq_lens, int32_t* page_table, int32_t* watermarks,
                        const int32_t* kv_indptr, int32_t* kv_indices, int64_t kv_indices_size,
                        int32_t num_rows, int32_t table_rows, int32_t block_columns,
                        int32_t lookahead, int32_t row_parts, unsigned threads) {
  const PageMap page_map = ReadPageMap(map);
  const GroupTablesParams params{
      {block_table, row_stride, seq_lens, page_table, watermarks, num_rows, table_rows,
       block_columns, lookahead, row_parts, page_map},
      {block_table, row_stride, kv_indptr, kv_indices, kv_indices_size, num_rows, block_columns,
       row_parts, page_map}};
  LaunchOnHost(BuildGroupTablesKernel, params, Grid(GroupGrid(table_rows, row_parts)), threads);
}

void map_slots(const char* map, const int64_t* slot_mapping, int64_t* virtual_slots,
               int64_t num_slots, unsigned threads) {
  if (num_slots == 0) return;
  const SlotMapParams params{slot_mapping, virtual_slots, num_slots, ReadPageMap(map)};
  LaunchOnHost(MapSlotsKernel, params, Grid(FlatGrid(num_slots + 1, 2 * threads)), threads);
}

void last_page_len(int32_t page_tokens, const int32_t* seq_lens, int32_t* last_page_len,
                   int64_t num_rows, unsigned threads) {
  if (num_rows == 0) return;
  const LastPageLenParams params{seq_lens, last_page_len, num_rows, MakeFastDivisor(page_tokens)};
  LaunchOnHost(LastPageLenKernel, params, Grid(FlatGrid(num_rows, threads)), threads);
}

}  // extern "C"
