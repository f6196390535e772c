// SPDX-License-Identifier: Apache-2.0
//
// Grid sizes of the kernels, apart from their launch so that tests can use them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/page_table_params.h"

namespace repage {

// Limits of a grid that hold on every architecture: CUDA C++ Programming Guide
// 13.0, table "Technical Specifications per Compute Capability".
inline constexpr int64_t kMaxGridY = 65535;

struct GridShape {
  int32_t x;
  int32_t y;
};

// Thread blocks for `rows` table rows; rows past the limit are looped over.
inline GridShape RowGrid(int64_t rows) {
  return {kRowParts, static_cast<int32_t>(std::min(rows, kMaxGridY))};
}

// Thread blocks for `items` independent items, `per_block` items each.
inline GridShape FlatGrid(int64_t items, int64_t per_block) {
  // More blocks than any device runs at once gain nothing over the loop.
  constexpr int64_t kMaxBlocks = 4096;
  return {static_cast<int32_t>(std::min((items + per_block - 1) / per_block, kMaxBlocks)), 1};
}

}  // namespace repage
