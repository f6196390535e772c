// SPDX-License-Identifier: Apache-2.0
//
// The boundary to Python: pointers, sizes, strides and a stream as integers.
// Arguments were checked by the Python package, which is the only caller.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "csrc/dispatch.h"
#include "csrc/launch_shape.h"
#include "csrc/page_table_params.h"
#include "csrc/table_builder.h"
#include "csrc/tensor_exchange.h"
#include "repage/page_map.h"
#ifdef REPAGE_WITH_CUDA
#include "csrc/nvtx_ranges.h"
#endif

namespace py = pybind11;

namespace repage {
namespace {

template <typename T>
T* Pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Thread blocks per row; the CPU twins take a row at once.
int32_t RowPartsOn(int64_t rows, int64_t columns, int32_t device) {
  return device == kCpu ? 1 : RowParts(rows, columns);
}

PageTableParams TableParams(const PageMap& map, uintptr_t block_table,
                            int64_t block_table_row_stride, uintptr_t seq_lens,
                            uintptr_t page_table, uintptr_t watermarks, int32_t num_rows,
                            int32_t table_rows, int32_t block_columns, int32_t lookahead,
                            int32_t row_parts) {
  return {Pointer<const int32_t>(block_table),
          block_table_row_stride,
          Pointer<const int32_t>(seq_lens),
          Pointer<int32_t>(page_table),
          Pointer<int32_t>(watermarks),
          num_rows,
          table_rows,
          block_columns,
          lookahead,
          row_parts,
          map};
}

void BuildPageTable(const PageMap& map, uintptr_t block_table, int64_t block_table_row_stride,
                    uintptr_t seq_lens, uintptr_t page_table, uintptr_t watermarks,
                    int32_t num_rows, int32_t table_rows, int32_t block_columns, int32_t lookahead,
                    int32_t row_parts, int32_t device, uint64_t stream) {
  const PageTableParams params =
      TableParams(map, block_table, block_table_row_stride, seq_lens, page_table, watermarks,
                  num_rows, table_rows, block_columns, lookahead, row_parts);
  REPAGE_DISPATCH(BuildPageTable, params, device, stream);
}

void BuildKvIndices(const PageMap& map, uintptr_t block_table, int64_t block_table_row_stride,
                    uintptr_t kv_indptr, uintptr_t kv_indices, int64_t kv_indices_size,
                    int32_t num_rows, int32_t block_columns, int32_t row_parts, int32_t device,
                    uint64_t stream) {
  const KvIndicesParams params{Pointer<const int32_t>(block_table),
                               block_table_row_stride,
                               Pointer<const int32_t>(kv_indptr),
                               Pointer<int32_t>(kv_indices),
                               kv_indices_size,
                               num_rows,
                               block_columns,
                               row_parts,
                               map};
  REPAGE_DISPATCH(BuildKvIndices, params, device, stream);
}

void BuildGroupTables(const PageMap& map, uintptr_t block_table, int64_t block_table_row_stride,
                      uintptr_t seq_lens, uintptr_t page_table, uintptr_t watermarks,
                      uintptr_t kv_indptr, uintptr_t kv_indices, int64_t kv_indices_size,
                      int32_t num_rows, int32_t table_rows, int32_t block_columns,
                      int32_t lookahead, int32_t row_parts, int32_t device, uint64_t stream) {
  const GroupTablesParams params{
      TableParams(map, block_table, block_table_row_stride, seq_lens, page_table, watermarks,
                  num_rows, table_rows, block_columns, lookahead, row_parts),
      {Pointer<const int32_t>(block_table), block_table_row_stride,
       Pointer<const int32_t>(kv_indptr), Pointer<int32_t>(kv_indices), kv_indices_size, num_rows,
       block_columns, row_parts, map}};
  REPAGE_DISPATCH(BuildGroupTables, params, device, stream);
}

void MapSlots(const PageMap& map, uintptr_t slot_mapping, uintptr_t virtual_slots,
              int64_t num_slots, int32_t device, uint64_t stream) {
  const SlotMapParams params{Pointer<const int64_t>(slot_mapping), Pointer<int64_t>(virtual_slots),
                             num_slots, map};
  REPAGE_DISPATCH(MapSlots, params, device, stream);
}

void LastPageLen(int32_t page_tokens, uintptr_t seq_lens, uintptr_t last_page_len, int64_t num_rows,
                 int32_t device, uint64_t stream) {
  const LastPageLenParams params{Pointer<const int32_t>(seq_lens), Pointer<int32_t>(last_page_len),
                                 num_rows, MakeFastDivisor(page_tokens)};
  REPAGE_DISPATCH(LastPageLen, params, device, stream);
}

// A `TableBuilder` for tensors of one Python type.
class TensorTableBuilder {
 public:
  TensorTableBuilder(const PageMap& map, uintptr_t page_table, uintptr_t watermarks,
                     int32_t max_rows, int32_t block_columns, int32_t lookahead, int32_t row_parts,
                     int32_t device, const py::type& tensor_type)
      : builder_(TableParams(map, 0, 0, 0, page_table, watermarks, 0, max_rows, block_columns,
                             lookahead, row_parts),
                 device),
        exchange_(reinterpret_cast<PyTypeObject*>(tensor_type.ptr())) {}

