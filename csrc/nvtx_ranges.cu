// SPDX-License-Identifier: Apache-2.0
//
// Compiled by nvcc for its include path only; there is no device code.
#include <nvtx3/nvToolsExt.h>

#include "csrc/nvtx_ranges.h"

namespace repage::nvtx {
namespace {

nvtxDomainHandle_t Domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("repage");
  return domain;
}

}  // namespace

uint64_t RegisterName(const std::string& name) {
  return reinterpret_cast<uint64_t>(nvtxDomainRegisterStringA(Domain(), name.c_str()));
}

void Push(uint64_t name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  attributes.message.registered = reinterpret_cast<nvtxStringHandle_t>(name);
  nvtxDomainRangePushEx(Domain(), &attributes);
}

void Pop() { nvtxDomainRangePop(Domain()); }

}  // namespace repage::nvtx
