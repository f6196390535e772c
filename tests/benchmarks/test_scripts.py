# SPDX-License-Identifier: Apache-2.0
"""The benchmark programs: they run, they record what they must, and a wrong kernel cannot win."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

# Importing vLLM warns about what it uses of torch and others.
pytestmark = pytest.mark.filterwarnings("ignore")

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("bench") / "nested" / "result.json"
    result = run("page_tables.py", "--quick", "--memory", "0.001", "--out", str(out))
    assert result.returncode == 0, result.stderr
    return json.loads(out.read_text())


def test_a_result_says_where_and_how_it_was_made(quick: dict) -> None:
    environment = quick["environment"]
    assert environment["command"].endswith(f"--out {environment['command'].split()[-1]}")
    assert "page_tables.py --quick" in environment["command"]
    assert environment["device"]
    assert environment["threads"] == 1
    assert {"python", "torch", "repage", "numpy"} <= set(environment["versions"])


def test_everybody_is_timed_in_every_case(quick: dict) -> None:
    (case,) = quick["cases"]
    contenders = set(case["us"])
    assert {"vllm", "numpy", "copy", "repage", "repage live 1%", "repage live 100%"} <= contenders
    assert {"repage csr", "repage both"} <= contenders
    assert all(values["median"] > 0 and values["rounds"] >= 5 for values in case["us"].values())


def test_results_are_shown_next_to_vllms(quick: dict) -> None:
    import page_tables

    shown = io.StringIO()
    Console(width=160, file=shown).print(page_tables.results_table(quick))
    (row,) = (line for line in shown.getvalue().splitlines() if " 8192 " in line)
    us = quick["cases"][0]["us"]
    assert f" {us['vllm']['median']:.1f} " in row
    assert f" {us['vllm']['median'] / us['repage']['median']:.1f}x " in row


def test_what_does_not_fit_is_left_out_and_said(quick: dict) -> None:
    (left_out,) = quick["skipped"]
    assert left_out["shape"]["max_model_len"] == 131_072
    assert "GiB (--memory 0.001)" in left_out["reason"]


def test_targets_name_their_worst_case(quick: dict) -> None:
    measured = [target for target in quick["targets"] if "worst" in target]
    assert len(measured) == 4  # no table of 4 MiB and no row of 1M tokens in a quick run
    assert all(target["where"] and target["cases"] >= 1 for target in measured)


def test_a_plot_is_drawn(quick: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import page_table_plot

    page_table_plot.draw(quick, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name", ["repage", "repage live 50%", "repage csr", "repage both", "numpy", "vllm"]
)
def test_a_fast_wrong_kernel_is_caught(name: str) -> None:
    import torch

    from page_table_cases import Contenders, Shape

    contenders = Contenders(Shape(2, 8192, 5, groups=2), torch.device("cpu"))
    contenders.check()
    contenders.functions[name] = lambda: None
    with pytest.raises(SystemExit, match=f"{name} made a wrong table"):
        contenders.check()


def test_a_kernel_that_goes_wrong_while_it_is_timed_is_caught() -> None:
    import torch

    from page_table_cases import Contenders, Shape

    contenders = Contenders(Shape(2, 8192, 5), torch.device("cpu"))
    contenders.check()
    right = contenders.functions["repage"]

    def wrong_at_last() -> None:
        right()
        contenders.buffers[0].table[1, -1] += 1

    contenders.functions["repage"] = wrong_at_last
    with pytest.raises(SystemExit, match="repage made a wrong table"):
        contenders.check_after("repage")


def test_a_live_table_that_leaves_stale_columns_is_caught() -> None:
    import torch

    from page_table_cases import Contenders, Shape

    contenders = Contenders(Shape(2, 8192, 5), torch.device("cpu"))
    live = contenders.functions["repage live 1%"]

    def forgets() -> None:
        contenders.buffers[0]._watermarks.zero_()
        live()

    contenders.functions["repage live 1%"] = forgets
    with pytest.raises(SystemExit, match="repage live 1% made a wrong table"):
        contenders.check()


def test_pieces_of_vllm_are_vllms_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For GPU machines without vLLM; a dataclass, a method and a Triton kernel."""
    pytest.importorskip("triton")
    import inspect

    import torch
    from vllm.v1.worker.utils import AttentionGroup

    import vllm_code
    from page_table_cases import Contenders, Shape

    assert vllm_code.version() is None
    assert vllm_code.attention_group() is AttentionGroup
    path = tmp_path / "new" / "pieces.py"
    assert run("vllm_code.py", str(path)).returncode == 0
    monkeypatch.setenv("REPAGE_BENCH_VLLM", str(path))
    cut = vllm_code.attention_group()
    assert cut is not AttentionGroup
    for name in ("map_to_kernel_block_table", "_with_kernel_block_table"):
        ours, theirs = getattr(cut, name), getattr(AttentionGroup, name)
        assert inspect.getsource(ours) == inspect.getsource(theirs)
    assert vllm_code.list_kernel().__name__ == "_copy_page_indices_kernel"
    assert vllm_code.version()[0].isdigit()
    contenders = Contenders(Shape(2, 8192, 5), torch.device("cpu"))
    contenders.check()
    assert type(contenders.vllm_groups[0]) is cut