  // Returns the rows, or -1 without a launch when the tensors want the caller's
  // closer look: they are of another type, or not what the table needs.
  int32_t Build(py::handle block_table, py::handle seq_lens, py::handle kv_indptr,
                py::handle kv_indices) {
    DLTensor tensors[4];
    const DLTensor* given[4] = {};
    const py::handle handles[4] = {block_table, seq_lens, kv_indptr, kv_indices};
    for (int i = 0; i < 4; ++i) {
      if (i > 0 && handles[i].is_none()) continue;
      if (!exchange_.Read(handles[i].ptr(), &tensors[i])) return -1;
      given[i] = &tensors[i];
    }
    uint64_t stream = 0;
    const auto batch = builder_.Read(*given[0], given[1], given[2], given[3]);
    if (!batch || !FindStream(&stream)) return -1;
    builder_.Build(*batch, stream);
    return batch->num_rows;
  }

  // The same for the CSR form alone.
  int32_t BuildList(py::handle block_table, py::handle kv_indptr, py::handle kv_indices) const {
    DLTensor table;
    DLTensor indptr;
    DLTensor indices;
    if (!exchange_.Read(block_table.ptr(), &table) || !exchange_.Read(kv_indptr.ptr(), &indptr) ||
        !exchange_.Read(kv_indices.ptr(), &indices)) {
      return -1;
    }
    uint64_t stream = 0;
    const auto batch = builder_.ReadList(table, indptr, indices);
    if (!batch || !FindStream(&stream)) return -1;
    builder_.BuildList(*batch, stream);
    return batch->num_rows;
  }

  // `Build` for tensors that the caller has looked at.
  void Launch(uintptr_t block_table, int64_t block_table_row_stride, uintptr_t seq_lens,
              uintptr_t kv_indptr, uintptr_t kv_indices, int64_t kv_indices_size, int32_t num_rows,
              uint64_t stream) {
    builder_.Build({Pointer<const int32_t>(block_table), block_table_row_stride,
                    Pointer<const int32_t>(seq_lens), Pointer<const int32_t>(kv_indptr),
                    Pointer<int32_t>(kv_indices), kv_indices_size, num_rows},
                   stream);
  }

 private:
  // False where only the caller can say what is wrong.
  bool FindStream(uint64_t* stream) const {
    if (builder_.device() == kCpu) return true;
    return kWithCuda && exchange_.CurrentStream(builder_.device(), stream);
  }

