// SPDX-License-Identifier: Apache-2.0
//
// Division by a run-time constant without a divide instruction.
#pragma once

#include <cstdint>

#include "repage/host_device.h"

namespace repage {

// Divides 31-bit numerators by one divisor with a multiplication and a shift.
//
// With l = ceil(log2(d)) and m = ceil(2^(31+l) / d), floor(n / d) equals
// (n * m) >> (31 + l) for every 0 <= n < 2^31: the rounding excess
// e = m*d - 2^(31+l) is below d <= 2^l, so n*e < 2^(31+l) and never carries.
// m < 2^32 because 2^l < 2*d. (Granlund and Montgomery, "Division by Invariant
// Integers using Multiplication", 1994, theorem 4.2.)
struct FastDivisor {
  int32_t divisor;      // 1 <= divisor < 2^31
  uint32_t multiplier;  // m
  int32_t shift;        // 31 + l

  REPAGE_HOST_DEVICE constexpr int32_t Quotient(int32_t numerator) const {
    return static_cast<int32_t>(
        (static_cast<uint64_t>(static_cast<uint32_t>(numerator)) * multiplier) >> shift);
  }
};

// Precondition: divisor >= 1.
REPAGE_HOST_DEVICE constexpr FastDivisor MakeFastDivisor(int32_t divisor) {
  int32_t log2_ceil = 0;
  while ((int64_t{1} << log2_ceil) < divisor) ++log2_ceil;
  const uint64_t power = uint64_t{1} << (31 + log2_ceil);
  const uint64_t d = static_cast<uint64_t>(divisor);
  return FastDivisor{divisor, static_cast<uint32_t>((power + d - 1) / d), 31 + log2_ceil};
}

}  // namespace repage
