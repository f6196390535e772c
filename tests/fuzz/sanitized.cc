// SPDX-License-Identifier: Apache-2.0
//
// The CPU twins behind a pipe, for a build with AddressSanitizer and UBSan: every
// array is a heap block of exactly its size, so a step outside of one ends the
// process with a report.
//
// A request is an operation, a count of sizes, the sizes, the page map, and the
// arrays, each as a count and its elements. The reply is the arrays it wrote.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "csrc/page_table_cpu.h"

namespace {

using repage::PageMap;

template <typename T>
class Array {
 public:
  explicit Array(int64_t size) : size_(size), data_(size > 0 ? new T[size] : nullptr) {}
  T* data() const { return data_.get(); }
  int64_t size() const { return size_; }

 private:
  int64_t size_;
  std::unique_ptr<T[]> data_;
};

template <typename T>
void Read(T* values, size_t count) {
  if (count != 0 && std::fread(values, sizeof(T), count, stdin) != count) std::exit(3);
}

int64_t ReadNumber() {
  int64_t number;
  if (std::fread(&number, sizeof(number), 1, stdin) != 1) std::exit(0);
  return number;
}

template <typename T>
Array<T> ReadArray() {
  Array<T> array(ReadNumber());
  Read(array.data(), static_cast<size_t>(array.size()));
  return array;
}

template <typename T>
void Write(const Array<T>& array) {
  if (array.size() != 0) {
    std::fwrite(array.data(), sizeof(T), static_cast<size_t>(array.size()), stdout);
  }
  std::fflush(stdout);
}

}  // namespace

int main() {
  for (;;) {
    const int64_t operation = ReadNumber();
    std::vector<int64_t> sizes(static_cast<size_t>(ReadNumber()));
    Read(sizes.data(), sizes.size());
    PageMap map;
    Read(reinterpret_cast<char*>(&map), sizeof(map));
    const auto size = [&](size_t index) { return static_cast<int32_t>(sizes[index]); };
    // Sizes of both table forms: row stride, rows, columns, table rows, lookahead, row parts,
    // whether there are lengths.
    if (operation == 0 || operation == 1) {
      const auto table = ReadArray<int32_t>();
      const auto lengths = ReadArray<int32_t>();
      const auto page_table = ReadArray<int32_t>();
      const auto marks = ReadArray<int32_t>();
      const auto indptr = ReadArray<int32_t>();
      const auto indices = ReadArray<int32_t>();
      // An empty array has no address, and a null one would mean "no lengths".
      const int32_t none = 0;
      repage::GroupTablesParams params{};
      params.table.block_table = params.indices.block_table = table.data();
      params.table.block_table_row_stride = params.indices.block_table_row_stride = sizes[0];
      params.table.num_rows = params.indices.num_rows = size(1);
      params.table.block_columns = params.indices.block_columns = size(2);
      params.table.table_rows = size(3);
      params.table.lookahead = size(4);
      params.table.row_parts = params.indices.row_parts = size(5);
      if (size(6) != 0) params.table.seq_lens = lengths.size() > 0 ? lengths.data() : &none;
      params.table.page_table = page_table.data();
      params.table.watermarks = marks.data();
      params.indices.kv_indptr = indptr.data();
      params.indices.kv_indices = indices.data();
      params.indices.kv_indices_size = indices.size();
      params.table.map = params.indices.map = map;
      if (operation == 0) {
        repage::cpu::BuildPageTable(params.table);
        repage::cpu::BuildKvIndices(params.indices);
      } else {
        repage::cpu::BuildGroupTables(params);
      }
      Write(page_table);
      Write(marks);
      Write(indices);
    } else if (operation == 2) {
      const auto slots = ReadArray<int64_t>();
      const Array<int64_t> out(slots.size());
      repage::cpu::MapSlots({slots.data(), out.data(), slots.size(), map});
      Write(out);
    } else if (operation == 3) {
      const auto lengths = ReadArray<int32_t>();
      const Array<int32_t> out(lengths.size());
      repage::cpu::LastPageLen(
          {lengths.data(), out.data(), lengths.size(), repage::MakeFastDivisor(size(0))});
      Write(out);
    } else {
      return 4;
    }
  }
}
