# SPDX-License-Identifier: Apache-2.0
"""Strict CPU reference kernels, and a harness that puts them under real vLLM attention backends.

The kernels read pages the way the CUDA kernels do (base, strides, page id, page size) and refuse
what those would misread; every read is proven against a record of what the cache writer wrote
(`reference_kernels.provenance`). `reference_kernels.harness` replaces the kernels and the device
queries of vLLM's FlashInfer and FlashAttention modules, and nothing else of them, so that the real
metadata builders and impls run in a CPU engine. `reference_kernels.plugin` is the same as a vLLM
plugin.

This is test support: it lives next to the tests and is not part of the package.
"""