def test_vllms_list_kernel_competes_too(tmp_path: Path) -> None:
    """It is Triton's; the interpreter runs it here, as GPU machines without vLLM would."""
    pytest.importorskip("triton")
    path = tmp_path / "pieces.py"
    assert run("vllm_code.py", str(path)).returncode == 0
    program = """
import torch
from page_table_cases import Contenders, Shape
contenders = Contenders(Shape(2, 8192, 5, groups=2), torch.device("cpu"))
contenders.check()
contenders.check_after("vllm csr")
contenders.functions["vllm csr"] = lambda: None
try:
    contenders.check()
except SystemExit as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=BENCHMARKS,
        env=os.environ | {"TRITON_INTERPRET": "1", "REPAGE_BENCH_VLLM": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "vllm csr made a wrong table" in result.stdout


def test_a_trace_names_every_contender(tmp_path: Path) -> None:
    import torch

    import page_tables
    from page_table_cases import Shape

    path = tmp_path / "new" / "trace.json"
    page_tables.record_trace(Shape(2, 8192, 5), torch.device("cpu"), path)
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"vllm", "copy", "repage", "repage both"} <= names


def test_judging_finds_the_worst_case_and_counts_misses() -> None:
    from page_table_targets import judge

    def case(batch: int, table_bytes: int, vllm: float, ours: float, copy: float) -> dict:
        times = {"vllm": vllm, "repage": ours, "repage live 100%": ours, "copy": copy}
        return {
            "shape": {"batch": batch, "max_model_len": 8192},
            "table_bytes": table_bytes,
            "us": {name: {"median": value} for name, value in times.items()},
        }

    cases = [case(1, 100, 8.0, 2.0, 1.0), case(2, 8 << 20, 10.0, 20.0, 10.0)]
    room, full, live, copy, *listed = judge(cases, "cpu")
    assert "worst" not in room
    assert (full["worst"], full["where"]["batch"], full["missed"]) == (0.5, 2, 1)
    assert not full["holds"]
    assert live["cases"] == 2
    assert (copy["worst"], copy["cases"], copy["holds"]) == (2.0, 1, False)
    assert not any("worst" in target for target in listed)
    assert judge(cases, "cuda")[3]["limit"] == 1.15
    for found in cases:
        found["us"] |= {"vllm csr": {"median": 9.0}, "repage csr": {"median": 3.0}}
    assert [target["worst"] for target in judge(cases, "cuda")[4:]] == [2.67, 3.0]


def test_step_times_are_summed_by_part_and_judged_by_ratio() -> None:
    import engine_steps

    def record(host: float, speed: float) -> dict:
        steps = [{"metadata": [host, host], "slots": [0.001, 0.001]} for _ in range(3)]
        return {
            "layout": "x",
            "groups": 3,
            "capacity": 1,
            "steps": steps,
            "tokens_per_second": [speed, speed],
        }

    stock = engine_steps.summarize([record(0.009, 50.0), record(0.009, 52.0)])
    packed = engine_steps.summarize([record(0.001, 40.0)])
    assert stock["host_cpu_ms"] == 10.0
    assert stock["parts_cpu_ms"]["metadata"] == 9.0
    time, speed = engine_steps.judge({"stock": stock, "packed": packed})
    assert (time["measured"], time["holds"]) == (5.0, True)
    assert not speed["holds"]


@pytest.mark.engine
@pytest.mark.slow
def test_engine_steps_runs_both_layouts(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    result = run("engine_steps.py", "--quick", "--out", str(out))
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert (found["stock"]["groups"], found["packed"]["groups"]) == (9, 3)
    assert found["same_tokens"]
    assert found["packed"]["host_cpu_ms"] > 0
