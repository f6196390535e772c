# SPDX-License-Identifier: Apache-2.0
"""Public reports of vLLM, FlashInfer and others as tests, each with the right answer.

Every test names the public thread that it comes from. Files go by topic: splitting blocks, choosing
pages, tables and lengths, integer range and strides, layout preference, connectors and zeroing.
"""
