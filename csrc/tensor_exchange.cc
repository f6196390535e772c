// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor_exchange.h"

#include <cstdint>

namespace repage {

TensorExchange::TensorExchange(PyTypeObject* type) : type_(type) {
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  const void* table =
      capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_XDECREF(capsule);
  PyErr_Clear();
  // A table lives as long as the process. Older ones follow a table of another major version.
  const auto* header = static_cast<const DLPackExchangeAPIHeader*>(table);
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION) {
    header = header->prev_api;
  }
  const auto* api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  if (api != nullptr && api->dltensor_from_py_object_no_sync != nullptr) api_ = api;
}

bool TensorExchange::Read(PyObject* tensor, DLTensor* description) const {
  if (api_ == nullptr || Py_TYPE(tensor) != type_) return false;
  if (api_->dltensor_from_py_object_no_sync(tensor, description) == 0) return true;
  PyErr_Clear();
  return false;
}

bool TensorExchange::CurrentStream(int32_t device, uint64_t* stream) const {
  void* current = nullptr;
  if (api_ == nullptr || api_->current_work_stream(kDLCUDA, device, &current) != 0) {
    PyErr_Clear();
    return false;
  }
  *stream = reinterpret_cast<uintptr_t>(current);
  return true;
}

}  // namespace repage
