# SPDX-License-Identifier: Apache-2.0
"""vLLM's real metadata builders, re-paged, called in the orders in which the runners call them.

Run with another vLLM first on ``PYTHONPATH``, the same tests are about that one (test_vllm_033.py).
"""
