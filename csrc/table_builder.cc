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

// A library may describe a tensor that has no memory yet.
bool HasMemory(const DLTensor& tensor) {
  if (tensor.data != nullptr) return true;
  return std::any_of(tensor.shape, tensor.shape + tensor.ndim,
                     [](int64_t size) { return size == 0; });
}

bool IsDenseList(const DLTensor& tensor, int32_t device) {
  return IsInt32(tensor) && tensor.ndim == 1 && IsDenseAlong(tensor, 0) && IsOn(tensor, device) &&
         HasMemory(tensor);
}

int64_t RowStride(const DLTensor& tensor) {
  return tensor.strides == nullptr ? tensor.shape[1] : tensor.strides[0];
}

int32_t* Data(const DLTensor& tensor) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
}

}  // namespace

TableBuilder::TableBuilder(const PageTableParams& table, int32_t device)
    : table_(table), max_rows_(table.table_rows), device_(device) {}

bool TableBuilder::Takes(const DLTensor& block_table) const {
  return IsInt32(block_table) && block_table.ndim == 2 && block_table.shape[0] <= max_rows_ &&
         block_table.shape[1] == table_.block_columns && IsDenseAlong(block_table, 1) &&
         IsOn(block_table, device_) && HasMemory(block_table);
}

std::optional<TableBuilder::Batch> TableBuilder::ReadList(const DLTensor& block_table,
                                                          const DLTensor& kv_indptr,
                                                          const DLTensor& kv_indices) const {
  if (!Takes(block_table) || !IsDenseList(kv_indptr, device_) ||
      !IsDenseList(kv_indices, device_)) {
    return std::nullopt;
  }
  const int64_t rows = kv_indptr.shape[0] - 1;
  if (rows < 0 || rows > block_table.shape[0]) return std::nullopt;
  Batch batch;
  batch.block_table = Data(block_table);
  batch.block_table_row_stride = RowStride(block_table);
  batch.kv_indptr = Data(kv_indptr);
  batch.kv_indices = Data(kv_indices);
  batch.kv_indices_size = kv_indices.shape[0];
  batch.num_rows = static_cast<int32_t>(rows);
  return batch;
}

std::optional<TableBuilder::Batch> TableBuilder::Read(const DLTensor& block_table,
                                                      const DLTensor* seq_lens,
                                                      const DLTensor* kv_indptr,
                                                      const DLTensor* kv_indices) const {
  if (!Takes(block_table) || (kv_indptr == nullptr) != (kv_indices == nullptr)) {
    return std::nullopt;
  }
  Batch batch;
  if (kv_indptr != nullptr) {
    const auto list = ReadList(block_table, *kv_indptr, *kv_indices);
    if (!list || list->num_rows != block_table.shape[0]) return std::nullopt;
    batch = *list;
  } else {
    batch.block_table = Data(block_table);
    batch.block_table_row_stride = RowStride(block_table);
    batch.num_rows = static_cast<int32_t>(block_table.shape[0]);
  }
  if (seq_lens != nullptr) {
    if (!IsDenseList(*seq_lens, device_) || seq_lens->shape[0] != batch.num_rows) {
      return std::nullopt;
    }
    batch.seq_lens = Data(*seq_lens);
  }
  return batch;
}

KvIndicesParams TableBuilder::ListOf(const Batch& batch) const {
  return {batch.block_table,
          batch.block_table_row_stride,
          batch.kv_indptr,
          batch.kv_indices,
          batch.kv_indices_size,
          batch.num_rows,
          table_.block_columns,
          table_.row_parts,
          table_.map};
}

void TableBuilder::BuildList(const Batch& batch, uint64_t stream) const {
  const KvIndicesParams list = ListOf(batch);
  REPAGE_DISPATCH(BuildKvIndices, list, device_, stream);
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
  } else {
    const GroupTablesParams both{table, ListOf(batch)};
    REPAGE_DISPATCH(BuildGroupTables, both, device_, stream);
  }
}

}  // namespace repage
