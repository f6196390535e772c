# SPDX-License-Identifier: Apache-2.0
"""What the tests of strict rules share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from reference_kernels.context import KernelContext
from reference_kernels.errors import StrictKernelError
from reference_kernels.synthetic import PackedLayers

__all__ = ["LENGTHS", "Call", "Change", "layers_for", "refused", "with_dead_id"]

LENGTHS = (300, 5, 128)
Call = dict[str, Any]
Change = Callable[[PackedLayers, Call], Call]


def refused(argument: str) -> Any:
    """Expect a strict kernel to refuse ``argument``."""
    return pytest.raises(StrictKernelError, match=re.escape(f": {argument}"))


def layers_for(capability: tuple[int, int], **arguments: Any) -> PackedLayers:
    """Float32 sequences of `LENGTHS` tokens on a pretended device."""
    arguments.setdefault("lengths", LENGTHS)
    context = arguments.pop("context", None) or KernelContext(capability, float32=True)
    return PackedLayers(context, **arguments)


def with_dead_id(table: Tensor, dead: int) -> Tensor:
    """The shortest row's last column, which no kernel reads, holds ``dead``."""
    table = table.clone()
    table[1, -1] = dead
    return table
