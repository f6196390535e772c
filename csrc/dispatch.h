// SPDX-License-Identifier: Apache-2.0
//
// Where an operation runs: on the processor, or on a device if this build can.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "csrc/page_table_cpu.h"
#ifdef REPAGE_WITH_CUDA
#include "csrc/page_table_cuda.h"
#endif

namespace repage {

// The device ordinal that stands for CPU memory.
inline constexpr int32_t kCpu = -1;

#ifdef REPAGE_WITH_CUDA
inline constexpr bool kWithCuda = true;
#define REPAGE_DISPATCH(operation, params, device, stream)   \
  do {                                                       \
    if ((device) == kCpu) {                                  \
      cpu::operation(params);                                \
    } else {                                                 \
      cuda::operation(params, cuda::Stream{device, stream}); \
    }                                                        \
  } while (false)
#else
inline constexpr bool kWithCuda = false;
#define REPAGE_DISPATCH(operation, params, device, stream)                                      \
  do {                                                                                          \
    (void)(stream);                                                                             \
    if ((device) != kCpu) throw std::invalid_argument("this build of repage has no CUDA code"); \
    cpu::operation(params);                                                                     \
  } while (false)
#endif

}  // namespace repage
