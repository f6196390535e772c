# SPDX-License-Identifier: Apache-2.0
"""Engine setups of the demonstration, changed where the reference kernels need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from repage.demo.checkpoints import DFlashCheckpoint, GemmaCheckpoint, HybridCheckpoint
from repage.demo.setups import SETUPS, EngineSetup

__all__ = ["ENGINE_SETUPS"]


def _float32(setup: EngineSetup) -> EngineSetup:
    """The setup in float32: rounding no longer decides about tokens."""
    return replace(
        setup,
        name=f"{setup.name}-float32",
        engine_args={**setup.engine_args, "dtype": "float32"},
    )


_HD256 = replace(
    SETUPS["gemma4"],
    name="gemma4-hd256",
    target=GemmaCheckpoint(name="gemma4-hd256", head_dim=256, global_head_dim=256, num_kv_heads=1),
)

# Only the second-generation runner refreshes draft metadata without building it.
_EAGLE_V2 = replace(SETUPS["hybrid-eagle3"], name="hybrid-eagle3-v2", runner="V2")

# Two target layers and the drafter's fill 983,040 bytes of a block, no multiple of a 128-token page
# of the target (131,072): the block stride has to be aligned.
_HD256_DFLASH = replace(
    SETUPS["hybrid-dflash"],
    name="hybrid-hd256-dflash",
    target=HybridCheckpoint(name="hybrid-hd256", head_dim=256),
    drafter=DFlashCheckpoint(name="dflash-narrow", num_kv_heads=2),
)

_ADDED = (_float32(SETUPS["gemma4"]), _HD256, _float32(_HD256), _EAGLE_V2, _HD256_DFLASH)

ENGINE_SETUPS: Mapping[str, EngineSetup] = MappingProxyType(
    {**SETUPS, **{setup.name: setup for setup in _ADDED}}
)
"""The demonstration's setups, and variants in float32, with head dim 256 and on the V2 runner."""
