# SPDX-License-Identifier: Apache-2.0
"""Small kernel pages on vLLM's packed KV-cache blocks."""

from __future__ import annotations

from repage import errors
from repage.buffer import PageTableBuffer
from repage.build_info import BuildInfo, build_info, get_include
from repage.geometry import BlockGeometry
from repage.ops import (
    build_kv_indices,
    build_page_table,
    last_page_len,
    map_slots,
)
from repage.plan import KernelPageRules, PagePlan, plan_pages
from repage.views import virtual_view

__all__ = [
    "BlockGeometry",
    "BuildInfo",
    "KernelPageRules",
    "PagePlan",
    "PageTableBuffer",
    "build_info",
    "build_kv_indices",
    "build_page_table",
    "errors",
    "get_include",
    "last_page_len",
    "map_slots",
    "plan_pages",
    "virtual_view",
]
