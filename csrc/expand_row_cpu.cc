// SPDX-License-Identifier: Apache-2.0
#include "csrc/expand_row_cpu.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// Widest vectors to use, for tests of the others: 512, 256, or 0 for what the compiler makes.
#ifndef REPAGE_MAX_VECTOR_BITS
#define REPAGE_MAX_VECTOR_BITS 512
#endif

// The processor is asked once, so that one build serves every x86-64.
#if defined(__x86_64__) && defined(__GNUC__)
#define REPAGE_X86_VECTORS
#include <immintrin.h>
#endif

namespace repage::cpu {
namespace {

constexpr int32_t kLanes = 16;

// The two inner loops, for one kind of processor.
struct Vectors {
  // Runs of kLanes blocks of fewer than kLanes pages; `block` and `offset` say where each entry of
  // a run comes from.
  void (*expand_runs)(const PageMap& map, const int32_t* block, const int32_t* offset,
                      const int32_t* row, int32_t runs, int32_t* out);
  // Whole blocks of at least kLanes pages.
  void (*expand_blocks)(const PageMap& map, const int32_t* row, int32_t blocks, int32_t* out);
  // A row of blocks of at least kLanes pages, past the caches; null where that cannot be had.
  void (*stream_row)(const PageMap& map, const int32_t* row, int32_t columns, int32_t* out);
};

void ExpandRunsPortable(const PageMap& map, const int32_t* block, const int32_t* offset,
                        const int32_t* row, int32_t runs, int32_t* out) {
  const int32_t entries = kLanes * map.pages_per_block.divisor;
  for (; runs > 0; --runs, row += kLanes, out += entries) {
    int32_t first[kLanes];
    for (int32_t lane = 0; lane < kLanes; ++lane) first[lane] = FirstPageOfBlock(map, row[lane]);
    for (int32_t entry = 0; entry < entries; ++entry) {
      out[entry] = first[block[entry]] + offset[entry];
    }
  }
}

void ExpandBlocksPortable(const PageMap& map, const int32_t* row, int32_t blocks, int32_t* out) {
  const int32_t pages = map.pages_per_block.divisor;
  const uint32_t page_step = static_cast<uint32_t>(map.page_step);
  for (; blocks > 0; --blocks, out += pages) {
    const uint32_t first = static_cast<uint32_t>(FirstPageOfBlock(map, *row++));
    for (int32_t page = 0; page < pages; ++page) {
      out[page] = static_cast<int32_t>(first + static_cast<uint32_t>(page) * page_step);
    }
  }
}

#ifdef REPAGE_X86_VECTORS

constexpr int32_t kHalf = kLanes / 2;

// Block ids from this one on lie outside the pool (compared unsigned, so negative ones do too).
uint32_t FirstIdOutside(const PageMap& map) {
  return static_cast<uint32_t>(std::min<int64_t>(map.num_blocks, int64_t{1} << 31));
}

__attribute__((target("avx512f"))) void ExpandRunsAvx512(const PageMap& map, const int32_t* block,
                                                         const int32_t* offset, const int32_t* row,
                                                         int32_t runs, int32_t* out) {
  const int32_t vectors = map.pages_per_block.divisor;
  const __m512i step = _mm512_set1_epi32(static_cast<int32_t>(map.block_step));
  const __m512i outside = _mm512_set1_epi32(static_cast<int32_t>(FirstIdOutside(map)));
  for (; runs > 0; --runs, row += kLanes) {
    const __m512i ids = _mm512_loadu_si512(row);
    const __m512i first =
        _mm512_maskz_mullo_epi32(_mm512_cmplt_epu32_mask(ids, outside), ids, step);
    for (int32_t vector = 0; vector < vectors; ++vector, out += kLanes) {
      const __m512i pages =
          _mm512_permutexvar_epi32(_mm512_load_si512(block + vector * kLanes), first);
      _mm512_storeu_si512(out,
                          _mm512_add_epi32(pages, _mm512_load_si512(offset + vector * kLanes)));
    }
  }
}

__attribute__((target("avx2"))) void ExpandRunsAvx2(const PageMap& map, const int32_t* block,
                                                    const int32_t* offset, const int32_t* row,
                                                    int32_t runs, int32_t* out) {
  const int32_t vectors = map.pages_per_block.divisor;
  const __m256i step = _mm256_set1_epi32(static_cast<int32_t>(map.block_step));
  const __m256i last = _mm256_set1_epi32(static_cast<int32_t>(FirstIdOutside(map) - 1));
  for (int32_t half = 0; half < 2 * runs; ++half, row += kHalf) {
    const __m256i ids = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
    const __m256i inside = _mm256_cmpeq_epi32(_mm256_min_epu32(ids, last), ids);
    const __m256i first = _mm256_and_si256(_mm256_mullo_epi32(ids, step), inside);
    // The entries of 8 blocks are the first half of those of 16.
    for (int32_t vector = 0; vector < vectors; ++vector, out += kHalf) {
      const __m256i source =
          _mm256_load_si256(reinterpret_cast<const __m256i*>(block + vector * kHalf));
      const __m256i pages = _mm256_permutevar8x32_epi32(first, source);
      const __m256i distance =
          _mm256_load_si256(reinterpret_cast<const __m256i*>(offset + vector * kHalf));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_add_epi32(pages, distance));
    }
  }
}

__attribute__((target("avx512f"))) void ExpandBlocksAvx512(const PageMap& map, const int32_t* row,
                                                           int32_t blocks, int32_t* out) {
  const int32_t pages = map.pages_per_block.divisor;
  const int32_t whole = pages / kLanes * kLanes;
  const __mmask16 rest = static_cast<__mmask16>((1U << (pages - whole)) - 1);
  const __m512i page_step = _mm512_set1_epi32(static_cast<int32_t>(map.page_step));
  const __m512i lanes = _mm512_mullo_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), page_step);
  const __m512i vector_step = _mm512_slli_epi32(page_step, 4);
  for (; blocks > 0; --blocks, out += pages) {
    __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(FirstPageOfBlock(map, *row++)), lanes);
    int32_t page = 0;
    for (; page < whole; page += kLanes) {
      _mm512_storeu_si512(out + page, ids);
      ids = _mm512_add_epi32(ids, vector_step);
    }
    if (rest != 0) _mm512_mask_storeu_epi32(out + page, rest, ids);
  }
}

