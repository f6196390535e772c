# SPDX-License-Identifier: Apache-2.0
"""A short program with every CUDA operation, for compute-sanitizer.

Outputs are allocations of their own (``PYTORCH_NO_CUDA_MEMORY_CACHING=1``), so that a store past
one of them is an error to memcheck.
"""

from __future__ import annotations

import sys

import torch

import repage
from repage.selftest.ops_checks import ops_checks
from repage.selftest.run import exit_code, run_on
from repage.selftest.target import Target


def main() -> int:
    """Run the operations' checks, and sizes around the ends of 16-byte stores."""
    device = torch.device("cuda", torch.cuda.current_device())
    target = Target(device, torch.cuda.get_device_capability(device), None, "not asked for")
    # The caching allocator is off, and a graph needs it.
    checks = [check for check in ops_checks() if check.name != "ops.graph"]
    results = run_on(target, checks)
    for result in results:
        print(result.name, result.status.value, result.detail)
    geometry = repage.BlockGeometry.dense(
        "HNC", num_blocks=9, block_tokens=96, num_heads=2, content_bytes=64, block_stride=65536
    )
    plan = repage.PagePlan(geometry, 32)
    for rows in (1, 3):
        for columns in (1, 2, 3, 341, 1025):
            table = torch.randint(0, 9, (rows, columns), dtype=torch.int32, device=device)
            lengths = torch.full((rows,), columns * 96 - 1, dtype=torch.int32, device=device)
            buffer = repage.PageTableBuffer(plan, rows + 1, columns, device)
            buffer.build(table, lengths)
            buffer.build(table[:1], lengths[:1] // 2)
            repage.map_slots(torch.arange(columns, device=device), plan)
            repage.last_page_len(lengths, 32)
    torch.cuda.synchronize()
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
