# SPDX-License-Identifier: Apache-2.0
"""Results, exit codes, the command line, and machines without a GPU or FlashInfer."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from click.testing import CliRunner

from repage.errors import ArgumentError
from repage.selftest import CheckResult, Status, command, exit_code, run
from repage.selftest.result import Check, CheckFailedError, Finding, NotAvailableError
from repage.selftest.run import all_checks, select_checks
from repage.selftest.target import Target, load_attention_kernels

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def answering(error: Exception | None) -> Check:
    def body(_target: Target) -> Finding:
        if error is not None:
            raise error
        return Finding("compared", {"copy_us": 2.0})

    return Check("group.name", body)


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (None, Status.PASS, "compared"),
        (CheckFailedError("two bits differ"), Status.FAIL, "two bits differ"),
        (NotAvailableError("no driver"), Status.NOT_AVAILABLE, "no driver"),
        (RuntimeError("illegal address"), Status.FAIL, "RuntimeError: illegal address"),
    ],
)
def test_a_check_is_a_value(
    error: Exception | None, status: Status, detail: str, target: Target
) -> None:
    result = answering(error).run(target)
    assert (result.name, result.status, result.detail) == ("group.name", status, detail)
    assert result.seconds >= 0
    assert json.loads(json.dumps(result.as_dict()))["status"] == status.value
    assert result.measurements == ({"copy_us": 2.0} if error is None else {})


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([Status.PASS, Status.NOT_AVAILABLE], 0),
        ([Status.PASS, Status.FAIL, Status.NOT_AVAILABLE], 1),
        ([Status.NOT_AVAILABLE], 2),
        ([], 2),
    ],
)
def test_exit_codes(statuses: list[Status], code: int) -> None:
    assert exit_code([CheckResult("name", status, "", 0.0) for status in statuses]) == code


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["ops.page_table"], {"ops.page_table"}),
        (["timing", "ops.slots"], {"timing.operations", "ops.slots"}),
        (["tensor_map.*.HNC"], {f"tensor_map.{k}.HNC" for k in ("xqa", "trtllm-gen", "fa4-hd256")}),
    ],
)
def test_selection(only: list[str], names: set[str]) -> None:
    assert {check.name for check in select_checks(only)} == names


def test_a_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"no check matches 'op'; names begin with attention,"):
        run(only=["op"])


@without_gpu
def test_without_a_gpu_every_check_says_so() -> None:
    seen: list[CheckResult] = []
    results = run(report=seen.append)
    assert seen == results
    assert [result.name for result in results] == [check.name for check in all_checks()]
    assert {(result.status, result.detail) for result in results} == {
        (Status.NOT_AVAILABLE, "no CUDA device")
    }


def test_a_cpu_device_is_not_available() -> None:
    (result,) = run(torch.device("cpu"), only=["ops.slots"])
    assert (result.status, result.detail) == (
        Status.NOT_AVAILABLE,
        "needs a CUDA device, got cpu",
    )


@without_gpu
def test_the_command_without_a_gpu() -> None:
    table = CliRunner().invoke(command.selftest_command, ["--only", "ops"])
    assert table.exit_code == 2
    assert "no CUDA device" in table.output
    assert "0 pass, 0 fail, 7 not available" in table.output
    answer = CliRunner().invoke(command.selftest_command, ["--json", "--quick", "--only", "timing"])
    assert answer.exit_code == 2
    report = json.loads(answer.output)
    assert report["torch"] == torch.__version__
    assert [result["status"] for result in report["results"]] == ["not available"]


@pytest.mark.parametrize(("status", "code"), [(Status.PASS, 0), (Status.FAIL, 1)])
def test_the_command_ends_with_the_exit_code(
    status: Status, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [CheckResult("ops.slots", status, "[bold]as it is[/bold]", 0.25)]
    monkeypatch.setattr(command, "run", lambda **_options: results)
    table = CliRunner().invoke(command.selftest_command, [])
    assert table.exit_code == code
    assert "[bold]as it is[/bold]" in table.output


def test_the_command_refuses_unknown_names() -> None:
    answer = CliRunner().invoke(command.selftest_command, ["--only", "speed"])
    assert answer.exit_code == 2
    assert "no check matches 'speed'" in answer.output


def test_flashinfer_is_found() -> None:
    import flashinfer

    kernels = load_attention_kernels()
    assert kernels.version == flashinfer.__version__
    assert kernels.decode_wrapper is flashinfer.BatchDecodeWithPagedKVCacheWrapper
    assert kernels.xqa_decode is flashinfer.decode.xqa_batch_decode_with_kv_cache


def test_flashinfer_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(NotAvailableError, match=r"^flashinfer is not installed$"):
        load_attention_kernels()


def test_flashinfer_may_be_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    with pytest.raises(NotAvailableError, match="flashinfer cannot be imported: AttributeError"):
        load_attention_kernels()
