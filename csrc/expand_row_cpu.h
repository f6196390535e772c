// SPDX-License-Identifier: Apache-2.0
//
// One row of manager blocks to page ids, with the widest vectors of the processor.
#pragma once

#include <cstdint>

#include "repage/page_map.h"

namespace repage::cpu {

// Made once per call of an operation and used for all of its rows.
class RowExpander {
 public:
  // `block_columns` bounds the blocks of a row.
  RowExpander(const PageMap& map, int32_t block_columns);

  // Writes the first `columns` page ids of a row, at least one; the last block may be cut short.
  // `past_caches` asks for stores that leave the caches alone, where the processor has them.
  void Expand(const int32_t* row, int32_t columns, bool past_caches, int32_t* out) const;

 private:
  // Blocks that are expanded together. Blocks of fewer pages share vectors.
  static constexpr int32_t kRun = 16;

  void ExpandRuns(const int32_t* row, int32_t columns, int32_t* out) const;

  const PageMap& map_;
  // Whether blocks share vectors, and where each entry of a run of kRun blocks comes from: its
  // block, and the distance from that block's first page. They do not depend on the run.
  bool shares_vectors_ = false;
  alignas(64) int32_t block_[kRun * kRun];
  alignas(64) int32_t offset_[kRun * kRun];
};

}  // namespace repage::cpu
