// SPDX-License-Identifier: Apache-2.0
//
// One macro, so that every function of the core compiles for the host, for the
// device, and with compilers that have never heard of CUDA.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define REPAGE_HOST_DEVICE __host__ __device__
#else
#define REPAGE_HOST_DEVICE
#endif
