// SPDX-License-Identifier: Apache-2.0
//
// Kernel pages as a virtual view over packed manager blocks.
//
// A kernel that wants P-token pages sees the pool as one strided array of
// virtual pages. With S the block stride, u = P * token_stride the distance of
// two pages inside a block, and g = gcd(S, u):
//
//   page(b, j) = b * (S / g) + j * (u / g),   0 <= j < N / P
//
// and the byte address of virtual page v is base + v * g. Where u divides S
// (the common case) g = u: the pages tile the pool. Where it does not, virtual
// pages overlap, which reads by address never notice.
#pragma once

#include <cstdint>

#include "repage/block_geometry.h"
#include "repage/fast_divisor.h"
#include "repage/host_device.h"

namespace repage {

// Everything that a kernel needs to turn manager ids into virtual page ids.
// Plain data: pass it by value.
struct PageMap {
  int64_t num_blocks;           // B
  int64_t block_step;           // S / g: virtual pages from block b to block b + 1
  int64_t page_step;            // u / g: virtual pages from kernel page j to j + 1
  int64_t page_stride;          // g: bytes from virtual page v to v + 1
  int64_t num_virtual_pages;    // ids 0 .. num_virtual_pages - 1 lie whole inside the blocks
  FastDivisor block_tokens;     // N
  FastDivisor page_tokens;      // P
  FastDivisor pages_per_block;  // r = N / P
  FastDivisor64 slot_block;     // N once more: slots are wider than tokens of a sequence
};

// Why no page map exists for a geometry and a page size.
enum class PageMapStatus : int32_t {
  kOk = 0,
  kNonPositiveSize,    // a count or size below one
  kNegativeStride,     // a stride below zero, or a block or token stride of zero
  kTooManyTokens,      // N above 2^31 - 1
  kPageDoesNotDivide,  // P does not divide N
  kAddressOverflow,    // an address of the geometry does not fit 63 bits
};

namespace internal {

inline constexpr int64_t kMaxInt64 = INT64_MAX;

REPAGE_HOST_DEVICE constexpr bool ProductFits(int64_t count, int64_t stride) {
  return count == 0 || stride <= kMaxInt64 / count;
}

// std::gcd is not callable from device code with every compiler.
REPAGE_HOST_DEVICE constexpr int64_t Gcd(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t remainder = a % b;
    a = b;
    b = remainder;
  }
  return a;
}

}  // namespace internal

REPAGE_HOST_DEVICE constexpr PageMapStatus CheckPageMap(const BlockGeometry& g,
                                                        int64_t page_tokens) {
  if (g.num_blocks < 1 || g.block_tokens < 1 || g.num_heads < 1 || g.content_bytes < 1 ||
      page_tokens < 1) {
    return PageMapStatus::kNonPositiveSize;
  }
  if (g.block_stride < 1 || g.token_stride < 1 || g.head_stride < 0) {
    return PageMapStatus::kNegativeStride;
  }
  if (g.block_tokens > INT32_MAX) return PageMapStatus::kTooManyTokens;
  if (g.block_tokens % page_tokens != 0) return PageMapStatus::kPageDoesNotDivide;
  // Each of the four terms of the extent must stay below a quarter of the range,
  // so that their sum cannot wrap. N * token_stride bounds the page unit as well.
  constexpr int64_t kQuarter = internal::kMaxInt64 / 4;
  if (g.content_bytes > kQuarter || !internal::ProductFits(4 * g.block_tokens, g.token_stride) ||
      g.num_heads > kQuarter || !internal::ProductFits(4 * g.num_heads, g.head_stride) ||
      g.num_blocks > kQuarter || !internal::ProductFits(4 * g.num_blocks, g.block_stride)) {
    return PageMapStatus::kAddressOverflow;
  }
  // A virtual slot is (page id * P + offset): the largest one must fit as well.
  const int64_t unit = page_tokens * g.token_stride;
  const int64_t last =
      (g.num_blocks - 1) * g.block_stride + (g.block_tokens * g.token_stride - unit);
  if (!internal::ProductFits(page_tokens, last / internal::Gcd(g.block_stride, unit) + 1)) {
    return PageMapStatus::kAddressOverflow;
  }
  return PageMapStatus::kOk;
}

