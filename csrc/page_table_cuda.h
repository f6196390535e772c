// SPDX-License-Identifier: Apache-2.0
//
// Launchers of the CUDA kernels. Each enqueues exactly one launch (none when
// there is nothing to do) on the caller's stream, allocates nothing and never
// waits for the device, so that CUDA graphs can capture it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "csrc/page_table_params.h"

namespace repage::cuda {

// A CUDA runtime call failed.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A device ordinal and a stream of it (a cudaStream_t as an integer; 0 is the
// default stream).
struct Stream {
  int32_t device;
  uint64_t handle;
};

void BuildPageTable(const PageTableParams& params, Stream stream);
void BuildKvIndices(const KvIndicesParams& params, Stream stream);
void BuildGroupTables(const GroupTablesParams& params, Stream stream);
void MapSlots(const SlotMapParams& params, Stream stream);
void LastPageLen(const LastPageLenParams& params, Stream stream);

// CUDA runtime version that this module was built with (major * 1000 + minor * 10).
int32_t RuntimeVersion();

}  // namespace repage::cuda
