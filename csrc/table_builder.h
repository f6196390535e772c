// SPDX-License-Identifier: Apache-2.0
//
// The page table that an engine rebuilds for every batch. What stays the same
// from batch to batch is set once; a batch is four tensors, described by
// DLPack, of which two may be missing.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <optional>

#include "csrc/page_table_params.h"

namespace repage {

class TableBuilder {
 public:
  // `table` describes the table; what belongs to a batch in it is ignored.
  TableBuilder(const PageTableParams& table, int32_t device);

  // One batch. Null pointers: no lengths, or no CSR form.
  struct Batch {
    const int32_t* block_table = nullptr;  // [num_rows, block_columns]
    int64_t block_table_row_stride = 0;
    const int32_t* seq_lens = nullptr;   // [num_rows]
    const int32_t* kv_indptr = nullptr;  // [num_rows + 1]
    int32_t* kv_indices = nullptr;       // [kv_indices_size]
    int64_t kv_indices_size = 0;
    int32_t num_rows = 0;
  };

  // The batch of these tensors (all but the first may be null), or nothing when
  // one of them is not what the table needs.
  std::optional<Batch> Read(const DLTensor& block_table, const DLTensor* seq_lens,
                            const DLTensor* kv_indptr, const DLTensor* kv_indices) const;

  // The same for the CSR form alone, which may have fewer rows than the block table.
  std::optional<Batch> ReadList(const DLTensor& block_table, const DLTensor& kv_indptr,
                                const DLTensor& kv_indices) const;

  // Rebuilds the table in one launch. `stream` is of the table's device.
  void Build(const Batch& batch, uint64_t stream);

  // Writes the CSR form and leaves the table alone.
  void BuildList(const Batch& batch, uint64_t stream) const;

  int32_t device() const { return device_; }

 private:
  bool Takes(const DLTensor& block_table) const;
  KvIndicesParams ListOf(const Batch& batch) const;

  PageTableParams table_;
  int32_t max_rows_;
  int32_t device_;
  // Rows that may hold pages. Known for the CPU only: replays of a CUDA graph
  // leave no trace here, so there every build looks at every row.
  int32_t used_rows_ = 0;
};

}  // namespace repage
