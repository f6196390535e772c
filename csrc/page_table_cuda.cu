// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "csrc/launch_shape.h"
#include "csrc/page_table_cuda.h"
#include "csrc/page_table_kernels.cuh"

namespace repage::cuda {
namespace {

void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  // Clears the error where it is not sticky, so that it does not surface in
  // somebody else's next call.
  (void)cudaGetLastError();
  throw CudaError(std::string(what) + ": " + cudaGetErrorName(status) + " (" +
                  cudaGetErrorString(status) + ")");
}

// Makes a device current for one scope.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device) : device_(device) {
    Check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device_) Check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (previous_ != device_) (void)cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int32_t device_;
  int32_t previous_ = 0;
};

template <typename Params>
void Launch(void (*kernel)(Params), const Params& params, GridShape grid, Stream stream,
            const char* name) {
  const DeviceScope scope(stream.device);
  kernel<<<dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y)), kThreadsPerBlock, 0,
           reinterpret_cast<cudaStream_t>(stream.handle)>>>(params);
  Check(cudaGetLastError(), name);
}

}  // namespace

void BuildPageTable(const PageTableParams& params, Stream stream) {
  if (params.table_rows == 0 || params.block_columns == 0) return;
  Launch(BuildPageTableKernel, params, RowGrid(params.table_rows, params.row_parts), stream,
         "build_page_table");
}

void BuildKvIndices(const KvIndicesParams& params, Stream stream) {
  if (params.num_rows == 0 || params.kv_indices_size == 0) return;
  Launch(BuildKvIndicesKernel, params, RowGrid(params.num_rows, params.row_parts), stream,
         "build_kv_indices");
}

void BuildGroupTables(const GroupTablesParams& params, Stream stream) {
  if (params.indices.num_rows == 0 || params.indices.kv_indices_size == 0) {
    BuildPageTable(params.table, stream);
  } else if (params.table.table_rows == 0 || params.table.block_columns == 0) {
    BuildKvIndices(params.indices, stream);
  } else {
    Launch(BuildGroupTablesKernel, params,
           GroupGrid(params.table.table_rows, params.table.row_parts), stream,
           "build_group_tables");
  }
}

void MapSlots(const SlotMapParams& params, Stream stream) {
  if (params.num_slots == 0) return;
  // One more slot than asked for: the first group may begin before the output.
  Launch(MapSlotsKernel, params, FlatGrid(params.num_slots + 1, 2 * kThreadsPerBlock), stream,
         "map_slots");
}

void LastPageLen(const LastPageLenParams& params, Stream stream) {
  if (params.num_rows == 0) return;
  Launch(LastPageLenKernel, params, FlatGrid(params.num_rows, kThreadsPerBlock), stream,
         "last_page_len");
}

int32_t RuntimeVersion() { return CUDART_VERSION; }

}  // namespace repage::cuda
