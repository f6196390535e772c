# SPDX-License-Identifier: Apache-2.0
"""The demonstration's program: exit status, processes that end, commands, and real serving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import repage.demo.__main__ as demo
from engine.runs import EngineRuns
from repage.demo import processes, serve
from repage.demo.launch import STOCK, RunFailedError, Variant, child_environment, packed
from repage.demo.processes import process_group, run_logged
from repage.demo.result import Generation, KVGroup, RunResult
from repage.demo.setups import SETUPS

ENV = dict(os.environ)


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to notice its end does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def record(setup: str, variant: Variant, token: int) -> RunResult:
    group = KVGroup(2, "FullAttentionSpec", ["l"], 640, 1, 327_680, 1_310_720, 320, [3], [12, 13])
    return RunResult(
        setup=setup,
        layout=variant.layout,
        page=variant.page,
        plugin=variant.plugin,
        runner="",
        num_blocks=204,
        num_groups=3,
        capacity=29_842,
        groups=[group],
        rounds=[[Generation([token], [-1.0], 0)]],
        drafts=[],
        attention_blocks=[[3]],
        state_blocks=[[]],
        preemptions=0,
        tokens_per_second=12.5,
        seconds={},
        versions={},
    )


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Engine runs that answer at once; the dictionary says which token each layout generates."""
    tokens = {"LBHNC": 7, "BLHNC": 7}

    def run_variant(setup: object, variant: Variant, **_: object) -> RunResult:
        if tokens[variant.layout] < 0:
            raise RunFailedError("no engine here")
        return record(setup.name, variant, tokens[variant.layout])  # type: ignore[attr-defined]

    monkeypatch.setattr(demo, "run_variant", run_variant)
    monkeypatch.setattr(demo, "materialize", lambda *_: Path())
    return tokens


ONE = ["--setup", "hybrid-dflash", "--no-serve"]


@pytest.mark.usefixtures("fake_engine")
def test_identical_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(ONE) == 0
    shown = capsys.readouterr().out
    for words in ("hybrid-dflash: identical", "1,310,720", "29,842", "12.5", "12 13", "320"):
        assert words in shown


