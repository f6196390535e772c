// SPDX-License-Identifier: Apache-2.0
//
// Tensors of another library, read through DLPack's C exchange API: one call of
// a function of theirs, no Python attribute, and no dependency on their headers
// or version. Needs the interpreter lock.
#pragma once

#include <Python.h>
#include <dlpack/dlpack.h>

#include <cstdint>

namespace repage {

class TensorExchange {
 public:
  // For tensors of exactly `type`: subclasses may keep their data elsewhere. A
  // type without a usable API gives an exchange that reads nothing. The caller
  // keeps the type.
  explicit TensorExchange(PyTypeObject* type);

  // Describes a tensor, which keeps its memory; false if it cannot be described.
  bool Read(PyObject* tensor, DLTensor* description) const;

  // The stream on which the library works on a CUDA device now; false if it
  // cannot tell.
  bool CurrentStream(int32_t device, uint64_t* stream) const;

 private:
  PyTypeObject* type_;
  const DLPackExchangeAPI* api_ = nullptr;
};

}  // namespace repage
