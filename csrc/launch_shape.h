// SPDX-License-Identifier: Apache-2.0
//
// Grid sizes of the kernels, apart from their launch so that tests can use
// them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace repage {

// Limits of a grid that hold on every architecture: CUDA C++ Programming Guide
// 13.0, table "Technical Specifications per Compute Capability".
inline constexpr int64_t kMaxGridY = 65535;

// Threads of a block, and entries that they write at a time, 16 bytes each.
inline constexpr int32_t kThreadsPerBlock = 256;
inline constexpr int64_t kEntriesPerRound = kThreadsPerBlock * 4;

struct GridShape {
  int32_t x;
  int32_t y;
};

// Thread blocks that share a row: so many that a few long rows keep a device
// busy, and one where there are many rows. About 768 blocks run at once on the
// devices that this is meant for (132 to 188 processors, at least 6 blocks
// each); more would wait, and a block without work ends at once.
inline int32_t RowParts(int64_t rows, int64_t columns) {
  constexpr int64_t kResidentBlocks = 768;
  const int64_t wanted = kResidentBlocks / std::max<int64_t>(rows, 1);
  const int64_t useful = (columns + kEntriesPerRound - 1) / kEntriesPerRound;
  return static_cast<int32_t>(std::max<int64_t>(std::min(wanted, useful), 1));
}

// Thread blocks for `rows` table rows; rows past the limit are looped over.
inline GridShape RowGrid(int64_t rows, int32_t row_parts) {
  return {row_parts, static_cast<int32_t>(std::min(rows, kMaxGridY))};
}

// Thread blocks for the rows of both forms of a group: twice the rows of a
// table that has at least as many rows as the CSR form.
inline GridShape GroupGrid(int64_t table_rows, int32_t row_parts) {
  return {row_parts, static_cast<int32_t>(2 * std::min(table_rows, kMaxGridY / 2))};
}

// Thread blocks for `items` independent items, `per_block` items each.
inline GridShape FlatGrid(int64_t items, int64_t per_block) {
  // More blocks than any device runs at once gain nothing over the loop.
  constexpr int64_t kMaxBlocks = 4096;
  return {static_cast<int32_t>(std::min((items + per_block - 1) / per_block, kMaxBlocks)), 1};
}

}  // namespace repage
