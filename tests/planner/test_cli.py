# SPDX-License-Identifier: Apache-2.0
"""The command line, in process."""

from __future__ import annotations

import json
import warnings
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

pytest.importorskip("vllm", reason="vLLM is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports use what torch deprecates
    import vllm.model_executor.layers.mamba.mamba_utils
    import vllm.v1.executor.abstract  # noqa: F401

from repage.cli import main

HEADLINE = [
    *("plan", "qwen3.6-35b-a3b", "--drafter", "dflash", "--tp", "1", "--memory", "178GiB"),
    *("--kv-dtype", "bf16", "--ssm-dtype", "bf16", "--spec-tokens", "7"),
    *("--backend", "FLASHINFER"),
]


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def test_json_has_the_documented_keys():
    done = run(*HEADLINE, "--json")
    data = json.loads(done.stdout)
    assert done.exit_code == 0
    assert {"verdict", "layout", "reasons", "manager_block", "layouts"} <= set(data)
    for plan in data["layouts"].values():
        assert {
            "groups",
            "bytes_per_block",
            "bytes_per_request",
            "capacity_tokens",
            "padding_bytes_per_token",
            "kernel_pages",
        } <= set(plan)
    assert (data["verdict"], data["layout"], data["manager_block"]) == ("packed", "BLHNC", 640)


def test_text_shows_the_published_comparison_and_the_blocks():
    done = run(*HEADLINE, "--min-group-layers", "3", "--min-group-layers", "5")
    assert done.exit_code == 0
    for words in ("Verdict: packed", "6,962.5", "6,765.0", "12,288", "1 group of 11 layers"):
        assert words in done.stdout


def test_svg_draws_every_byte_of_a_block(tmp_path):
    path = tmp_path / "blocks.svg"
    assert run(*HEADLINE, "--svg", str(path)).exit_code == 0
    space = "{http://www.w3.org/2000/svg}"
    boxes = [b for b in ElementTree.parse(path).iter(f"{space}rect") if len(b)]
    titles = [box[0].text for box in boxes]
    assert any(title.startswith("draft.attn.0: 2,621,440 bytes at 13,107,200") for title in titles)
    rows: dict[str, float] = {}
    for box in boxes:
        rows[box.get("y")] = rows.get(box.get("y"), 0) + float(box.get("width"))
    assert all(width == pytest.approx(760, abs=0.2) for width in rows.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "qwen3.6-35b"], "qwen3.6-35b-a3b"),
        (["plan", "gemma-4-31b", "--drafter", "dflsh"], "dflash"),
        (["plan", "gemma-4-31b", "--memory", "many"], "178GiB"),
        (["plan"], "MODEL"),
        (["plan", "nothing.json"], "REPAGE_DUMP"),
        (["plan", "qwen3.6-35b-a3b", "--tp", "3"], "3 ranks"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_doctor_as_json():
    done = run("doctor", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 0, facts["plugin"]
    assert {"versions", "build", "plugin", "backends", "device"} <= set(facts)
    states = {row["backend"]: row["state"] for row in facts["backends"]}
    assert states["CPU_ATTN"] == "re-paged"
    assert {"xqa", "trtllm-gen", "fa4-hd256"} <= set(facts["device"]["tma"])


def test_doctor_ends_with_1_and_names_what_vllm_lacks(monkeypatch):
    from repage.vllm import compat

    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    done = run("doctor")
    assert done.exit_code == 1
    assert "0.99.0 is not within" in done.stdout


def test_the_group_has_every_command():
    assert set(main.commands) == {"plan", "doctor", "selftest"}
