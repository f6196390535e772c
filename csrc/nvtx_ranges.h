// SPDX-License-Identifier: Apache-2.0
//
// Named ranges for profilers, in NVTX's domain `repage`. Built with the CUDA kernels, since the
// NVTX headers come with the CUDA toolkit; without a profiler a range costs a few nanoseconds.
#pragma once

#include <cstdint>
#include <string>

namespace repage::nvtx {

// Registers a name, once for many ranges; the handle is valid as long as the process.
uint64_t RegisterName(const std::string& name);

// Ranges nest per thread.
void Push(uint64_t name);
void Pop();

}  // namespace repage::nvtx
