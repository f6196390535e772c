# SPDX-License-Identifier: Apache-2.0
"""Whether the CUDA driver takes the tensor maps of TMA kernels for the headline's virtual view."""

from __future__ import annotations

import torch

from repage import BlockGeometry, KernelPageRules, plan_pages
from repage.tensor_map import TENSOR_MAP_RULES, probe_tensor_map

_HEADS, _HEAD_DIM, _TOKENS, _STRIDE, _BLOCKS = 2, 256, 640, 15_728_640, 1024
_CONTENT = 2 * _HEAD_DIM * 2
_BASE = 1 << 40  # encoding looks at numbers only


def tma_probe() -> dict[str, str]:
    """Ask the driver, per kernel, about Qwen3.6-35B with DFlash in BLHNC blocks.

    Returns
    -------
    dict of str to str
        By kernel: ``"accepted"``, or ``"refused: ..."`` or ``"not available: ..."`` with the
        reason.
    """
    geometry = BlockGeometry(
        num_blocks=_BLOCKS,
        block_tokens=_TOKENS,
        num_heads=_HEADS,
        content_bytes=_CONTENT,
        element_size=2,
        block_stride=_STRIDE,
        head_stride=_TOKENS * _CONTENT,
        token_stride=_CONTENT,
        base_offset=0,
        storage_bytes=_BLOCKS * _STRIDE,
    )
    answers = {}
    for name, rule in TENSOR_MAP_RULES.items():
        page = 128 if name.startswith("fa4") else 64
        plan = plan_pages(geometry, KernelPageRules(name=name, page_sizes=(page,)))
        probe = probe_tensor_map(
            plan, rule, head_dim=_HEAD_DIM, dtype=torch.bfloat16, base_address=_BASE
        )
        answers[name] = f"{probe.status}: {probe.reason}" if probe.reason else probe.status
    return answers
