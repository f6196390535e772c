# SPDX-License-Identifier: Apache-2.0
"""``repage.demo.engine_run`` with one thing broken on purpose.

``python broken_engine.py FAULT SETUP --layout ... --out ...``; it shows that the comparisons of
the engine tests see a fault that is there. Importing it does nothing: spawned processes do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from repage.demo import engine_run
from repage.demo.setups import EngineSetup

CreateEngine = Callable[[EngineSetup, Path | None], Any]


def wrong_step(create: CreateEngine) -> CreateEngine:
    """Number kernel pages as if a layer's blocks were dense: page(b, j) = b * r + j."""
    import repage

    build = repage.PageTableBuffer.build

    def dense_build(
        self: repage.PageTableBuffer, block_table: Any, *args: Any, **kwargs: Any
    ) -> Any:
        table = build(self, block_table, *args, **kwargs)
        pages = self.plan.pages_per_block
        for page in range(pages):
            table[:, page::pages] = block_table * pages + page
        return table

    repage.PageTableBuffer.build = dense_build  # type: ignore[method-assign]
    return create


def wrong_slots(create: CreateEngine) -> CreateEngine:
    """Write through manager slots into the view of kernel pages."""
    import repage

    repage.map_slots = lambda slot_mapping, *_, **__: slot_mapping
    return create


def no_zeroing(create: CreateEngine) -> CreateEngine:
    """Take back the repair of the CPU runner's zeroing of new blocks."""

    def create_without_repair(setup: EngineSetup, cache_dir: Path | None) -> Any:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        stock = CPUModelRunner._zero_block_ids
        llm = create(setup, cache_dir)
        if CPUModelRunner._zero_block_ids is stock:
            raise RuntimeError("there is no repair to take back")
        CPUModelRunner._zero_block_ids = stock
        return llm

    return create_without_repair


def fixed_pages(create: CreateEngine) -> CreateEngine:
    """Use a backend without re-paging whose kernels take 32-token blocks only."""

    def create_with_fixed_pages(setup: EngineSetup, cache_dir: Path | None) -> Any:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(
            AttentionBackendEnum.CPU_ATTN, "fixed_page_backend.FixedPageCPUAttentionBackend"
        )
        return create(setup, cache_dir)

    return create_with_fixed_pages


FAULTS = {
    fault.__name__.replace("_", "-"): fault
    for fault in (wrong_step, wrong_slots, no_zeroing, fixed_pages)
}

if __name__ == "__main__":
    engine_run.create_engine = FAULTS[sys.argv[1]](engine_run.create_engine)
    engine_run.main(sys.argv[2:])
