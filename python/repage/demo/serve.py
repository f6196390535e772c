# SPDX-License-Identifier: Apache-2.0
"""Serves a setup with vLLM's own OpenAI server, asks it one completion over HTTP, and stops it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repage.demo.checkpoints import materialize
from repage.demo.engine_run import speculative_config
from repage.demo.launch import Variant, child_environment
from repage.demo.processes import process_group, tail
from repage.demo.setups import EngineSetup

HOST = "127.0.0.1"
SERVED_NAME = "repage-demo"

HEALTH_TIMEOUT = 300.0
"""Seconds until the server must answer; about 30 on two cores."""

REQUEST_TIMEOUT = 180.0
"""Seconds until one completion must be there."""

# A proxy of the environment has no way to this loopback address.
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server did not start, did not answer, or answered something else than a completion."""


@dataclass(frozen=True)
class Answer:
    """One completion as it came over HTTP.

    Attributes
    ----------
    prompt, text : str
        What was asked and what the model answered.
    completion_tokens : int
        Generated tokens, as the server counts them.
    seconds : float
        From request to answer.
    """

    prompt: str
    text: str
    completion_tokens: int
    seconds: float


def free_port() -> int:
    """Return a TCP port that nothing on the loopback address listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def serve_command(setup: EngineSetup, port: int, cache_dir: Path | None = None) -> list[str]:
    """Return the command that serves ``setup`` on ``port``: ``vllm serve`` with its arguments."""
    command = [sys.executable, "-m", "repage.demo.vllm_cli", "serve"]
    command.append(str(materialize(setup.target, cache_dir)))
    command += ["--host", HOST, "--port", str(port), "--served-model-name", SERVED_NAME]
    for name, value in setup.all_engine_args().items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    if setup.drafter is not None:
        command += ["--speculative-config", json.dumps(speculative_config(setup, cache_dir))]
    return command


def ask_served(
    setup: EngineSetup,
    variant: Variant,
    *,
    log: Path,
    cache_dir: Path | None = None,
    prompt: str | None = None,
) -> Answer:
    """Start the server, wait until it is healthy, ask one completion, stop it.

    Parameters
    ----------
    setup, variant
        What to serve; the engine core runs in a process of its own, as always with a server.
    log : Path
        File for the server's output.
    cache_dir : Path, optional
        Folder of the built checkpoints.
    prompt : str, optional
        Default: the setup's first prompt.

    Raises
    ------
    ServerError
        If the server is not healthy within `HEALTH_TIMEOUT` or gives no completion. It is stopped
        on every way out, with all its processes.
    """
    port = free_port()
    served = Variant(variant.layout, variant.page, variant.plugin, multiprocess=True)
    question = prompt if prompt is not None else setup.prompts()[0]
    with (
        log.open("w") as sink,
        process_group(
            serve_command(setup, port, cache_dir),
            child_environment(setup, served),
            stdout=sink.fileno(),
        ) as server,
    ):
        wait_healthy(server, port, log)
        return complete(port, question, setup.max_tokens)


def wait_healthy(server: subprocess.Popen[str], port: int, log: Path) -> None:
    """Wait until ``GET /health`` answers 200.

    Raises
    ------
    ServerError
        If the server ends first, or `HEALTH_TIMEOUT` passes.
    """
    deadline = time.monotonic() + HEALTH_TIMEOUT
    while time.monotonic() < deadline:
        status = server.poll()
        if status is not None:
            raise ServerError(f"the server ended with status {status}; log: {log}\n{tail(log)}")
        try:
            with _NO_PROXY.open(f"http://{HOST}:{port}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise ServerError(f"the server was not healthy after {HEALTH_TIMEOUT:.0f} s; log: {log}")


def complete(port: int, prompt: str, max_tokens: int) -> Answer:
    """Ask the server for one greedy completion.

    Raises
    ------
    ServerError
        If there is no answer within `REQUEST_TIMEOUT`, or it is not a completion.
    """
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions",
        data=json.dumps({**body, "ignore_eos": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    began = time.perf_counter()
    try:
        with _NO_PROXY.open(request, timeout=REQUEST_TIMEOUT) as response:
            answer: dict[str, Any] = json.load(response)
        text = answer["choices"][0]["text"]
        tokens = answer["usage"]["completion_tokens"]
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")
        raise ServerError(f"the server answered {error.code}: {detail}") from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ServerError(f"no completion from the server: {error!r}") from error
    return Answer(prompt, text, tokens, time.perf_counter() - began)
