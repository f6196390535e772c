// SPDX-License-Identifier: Apache-2.0
//
// CPU twins of the CUDA operations. Same parameters, bit-identical results.
#pragma once

#include "csrc/page_table_params.h"

namespace repage::cpu {

void BuildPageTable(const PageTableParams& params);
void BuildKvIndices(const KvIndicesParams& params);
void BuildGroupTables(const GroupTablesParams& params);
void MapSlots(const SlotMapParams& params);
void LastPageLen(const LastPageLenParams& params);

}  // namespace repage::cpu
