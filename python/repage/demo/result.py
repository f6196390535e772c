# SPDX-License-Identifier: Apache-2.0
"""The record of one engine run, and its JSON form."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Generation:
    """What one request produced.

    Attributes
    ----------
    token_ids : list of int
        Generated tokens.
    logprobs : list of float
        Logprob of each generated token (float32 values, kept exactly by JSON).
    cached_tokens : int
        Prompt tokens taken from the prefix cache.
    """

    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int


@dataclass
class KVGroup:
    """One KV-cache group, or the layers in it that share a spec.

    Attributes
    ----------
    group : int
        Index of the group.
    spec : str
        Name of the layers' spec class.
    layers : list of str
        Layer names.
    manager_block : int
        Tokens in a manager block.
    num_kv_heads : int
        KV heads of a layer; 0 for layers without attention.
    page_bytes : int
        Bytes that one layer uses of a manager block.
    block_stride : int
        Bytes from one block of a layer to its next.
    kernel_page : int
        Tokens in a page that the attention kernel addresses; 0 for layers without attention.
    manager_row, kernel_row : list of int
        First live entries of one request's block table, and of what the attention backend gave
        its kernel for them. Empty for layers without attention.
    """

    group: int
    spec: str
    layers: list[str]
    manager_block: int
    num_kv_heads: int
    page_bytes: int
    block_stride: int
    kernel_page: int = 0
    manager_row: list[int] = field(default_factory=list)
    kernel_row: list[int] = field(default_factory=list)


@dataclass
class RunResult:
    """Everything recorded about one engine run.

    Attributes
    ----------
    setup, layout : str
        Name of the setup; layout that the engine resolved, "" in multi-process mode.
    page : int or None
        Kernel page that was asked for.
    plugin : bool
        Whether the repage plugin was allowed to load.
    runner : str
        Class of vLLM's model runner.
    num_blocks, num_groups, capacity : int
        Pool size in blocks, KV-cache groups, capacity in tokens.
    groups : list of KVGroup
        Geometry and tables. Empty in multi-process mode, where the engine is out of reach; there
        are no draft tokens then, and no blocks, either.
    rounds : list of list of Generation
        The prompt set, generated more than once; the later rounds reuse blocks.
    drafts : list
        Draft tokens ``[num_reqs, num_speculative_tokens]`` of every drafting call, in order.
    attention_blocks, state_blocks : list of list of int
        For each round, the manager blocks that held keys and values, and those that held recurrent
        states.
    preemptions : int
        Requests that lost their blocks and started again.
    tokens_per_second : float
        Generated tokens over the time of all rounds.
    seconds : dict
        Seconds of start-up and generation.
    versions : dict
        Versions of what took part.
    """

    setup: str
    layout: str
    page: int | None
    plugin: bool
    runner: str
    num_blocks: int
    num_groups: int
    capacity: int
    groups: list[KVGroup]
    rounds: list[list[Generation]]
    drafts: list[list[list[int]]]
    attention_blocks: list[list[int]]
    state_blocks: list[list[int]]
    preemptions: int
    tokens_per_second: float
    seconds: dict[str, float]
    versions: dict[str, str]

    def save(self, path: Path) -> None:
        """Write the record to ``path`` in one step."""
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(json.dumps(asdict(self)))
        os.replace(scratch, path)

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read a record that `save` wrote."""
        data: dict[str, Any] = json.loads(path.read_text())
        data["groups"] = [KVGroup(**group) for group in data["groups"]]
        data["rounds"] = [[Generation(**item) for item in items] for items in data["rounds"]]
        return cls(**data)

    def attention_groups(self) -> list[KVGroup]:
        """Return the groups that an attention kernel reads."""
        return [group for group in self.groups if group.kernel_page]
