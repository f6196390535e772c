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

// The same for 63-bit numerators, with m = ceil(2^(63+l) / d). One product of
// 64 by 64 bits, of which the upper half is used.
struct FastDivisor64 {
  uint64_t multiplier;  // m
  int32_t shift;        // l

  REPAGE_HOST_DEVICE constexpr int64_t Quotient(int64_t numerator) const {
    // 2 * n, so that the upper half is the product without its lowest 63 bits.
    const uint64_t doubled = static_cast<uint64_t>(numerator) << 1;
    return static_cast<int64_t>(UpperHalf(doubled, multiplier) >> shift);
  }

 private:
  // Of the product of two 64-bit numbers, from four of 32-bit ones: nothing
  // wider is known to every compiler.
  REPAGE_HOST_DEVICE static constexpr uint64_t UpperHalf(uint64_t a, uint64_t b) {
    const uint64_t a_low = a & UINT32_MAX, a_high = a >> 32;
    const uint64_t b_low = b & UINT32_MAX, b_high = b >> 32;
    const uint64_t low = a_low * b_low;
    const uint64_t middle = a_high * b_low + (low >> 32);
    const uint64_t other_middle = a_low * b_high + (middle & UINT32_MAX);
    return a_high * b_high + (middle >> 32) + (other_middle >> 32);
  }
};

// Precondition: divisor >= 1.
REPAGE_HOST_DEVICE constexpr FastDivisor64 MakeFastDivisor64(int32_t divisor) {
  const uint64_t d = static_cast<uint64_t>(divisor);
  int32_t log2_ceil = 0;
  while ((uint64_t{1} << log2_ceil) < d) ++log2_ceil;
  // Long division: 2^(63+l), a one and 63 + l zeros, does not fit 64 bits.
  uint64_t quotient = 0;
  uint64_t remainder = 0;
  for (int32_t digit = 0; digit < 64 + log2_ceil; ++digit) {
    remainder = (remainder << 1) + (digit == 0 ? 1 : 0);
    quotient <<= 1;
    if (remainder >= d) {
      remainder -= d;
      ++quotient;
    }
  }
  return FastDivisor64{quotient + (remainder != 0 ? 1 : 0), log2_ceil};
}

}  // namespace repage
