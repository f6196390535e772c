// SPDX-License-Identifier: Apache-2.0
//
// Where the tokens of one layer lie inside packed manager blocks.
#pragma once

#include <cstdint>

#include "repage/host_device.h"

namespace repage {

// Memory order of one block, outermost first. L is the layer dimension.
enum class Interior : int32_t {
  kNHC = 0,   // BLNHC: tokens, then heads, then content
  kHNC = 1,   // BLHNC: heads, then tokens, then content
  kHLNC = 2,  // BHLNC: heads, then layers, then tokens, then content
};

// One layer's share of a pool of packed blocks. All strides and sizes are bytes.
//
// The address of (block b, token t, head h) is
//   base + b * block_stride + h * head_stride + t * token_stride
// where base already contains the layer's offset inside the block.
struct BlockGeometry {
  int64_t num_blocks;     // B: manager blocks in the pool
  int64_t block_tokens;   // N: tokens in a manager block
  int64_t num_heads;      // H: KV heads of this layer on this rank
  int64_t content_bytes;  // E: K and V of one token and head
  int64_t block_stride;   // S: from block b to block b + 1 (the whole packed block)
  int64_t head_stride;    // from head h to h + 1
  int64_t token_stride;   // from token t to t + 1
};

// Strides of a layer whose block interior is dense. `layers_in_block` matters
// for kHLNC only: there the pages of all the layers lie between two heads.
REPAGE_HOST_DEVICE constexpr BlockGeometry MakeDenseInterior(
    Interior interior, int64_t num_blocks, int64_t block_tokens, int64_t num_heads,
    int64_t content_bytes, int64_t block_stride, int64_t layers_in_block = 1) {
  const int64_t run = block_tokens * content_bytes;
  switch (interior) {
    case Interior::kNHC:
      return {num_blocks,
              block_tokens,
              num_heads,
              content_bytes,
              block_stride,
              content_bytes,
              num_heads * content_bytes};
    case Interior::kHNC:
      return {num_blocks, block_tokens, num_heads, content_bytes, block_stride, run, content_bytes};
    case Interior::kHLNC:
      break;
  }
  return {num_blocks,   block_tokens,          num_heads,    content_bytes,
          block_stride, run * layers_in_block, content_bytes};
}

// Byte offset of one token of one head, relative to the layer's first block.
// This is all that a kernel needs which walks manager block tables by itself.
REPAGE_HOST_DEVICE constexpr int64_t TokenByteOffset(const BlockGeometry& geometry, int64_t block,
                                                     int64_t token_in_block, int64_t head) {
  return block * geometry.block_stride + head * geometry.head_stride +
         token_in_block * geometry.token_stride;
}

// Bytes from the first byte of block 0 to one past the last byte of the last block.
REPAGE_HOST_DEVICE constexpr int64_t ExtentBytes(const BlockGeometry& geometry) {
  return TokenByteOffset(geometry, geometry.num_blocks - 1, geometry.block_tokens - 1,
                         geometry.num_heads - 1) +
         geometry.content_bytes;
}

}  // namespace repage