// The last vector of a block ends where the block does and writes some entries again.
__attribute__((target("avx2"))) void ExpandBlocksAvx2(const PageMap& map, const int32_t* row,
                                                      int32_t blocks, int32_t* out) {
  const int32_t pages = map.pages_per_block.divisor;
  const int32_t whole = pages / kHalf * kHalf;
  const __m256i page_step = _mm256_set1_epi32(static_cast<int32_t>(map.page_step));
  const __m256i lanes = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), page_step);
  const __m256i vector_step = _mm256_slli_epi32(page_step, 3);
  const __m256i last =
      _mm256_add_epi32(lanes, _mm256_mullo_epi32(_mm256_set1_epi32(pages - kHalf), page_step));
  for (; blocks > 0; --blocks, out += pages) {
    const __m256i first = _mm256_set1_epi32(FirstPageOfBlock(map, *row++));
    __m256i ids = _mm256_add_epi32(first, lanes);
    for (int32_t page = 0; page < whole; page += kHalf) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + page), ids);
      ids = _mm256_add_epi32(ids, vector_step);
    }
    if (whole < pages) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + pages - kHalf),
                          _mm256_add_epi32(first, last));
    }
  }
}

// A store past the caches is fast where it writes a whole line, which is as long as a vector. So
// vectors lie in lines here, cross from a block into the next one, and the ends of the row go entry
// by entry.
__attribute__((target("avx512f"))) void StreamRowAvx512(const PageMap& map, const int32_t* row,
                                                        int32_t columns, int32_t* out) {
  constexpr uintptr_t kLine = kLanes * sizeof(int32_t);
  const int32_t pages = map.pages_per_block.divisor;
  const uint32_t page_step = static_cast<uint32_t>(map.page_step);
  const uintptr_t into_line = reinterpret_cast<uintptr_t>(out) % kLine;
  const int32_t lead = static_cast<int32_t>((kLine - into_line) % kLine / sizeof(int32_t));
  const __m512i lanes =
      _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(static_cast<int32_t>(page_step)));
  uint32_t first = static_cast<uint32_t>(FirstPageOfBlock(map, *row));
  int32_t page = 0;
  const auto write_entries = [&](int32_t begin, int32_t end) {
    for (int32_t column = begin; column < end; ++column, ++page) {
      if (page == pages) {
        first = static_cast<uint32_t>(FirstPageOfBlock(map, *++row));
        page = 0;
      }
      out[column] = static_cast<int32_t>(first + static_cast<uint32_t>(page) * page_step);
    }
  };
  int32_t column = std::min(lead, columns);
  write_entries(0, column);
  for (; columns - column >= kLanes; column += kLanes) {
    const uint32_t at = first + static_cast<uint32_t>(page) * page_step;
    __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(at)), lanes);
    const int32_t left = pages - page;
    page += kLanes;
    if (left < kLanes) {
      first = static_cast<uint32_t>(FirstPageOfBlock(map, *++row));
      page -= pages;
      const __mmask16 in_next = static_cast<__mmask16>(0xFFFFU << left);
      const uint32_t before = first - static_cast<uint32_t>(left) * page_step;
      ids = _mm512_mask_add_epi32(ids, in_next, _mm512_set1_epi32(static_cast<int32_t>(before)),
                                  lanes);
    }
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + column), ids);
  }
  write_entries(column, columns);
  _mm_sfence();
}

