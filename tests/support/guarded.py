# SPDX-License-Identifier: Apache-2.0
"""Tensors in the middle of poisoned memory."""

from __future__ import annotations

import math

import torch

POISON = 0x5A5A5A5A


class Guarded:
    """A tensor with poison before and after it, at any alignment of its element size."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str, *, shift: int = 0
    ) -> None:
        self._size = math.prod(shape)
        self._begin = 64 + shift
        self._memory = torch.full((self._size + 128 + shift,), POISON, dtype=dtype, device=device)
        self.tensor = self._memory[self._begin : self._begin + self._size].view(shape)

    def assert_untouched_around(self) -> None:
        end = self._begin + self._size
        assert bool((self._memory[: self._begin] == POISON).all()), "written before the tensor"
        assert bool((self._memory[end:] == POISON).all()), "written after the tensor"
