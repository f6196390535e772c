# SPDX-License-Identifier: Apache-2.0
"""A packed engine and then a stock one in one process; prints what both did."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from repage.demo.checkpoints import default_cache_dir
from repage.demo.engine_run import create_engine, generate_round
from repage.demo.setups import SETUPS
from repage.vllm.preference import install


def main(out: Path) -> None:
    setup = SETUPS["gemma4"]
    install()
    records = []
    for mode in ("packed", "stock"):
        os.environ["REPAGE_LAYOUT"] = mode
        llm = create_engine(setup, default_cache_dir())
        cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        config = llm.llm_engine.vllm_config.cache_config
        records.append(
            {
                "layout": config.kv_cache_layout,
                "groups": len(cache.kv_cache_groups),
                "capacity": config.kv_cache_size_tokens,
                "tokens": [list(map(int, item.token_ids)) for item in generate_round(llm, setup)],
                "engine": llm,
            }
        )
    # The first engine once more, with the second one alive: nothing of it has changed.
    again = generate_round(records[0]["engine"], setup)
    records[0]["again"] = [list(map(int, item.token_ids)) for item in again]
    for record in records:
        del record["engine"]
    out.write_text(json.dumps(records), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
