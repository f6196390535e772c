# SPDX-License-Identifier: Apache-2.0
"""The harness: settings, plugin, the real backend modules on a pretended device."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reference_kernels.capability import CapabilityProxy
from reference_kernels.harness import FLASHINFER_ENVIRONMENT, HarnessSettings
from reference_kernels.plugin import PLUGIN_NAME, write_distribution
from reference_kernels.signatures import site_dir_file

TESTS = Path(__file__).resolve().parent.parent


def in_process_of_its_own(code: str, **variables: str) -> str:
    """The last line that ``code`` prints."""
    environment = {**os.environ, **FLASHINFER_ENVIRONMENT, **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), variables.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


def test_settings_travel_in_the_environment(tmp_path: Path) -> None:
    settings = HarnessSettings(
        "xqa",
        "module:factory",
        vllm_033=tmp_path,
        float32=True,
        page_tokens=32,
        fault="wrong-step",
        report=tmp_path / "report",
    )
    assert HarnessSettings.from_environment(settings.to_environment()) == settings
    plain = HarnessSettings("fa4")
    assert HarnessSettings.from_environment(plain.to_environment()) == plain
    with pytest.raises(KeyError):
        HarnessSettings.from_environment({"REPAGE_TEST_KERNELS": "none"})


def test_plugin_is_found_without_being_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in write_distribution(tmp_path):
        monkeypatch.syspath_prepend(entry)
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name=PLUGIN_NAME)
    assert [point.value for point in found] == ["reference_kernels.plugin:register"]
    assert all(callable(point.load()) for point in found)


@pytest.mark.parametrize(
    ("capability", "exact", "at_least", "family"),
    [((9, 0), 90, (8, 0), 90), ((10, 3), (10, 3), 100, 100)],
)
def test_capability_proxy(
    capability: tuple[int, int], exact: Any, at_least: Any, family: int
) -> None:
    class Platform:
        name = "cpu"

    proxy = CapabilityProxy(Platform(), capability)
    assert proxy.name == "cpu"
    assert proxy.is_device_capability(exact)
    assert not proxy.is_device_capability(80)
    assert proxy.has_device_capability(at_least)
    assert not proxy.has_device_capability(120)
    assert proxy.is_device_capability_family(family)
    assert not proxy.is_device_capability_family(80)


def test_a_directory_without_vllm_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="unpacked vllm"):
        site_dir_file(tmp_path, "vllm", "file.py")


FLASHINFER = """
import json, sys
from reference_kernels.harness import HarnessSettings, install
import vllm.utils.flashinfer as utils
from vllm.platforms import current_platform

answers = {}
for path in ("fi-native", "xqa", "trtllm-gen"):
    settings = HarnessSettings(path, factory=sys.argv[1] if len(sys.argv) > 1 else None)
    backend = install(settings, settings.context())
    module = sys.modules["vllm.v1.attention.backends.flashinfer"]
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper
    layouts = backend.supported_kv_cache_layouts()
    answers[path] = {
        "name": backend.get_name(),
        "class": f"{backend.__module__}.{backend.__name__}",
        "prefill": utils.supports_trtllm_attention(True),
        "decode": utils.supports_trtllm_attention(False),
        "layouts": layouts and [layout.name for layout in layouts],
        "capability": wrapper.context.capability,
        "workspace": str(module._get_trtllm_workspace_buffer().device),
        "platform": current_platform.get_device_capability(),
    }
print(json.dumps(answers))
"""


def test_flashinfer_takes_the_branches_of_each_device() -> None:
    answers = json.loads(in_process_of_its_own(FLASHINFER))
    common = {
        "name": "FLASHINFER",
        "class": "vllm.v1.attention.backends.flashinfer.FlashInferBackend",
        "workspace": "cpu",
        # The engine itself stays on a platform without a device.
        "platform": None,
    }
    any_layout = {**common, "layouts": None, "prefill": False}
    head_major = {**common, "layouts": ["LBHNC", "BLHNC"], "prefill": True}
    assert answers == {
        "fi-native": {**any_layout, "decode": False, "capability": [8, 0]},
        "xqa": {**any_layout, "decode": True, "capability": [9, 0]},
        "trtllm-gen": {**head_major, "decode": True, "capability": [10, 0]},
    }


FLASH_ATTENTION = """
import sys
import reference_kernels.selected_backend as selected
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
backend = selected.SelectedBackend
real = sys.modules["vllm.v1.attention.backends.flash_attn"]
print(backend.__name__, issubclass(backend, real.FlashAttentionBackend),
      get_flash_attn_version(), get_flash_attn_version(head_size=256, supports_fa4_hd256=True),
      real.__file__)
"""


@pytest.mark.parametrize(("path", "version"), [("fa2", 2), ("fa3", 3), ("fa4", 4)])
def test_flash_attention_versions_and_factories(path: str, version: int, tmp_path: Path) -> None:
    (tmp_path / "throwaway.py").write_text(
        "def factory(real):\n    return type('Changed', (real,), {})\n"
    )
    settings = HarnessSettings(path, "throwaway:factory")
    output = in_process_of_its_own(
        FLASH_ATTENTION, **settings.to_environment(), PYTHONPATH=str(tmp_path)
    )
    assert output.split()[:4] == ["Changed", "True", str(version), str(version)]


BACKEND_FILE = """
import sys
import reference_kernels.selected_backend as selected
print(sys.modules[selected.SelectedBackend.__module__].__file__)
"""


@pytest.mark.skipif("REPAGE_TEST_VLLM_033" not in os.environ, reason="REPAGE_TEST_VLLM_033 not set")
@pytest.mark.parametrize("path", ["trtllm-gen", "fa4"])
def test_backend_modules_of_033(path: str) -> None:
    site_dir = Path(os.environ["REPAGE_TEST_VLLM_033"])
    settings = HarnessSettings(path, vllm_033=site_dir)
    file = in_process_of_its_own(BACKEND_FILE, **settings.to_environment())
    assert Path(file).is_relative_to(site_dir)