def test_different_runs(fake_engine: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    fake_engine["BLHNC"] = 8
    assert demo.main(ONE) == 1
    assert "round 1, request 0, token 0: id 7 and 8" in capsys.readouterr().out


def test_runs_that_fail(fake_engine: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    fake_engine["BLHNC"] = -1
    assert demo.main(ONE) == 2
    assert "could not run: no engine here" in capsys.readouterr().out


@pytest.mark.usefixtures("fake_engine")
def test_a_server_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_served(*_: object, **__: object) -> None:
        raise serve.ServerError("port taken")

    monkeypatch.setattr(demo, "ask_served", ask_served)
    assert demo.main(["--setup", "hybrid-dflash"]) == 2


def test_unknown_setups_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(["--setup", "no-such"])
    assert ended.value.code == 2
    assert "hybrid-dflash" in capsys.readouterr().err


def test_short_and_default_choices() -> None:
    chosen = {
        arguments: [s.name for s in demo.chosen_setups(demo.parse_arguments(arguments))]
        for arguments in ((), ("--short",), ("--setup", "gemma4", "--setup", "gemma4"))
    }
    assert chosen[()] == list(demo.DEFAULT_SETUPS)
    assert chosen[("--short",)] == list(demo.SHORT_SETUPS)
    assert chosen[("--setup", "gemma4", "--setup", "gemma4")] == ["gemma4"]


def test_the_environment_of_a_stock_run_has_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPAGE_CPU_PAGE", "128")
    stock = child_environment(SETUPS["gemma4"], STOCK)
    assert stock["VLLM_PLUGINS"] == ""
    assert "REPAGE_CPU_PAGE" not in stock
    assert child_environment(SETUPS["gemma4"], packed(32))["REPAGE_CPU_PAGE"] == "32"
    assert "REPAGE_CPU_PAGE" not in child_environment(SETUPS["gemma4"], packed(None))


@pytest.mark.parametrize("ignoring", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN); "])
def test_a_group_is_stopped_on_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignoring: str
) -> None:
    """Grandchildren end as well, even where the interrupt is ignored."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 1.0)
    program = (
        f"import os, signal, subprocess, sys, time; {ignoring}"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n'); "
        "time.sleep(600)"
    )

    def work() -> list[int]:
        with process_group([sys.executable, "-c", program], ENV, stdout=subprocess.DEVNULL):
            deadline = time.monotonic() + 30
            pids: list[int] = []
            while len(pids) < 2 and time.monotonic() < deadline:
                if (tmp_path / "pids").exists():
                    pids.extend(map(int, (tmp_path / "pids").read_text().split()))
                time.sleep(0.05)
            assert all(map(alive, pids))
            raise RuntimeError(" ".join(map(str, pids)))

    with pytest.raises(RuntimeError) as error:
        work()
    assert not any(map(alive, map(int, str(error.value).split())))


def test_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="no end after 1 s"):
        run_logged(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            ENV,
            tmp_path / "log",
            timeout=1.0,
        )
    assert time.monotonic() - began < 60


def test_lines_are_logged_and_passed_on(tmp_path: Path) -> None:
    lines: list[str] = []
    status = run_logged(
        [sys.executable, "-c", "print('one'); import sys; print('two', file=sys.stderr); exit(3)"],
        ENV,
        tmp_path / "log",
        timeout=60.0,
        on_line=lines.append,
    )
    assert status == 3
    assert sorted(lines) == ["one", "two"]
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "two"]


def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("bad flag\n")
    with process_group([sys.executable, "-c", "exit(3)"], ENV, stdout=subprocess.DEVNULL) as server:
        with pytest.raises(serve.ServerError, match="status 3") as error:
            serve.wait_healthy(server, serve.free_port(), log)
        assert "bad flag" in str(error.value)


def test_a_server_without_an_answer() -> None:
    with pytest.raises(serve.ServerError, match="no completion"):
        serve.complete(serve.free_port(), "prompt", 4)


def test_serve_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "materialize", lambda *_: Path("/target"))
    monkeypatch.setattr("repage.demo.engine_run.materialize", lambda *_: Path("/drafter"))
    command = serve.serve_command(SETUPS["headline-cached"], 8123)
    assert command[1:5] == ["-m", "repage.demo.vllm_cli", "serve", "/target"]
    for flag in ("--enforce-eager", "--enable-prefix-caching", "--speculative-config"):
        assert flag in command
    assert "--no-enable-prefix-caching" in serve.serve_command(SETUPS["hybrid-dflash"], 8123)
    assert command[command.index("--port") + 1] == "8123"
    assert command[command.index("--host") + 1] == "127.0.0.1"


@pytest.mark.engine
def test_serving_over_http(engines: EngineRuns, tmp_path: Path) -> None:
    """The real server on the packed layout gives the text of the in-process engine."""
    setup = SETUPS["hybrid-dflash"]
    answer = serve.ask_served(
        setup, packed(32), log=tmp_path / "server.log", cache_dir=engines.cache_dir
    )
    assert answer.completion_tokens == setup.max_tokens
    log = (tmp_path / "server.log").read_text(errors="replace")
    assert "Using BLHNC KV cache layout" in log
    alone = engines.get("hybrid-dflash", replace(packed(32), multiprocess=True))
    assert answer.text == text_of(alone.rounds[0][0].token_ids)


def text_of(token_ids: list[int]) -> str:
    from tokenizers import decoders
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    text: str = decoders.ByteLevel().decode([alphabet[token] for token in token_ids])
    return text


@pytest.mark.engine
def test_an_interrupted_demo_leaves_no_processes(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("processes are found through /proc")
    marker = str(tmp_path / "records")
    command = [sys.executable, "-m", "repage.demo", "--setup", "gemma4", "--out", marker]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not with_argument(marker) - {program.pid} and time.monotonic() < deadline:
        time.sleep(0.2)
    assert with_argument(marker) - {program.pid}, "no engine was started"
    program.send_signal(signal.SIGTERM)
    assert program.wait(timeout=120) == 2
    assert not with_argument(marker)


def with_argument(part: str) -> set[int]:
    """Processes that run with ``part`` in their command line."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if part in arguments:
                found.add(int(entry.name))
    return found