  TableBuilder builder_;
  TensorExchange exchange_;
};

BlockGeometry GeometryFromInts(int64_t num_blocks, int64_t block_tokens, int64_t num_heads,
                               int64_t content_bytes, int64_t block_stride, int64_t head_stride,
                               int64_t token_stride) {
  return {num_blocks,   block_tokens, num_heads,   content_bytes,
          block_stride, head_stride,  token_stride};
}

py::tuple Locate(const PageMap& map, int32_t token) {
  const TokenLocation location = LocateToken(map, token);
  return py::make_tuple(location.block_column, location.page_index, location.offset_in_page);
}

// The struct as it lies in memory, to pass by value to kernels launched from Python.
py::bytes ToBytes(const PageMap& map) {
  static_assert(std::is_trivially_copyable_v<PageMap>);
  return py::bytes(reinterpret_cast<const char*>(&map), sizeof(map));
}

std::string Compiler() {
#if defined(__clang__)
  return std::string("clang ") + __clang_version__;
#elif defined(__GNUC__)
  return std::string("gcc ") + __VERSION__;
#else
  return "unknown";
#endif
}

void BindPageMap(py::module_& module) {
  py::enum_<PageMapStatus>(module, "PageMapStatus")
      .value("OK", PageMapStatus::kOk)
      .value("NON_POSITIVE_SIZE", PageMapStatus::kNonPositiveSize)
      .value("NEGATIVE_STRIDE", PageMapStatus::kNegativeStride)
      .value("TOO_MANY_TOKENS", PageMapStatus::kTooManyTokens)
      .value("PAGE_DOES_NOT_DIVIDE", PageMapStatus::kPageDoesNotDivide)
      .value("ADDRESS_OVERFLOW", PageMapStatus::kAddressOverflow);
  py::enum_<Interior>(module, "Interior")
      .value("NHC", Interior::kNHC)
      .value("HNC", Interior::kHNC)
      .value("HLNC", Interior::kHLNC);

  py::class_<BlockGeometry>(module, "BlockGeometry")
      .def(py::init(&GeometryFromInts), py::arg("num_blocks"), py::arg("block_tokens"),
           py::arg("num_heads"), py::arg("content_bytes"), py::arg("block_stride"),
           py::arg("head_stride"), py::arg("token_stride"))
      .def_static("dense", &MakeDenseInterior, py::arg("interior"), py::arg("num_blocks"),
                  py::arg("block_tokens"), py::arg("num_heads"), py::arg("content_bytes"),
                  py::arg("block_stride"), py::arg("layers_in_block"))
      .def_readonly("head_stride", &BlockGeometry::head_stride)
      .def_readonly("token_stride", &BlockGeometry::token_stride)
      .def("extent_bytes", &ExtentBytes)
      .def("check", &CheckPageMap, py::arg("page_tokens"))
      .def("page_map", &MakePageMap, py::arg("page_tokens"));

  py::class_<PageMap>(module, "PageMap")
      .def_readonly("block_step", &PageMap::block_step)
      .def_readonly("page_step", &PageMap::page_step)
      .def_readonly("page_stride", &PageMap::page_stride)
      .def_readonly("num_virtual_pages", &PageMap::num_virtual_pages)
      .def("page_id", &PageId, py::arg("block"), py::arg("index"))
      .def("max_page_id", &MaxPageId)
      .def("locate_token", &Locate, py::arg("token"))
      .def("virtual_slot", &VirtualSlot, py::arg("slot"))
      .def("to_bytes", &ToBytes);
}

void BindTableBuilder(py::module_& module) {
  py::class_<TensorTableBuilder>(module, "TableBuilder")
      .def(py::init<const PageMap&, uintptr_t, uintptr_t, int32_t, int32_t, int32_t, int32_t,
                    int32_t, const py::type&>(),
           py::keep_alive<1, 10>())
      .def("build", &TensorTableBuilder::Build, py::arg("block_table"),
           py::arg("seq_lens") = py::none(), py::arg("kv_indptr") = py::none(),
           py::arg("kv_indices") = py::none(), py::pos_only())
      .def("build_list", &TensorTableBuilder::BuildList)
      .def("launch", &TensorTableBuilder::Launch);
}

}  // namespace
}  // namespace repage

PYBIND11_MODULE(_core, module) {
  using namespace repage;
  module.doc() = "Compiled core of repage. Use the functions of the package instead.";
  BindPageMap(module);
  BindTableBuilder(module);
  module.def("build_page_table", &BuildPageTable);
  module.def("build_kv_indices", &BuildKvIndices);
  module.def("build_group_tables", &BuildGroupTables);
  module.def("row_parts", &RowPartsOn);
  module.def("map_slots", &MapSlots);
  module.def("last_page_len", &LastPageLen);
  module.attr("COMPILER") = Compiler();
  module.attr("CUDA_ARCHITECTURES") = REPAGE_CUDA_ARCHITECTURES;
#ifdef REPAGE_WITH_CUDA
  module.attr("CUDA_VERSION") = cuda::RuntimeVersion();
  module.def("nvtx_register", &nvtx::RegisterName);
  module.def("nvtx_push", &nvtx::Push);
  module.def("nvtx_pop", &nvtx::Pop);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const cuda::CudaError& error) {
      const py::object type = py::module_::import("repage.errors").attr("CudaLaunchError");
      PyErr_SetString(type.ptr(), error.what());
    }
  });
#else
  module.attr("CUDA_VERSION") = py::none();
#endif
}
