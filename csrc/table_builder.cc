// SPDX-License-Identifier: Apache-2.0
#include "csrc/table_builder.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "csrc/dispatch.h"

namespace repage {
namespace {

bool IsOn(const DLTensor& tensor, int32_t device) {
  if (device == kCpu) return tensor.device.device_type == kDLCPU;
  return tensor.device.device_type == kDLCUDA && tensor.device.device_id == device;
}

bool IsInt32(const DLTensor& tensor) {
  return tensor.dtype.code == kDLInt && tensor.dtype.bits == 32 && tensor.dtype.lanes == 1;
}

// Strides may be missing, which means dense.
bool IsDenseAlong(const DLTensor& tensor, int32_t dimension) {
  return tensor.strides == nullptr || tensor.shape[dimension] <= 1 ||
         tensor.strides[dimension] == 1;
}

bool IsDenseList(const DLTensor& tensor, int32_t device) {
  return IsInt32(tensor) && tensor.ndim == 1 && IsDenseAlong(tensor, 0) && IsOn(tensor, device);
}

int32_t* Data(const DLTensor& tensor) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
}

}  // namespace

TableBuilder::TableBuilder(const PageTableParams& table, int32_t device)
    : table_(table), max_rows_(table.table_rows), device_(device) {}

std::optional<TableBuilder::Batch> TableBuilder::Read(const DLTensor& block_table,
                                                      const DLTensor* seq_lens,
                                                      const DLTensor* kv_indptr,
                                                      const DLTensor* kv_indices) const {
  if (!IsInt32(block_table) || block_table.ndim != 2 || block_table.shape[0] > max_rows_ ||
      block_table.shape[1] != table_.block_columns || !IsDenseAlong(block_table, 1) ||
      !IsOn(block_table, device_)) {
    return std::nullopt;
  }
  const int64_t rows = block_table.shape[0];
  Batch batch;
  batch.block_table = Data(block_table);
  batch.block_table_row_stride =
      block_table.strides == nullptr ? block_table.shape[1] : block_table.strides[0];
  batch.num_rows = static_cast<int32_t>(rows);
  if (seq_lens != nullptr) {
    if (!IsDenseList(*seq_lens, device_) || seq_lens->shape[0] != rows) return std::nullopt;
    batch.seq_lens = Data(*seq_lens);
  }
  if ((kv_indptr == nullptr) != (kv_indices == nullptr)) return std::nullopt;
  if (kv_indptr != nullptr) {
    if (!IsDenseList(*kv_indptr, device_) || kv_indptr->shape[0] != rows + 1 ||
        !IsDenseList(*kv_indices, device_)) {
      return std::nullopt;
    }
    batch.kv_indptr = Data(*kv_indptr);
    batch.kv_indices = Data(*kv_indices);
    batch.kv_indices_size = kv_indices->shape[0];
  }
  return batch;
}

void TableBuilder::Build(const Batch& batch, uint64_t stream) {
  PageTableParams table = table_;
  table.block_table = batch.block_table;
  table.block_table_row_stride = batch.block_table_row_stride;
  table.seq_lens = batch.seq_lens;
  table.num_rows = batch.num_rows;
  if (device_ == kCpu) {
    table.table_rows = std::max(batch.num_rows, used_rows_);
    used_rows_ = batch.num_rows;
  }
  if (batch.kv_indptr == nullptr) {
    REPAGE_DISPATCH(BuildPageTable, table, device_, stream);
    return;
  }
  const GroupTablesParams both{
      table,
      {batch.block_table, batch.block_table_row_stride, batch.kv_indptr, batch.kv_indices,
       batch.kv_indices_size, batch.num_rows, table.block_columns, table.row_parts, table.map}};
  REPAGE_DISPATCH(BuildGroupTables, both, device_, stream);
}

}  // namespace repage
