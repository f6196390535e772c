from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from repage.errors import SettingError, UnsupportedVllmError
from repage.vllm import compat, logs, probes, register
from repage.vllm.preference.hooks import remove_hooks
from repage.vllm.registration import BACKENDS
from support import vllm_log

CPU = AttentionBackendEnum.CPU_ATTN


@pytest.fixture(autouse=True)
def _unregistered():
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in BACKENDS:
        AttentionBackendEnum[name].clear_override()
    remove_hooks()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch):
    """Lines that reach vLLM's handlers from now on."""
    with vllm_log.kept(monkeypatch) as records:
        yield records


def test_registering_twice_is_registering_once(lines):
    register()
    path = CPU.get_path()
    register()
    assert path == BACKENDS["CPU_ATTN"] == CPU.get_path()
    assert lines == []


def test_the_registered_path_leads_to_a_cpu_backend_of_vllms_kind():
    register()
    backend = CPU.get_class()
    assert issubclass(backend, compat.cpu_attention_backend())
    assert backend.get_name() == "CPU_ATTN"
    assert backend.full_cls_name() == ("repage.vllm.cpu_attn", "RepagedCPUAttentionBackend")


def _python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_importing_the_plugin_and_disabling_it_do_not_import_vllm():
    code = (
        "import sys, repage.vllm\n"
        "assert 'vllm' not in sys.modules\n"
        "repage.vllm.register()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'vllm']\n"
    )
    done = _python(code, REPAGE_DISABLE="1", REPAGE_STRICT="1")
    assert done.returncode == 0, done.stderr


def test_registering_does_not_import_model_layers():
    """Every process registers, also the API server, which runs no model."""
    code = (
        "import sys, repage.vllm\n"
        "repage.vllm.register()\n"
        "heavy = ('vllm.model_executor.layers.attention', 'vllm.v1.worker.cpu_model_runner',\n"
        "         'vllm.v1.attention.backends.cpu_attn')\n"
        "assert not [name for name in heavy if name in sys.modules]\n"
    )
    done = _python(code)
    assert done.returncode == 0, done.stderr


def test_disabled_leaves_the_registry_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REPAGE_DISABLE", "1")
    register()
    assert not CPU.is_overridden()


def test_a_bad_setting_stops_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REPAGE_CPU_PAGE", "48")
    with pytest.raises(SettingError, match="REPAGE_CPU_PAGE"):
        register()
    assert not CPU.is_overridden()


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0rc1", "1.0", "unknown"])
def test_an_unknown_version_costs_one_line_and_changes_nothing(
    version: str, monkeypatch: pytest.MonkeyPatch, lines
):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    register()
    register()
    assert not CPU.is_overridden()
    (line,) = lines
    assert line.name == "repage"
    assert version in line.getMessage()
    assert ">=0.32,<0.34" in line.getMessage()


def test_strict_makes_an_unknown_version_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REPAGE_STRICT", "1")
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.31.0")
    with pytest.raises(UnsupportedVllmError, match=r"0\.31\.0"):
        register()
    assert not CPU.is_overridden()


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1.dev5+gabc123", True),
        ("0.34.0", False),
        ("0.31.2", False),
        ("dev", False),
    ],
)
def test_versions(version: str, supported: bool):
    assert compat.is_supported_version(version) is supported


def test_the_version_comes_from_metadata_when_the_package_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
):
    import vllm

    stated = compat.vllm_version()
    monkeypatch.setattr(vllm, "__version__", "dev")
    assert compat.is_supported_version(compat.vllm_version())
    assert compat.vllm_version().split("+")[0] == stated.split("+")[0]


def test_all_probes_hold_for_the_installed_vllm():
    assert probes.failed_probes() == []


def test_each_probe_says_what_it_is_for():
    assert all(probe.name and probe.reason for probe in probes.PROBES)
    assert len({probe.name for probe in probes.PROBES}) == len(probes.PROBES)


@pytest.mark.parametrize(
    ("target", "attribute", "named"),
    [
        ("vllm.v1.attention.backend.AttentionBackend", "customize_spec", "AttentionBackend"),
        (
            "vllm.v1.attention.backend.AttentionMetadataBuilder",
            "update_draft_decode_metadata",
            "AttentionMetadataBuilder",
        ),
        ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", "UniformTypeKVCacheSpecs"),
        ("vllm.v1.kv_cache_interface.KVCacheSpec", "copy_with_new_block_size", "AttentionSpec"),
        ("vllm.config", "get_current_vllm_config_or_none", "VllmConfig"),
    ],
)
def test_a_missing_name_refuses_before_anything_is_changed(
    target: str, attribute: str, named: str, monkeypatch: pytest.MonkeyPatch, lines
):
    monkeypatch.delattr(f"{target}.{attribute}")
    register()
    assert not CPU.is_overridden()
    (line,) = lines
    assert named in line.getMessage()
    monkeypatch.setenv("REPAGE_STRICT", "1")
    with pytest.raises(UnsupportedVllmError, match=named):
        register()


def test_a_renamed_argument_is_seen(monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    def renamed(self, metadata, table, slots):
        del self, metadata, table, slots

    monkeypatch.setattr(AttentionMetadataBuilder, "update_block_table", renamed)
    (failure,) = probes.failed_probes()
    assert failure.startswith("AttentionMetadataBuilder")


def test_probes_by_source_see_missing_methods():
    module, cls = "vllm.v1.worker.cpu_model_runner", "CPUModelRunner"
    assert probes._source_has(module, cls, {"_zero_block_ids": ("block_ids",)})
    assert not probes._source_has(module, cls, {"_zero_block_ids": ("blocks",)})
    assert not probes._source_has(module, cls, {"_gone": ()})
    assert not probes._source_has(module, "Gone", {})
    assert not probes._source_has("vllm.no_such_module", cls, {})


def test_another_plugins_backend_stays(lines):
    register_backend(CPU, "someone.elses.Backend")
    register()
    assert CPU.get_path() == "someone.elses.Backend"
    (line,) = lines
    assert "someone.elses.Backend" in line.getMessage()


def test_the_logger_uses_vllms_handlers_without_duplicates(lines, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", False)  # as vLLM configures it
    logger = logs.get_logger()
    assert logs.get_logger() is logger
    (handler,) = (
        item for item in logging.getLogger("vllm").handlers if isinstance(item, vllm_log.Keep)
    )
    logging.getLogger().addHandler(handler)  # as after logging.basicConfig()
    try:
        logger.warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert [record.getMessage() for record in lines] == ["once"]


def test_the_logger_keeps_vllms_level(lines, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.WARNING)
    logging.getLogger("vllm").manager._clear_cache()
    logs.get_logger().info("too quiet")
    assert lines == []
    logs.get_logger().warning("loud enough")
    assert len(lines) == 1
    monkeypatch.undo()
    logging.getLogger("vllm").manager._clear_cache()