Vectors PickVectors() {
  constexpr int kMaxBits = REPAGE_MAX_VECTOR_BITS;
  if (kMaxBits >= 512 && __builtin_cpu_supports("avx512f"))
    return {ExpandRunsAvx512, ExpandBlocksAvx512, StreamRowAvx512};
  if (kMaxBits >= 256 && __builtin_cpu_supports("avx2"))
    return {ExpandRunsAvx2, ExpandBlocksAvx2, nullptr};
  return {ExpandRunsPortable, ExpandBlocksPortable, nullptr};
}

#else

Vectors PickVectors() { return {ExpandRunsPortable, ExpandBlocksPortable, nullptr}; }

#endif

const Vectors kVectors = PickVectors();

}  // namespace

RowExpander::RowExpander(const PageMap& map, int32_t block_columns) : map_(map) {
  static_assert(kRun == kLanes);
  const int32_t pages = map.pages_per_block.divisor;
  shares_vectors_ = pages < kLanes && block_columns >= kRun;
  if (!shares_vectors_) return;
  int32_t entry = 0;
  for (int32_t block = 0; block < kRun; ++block) {
    for (int32_t page = 0; page < pages; ++page, ++entry) {
      block_[entry] = block;
      offset_[entry] = page * static_cast<int32_t>(map.page_step);
    }
  }
}

void RowExpander::Expand(const int32_t* row, int32_t columns, bool past_caches,
                         int32_t* out) const {
  const int32_t pages = map_.pages_per_block.divisor;
  if (shares_vectors_) return ExpandRuns(row, columns, out);
  if (past_caches && pages >= kLanes && kVectors.stream_row != nullptr) {
    return kVectors.stream_row(map_, row, columns, out);
  }
  int32_t written = 0;
  if (pages >= kLanes) {
    const int32_t blocks = map_.pages_per_block.Quotient(columns);
    kVectors.expand_blocks(map_, row, blocks, out);
    row += blocks;
    written = blocks * pages;
  }
  for (; written < columns; written += pages, ++row) {
    const int32_t first = FirstPageOfBlock(map_, *row);
    const int32_t count = std::min(pages, columns - written);
    for (int32_t index = 0; index < count; ++index) {
      out[written + index] = first + index * static_cast<int32_t>(map_.page_step);
    }
  }
}

void RowExpander::ExpandRuns(const int32_t* row, int32_t columns, int32_t* out) const {
  const int32_t pages = map_.pages_per_block.divisor;
  const int32_t runs = map_.pages_per_block.Quotient(columns) / kRun;
  kVectors.expand_runs(map_, block_, offset_, row, runs, out);
  row += int64_t{runs} * kRun;
  out += int64_t{runs} * kRun * pages;
  const int32_t rest = columns - runs * kRun * pages;
  if (rest == 0) return;
  // The last blocks go through a whole run of their own, for ids that lie in the row only.
  int32_t blocks[kRun] = {};
  alignas(64) int32_t entries[kRun * kRun];
  const int32_t used = map_.pages_per_block.Quotient(rest + pages - 1);
  std::memcpy(blocks, row, static_cast<size_t>(used) * sizeof(int32_t));
  kVectors.expand_runs(map_, block_, offset_, blocks, 1, entries);
  std::memcpy(out, entries, static_cast<size_t>(rest) * sizeof(int32_t));
}

}  // namespace repage::cpu