// The id of kernel page `index` (0 <= index < N / P) of manager block `block`.
REPAGE_HOST_DEVICE constexpr int64_t PageId(const PageMap& map, int64_t block, int64_t index) {
  return block * map.block_step + index * map.page_step;
}

REPAGE_HOST_DEVICE constexpr int64_t MaxPageId(const PageMap& map) {
  return PageId(map, map.num_blocks - 1, map.pages_per_block.divisor - 1);
}

// Precondition: CheckPageMap(geometry, page_tokens) == kOk.
REPAGE_HOST_DEVICE constexpr PageMap MakePageMap(const BlockGeometry& geometry,
                                                 int64_t page_tokens) {
  const int64_t unit = page_tokens * geometry.token_stride;
  const int64_t page_stride = internal::Gcd(geometry.block_stride, unit);
  PageMap map{};
  map.num_blocks = geometry.num_blocks;
  map.block_step = geometry.block_stride / page_stride;
  map.page_step = unit / page_stride;
  map.page_stride = page_stride;
  map.block_tokens = MakeFastDivisor(static_cast<int32_t>(geometry.block_tokens));
  map.slot_block = MakeFastDivisor64(static_cast<int32_t>(geometry.block_tokens));
  map.page_tokens = MakeFastDivisor(static_cast<int32_t>(page_tokens));
  map.pages_per_block = MakeFastDivisor(static_cast<int32_t>(geometry.block_tokens / page_tokens));
  // The last page of the last block is the last whole page in memory, so every
  // smaller id ends inside the blocks too. One more would not, for the layer
  // that is packed last.
  map.num_virtual_pages = MaxPageId(map) + 1;
  return map;
}

// Where a token of a sequence lies, in terms of the sequence's manager block table.
struct TokenLocation {
  int32_t block_column;    // column of the manager block table
  int32_t page_index;      // kernel page inside that block
  int32_t offset_in_page;  // token inside that page
};

// Precondition: 0 <= token < 2^31.
REPAGE_HOST_DEVICE constexpr TokenLocation LocateToken(const PageMap& map, int32_t token) {
  const int32_t column = map.block_tokens.Quotient(token);
  const int32_t in_block = token - column * map.block_tokens.divisor;
  const int32_t index = map.page_tokens.Quotient(in_block);
  return {column, index, in_block - index * map.page_tokens.divisor};
}

// The slot (page id * P + offset in the page) which addresses through virtual
// pages the token that manager slot `slot` (block * N + offset) addresses.
// Negative slots (padding) stay as they are. A slot past the pool has no
// address: it becomes -1, which writers skip.
REPAGE_HOST_DEVICE constexpr int64_t VirtualSlot(const PageMap& map, int64_t slot) {
  if (slot < 0) return slot;
  const int64_t block = map.slot_block.Quotient(slot);
  if (block >= map.num_blocks) return -1;
  const int32_t in_block = static_cast<int32_t>(slot - block * map.block_tokens.divisor);
  const int32_t index = map.page_tokens.Quotient(in_block);
  return PageId(map, block, index) * map.page_tokens.divisor +
         (in_block - index * map.page_tokens.divisor);
}

// Tokens in the last page of a sequence; 0 for an empty one.
REPAGE_HOST_DEVICE constexpr int32_t LastPageLength(const FastDivisor& page_tokens,
                                                    int32_t seq_len) {
  if (seq_len <= 0) return 0;
  const int32_t last_token = seq_len - 1;
  return last_token - page_tokens.Quotient(last_token) * page_tokens.divisor + 1;
}

// Table entries are int32. Ids outside the pool read the first page of block 0,
// which serving engines keep as the null block: a valid address, never a wild one.
// Precondition: MaxPageId(map) <= INT32_MAX.
REPAGE_HOST_DEVICE constexpr int32_t FirstPageOfBlock(const PageMap& map, int32_t block) {
  const bool inside = static_cast<uint32_t>(block) < static_cast<uint64_t>(map.num_blocks);
  return inside ? block * static_cast<int32_t>(map.block_step) : 0;
}

}  // namespace repage
