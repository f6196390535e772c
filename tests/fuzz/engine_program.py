# SPDX-License-Identifier: Apache-2.0
"""Sends random traffic to one engine and records every token.

``python engine_program.py SEED COUNT OUT``, with the variant's environment set.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzz.engine import LONGEST_PROMPT, engine_setup
from fuzz.traffic import Request, make_traffic
from repage.demo import triton_cpu
from repage.demo.checkpoints import default_cache_dir
from repage.demo.engine_run import create_engine
from repage.demo.observe import EngineObserver


def send(llm: Any, traffic: list[Request]) -> list[list[int]]:
    """Send the traffic as its steps say and return the tokens of each request."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    tokens: list[list[int]] = [[] for _ in traffic]
    names = {f"r{index}": index for index in range(len(traffic))}
    waiting = list(enumerate(traffic))
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1].arrival <= step:
            index, request = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True
            )
            engine.add_request(f"r{index}", request.prompt, sampling)
        for output in engine.step():
            index = names[output.request_id]
            tokens[index] = list(output.outputs[0].token_ids)
            limit = traffic[index].abort_after
            if limit is not None and len(tokens[index]) >= limit and not output.finished:
                engine.abort_request([output.request_id])
        step += 1
    return tokens


def main(arguments: list[str]) -> None:
    seed, count, out = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    triton_cpu.install_if_asked()
    setup = engine_setup(seed)
    llm = create_engine(replace(setup, name="fuzz"), default_cache_dir())
    observer = EngineObserver(llm, in_process=True)
    traffic = make_traffic(seed, count, LONGEST_PROMPT)
    tokens = send(llm, traffic)
    cached = [
        int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits"
    ]
    record = {
        "layout": observer.layout,
        "pages": sorted({group.kernel_page for group in observer.groups()} - {0}),
        "tokens": tokens,
        "preemptions": observer.preemptions(),
        "prefix_hits": sum(cached),
    }
    out.write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1:])
