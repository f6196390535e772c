from __future__ import annotations

import dataclasses

import pytest

from repage.errors import SettingError
from repage.vllm.settings import Settings


def test_nothing_set_means_on_lenient_and_whole_blocks():
    assert Settings.from_env({}) == Settings(False, False, False, None)


def test_every_variable_is_read():
    environ = {"REPAGE_STRICT": "1", "REPAGE_DEBUG": "1", "REPAGE_CPU_PAGE": "64"}
    assert Settings.from_env(environ) == Settings(False, True, True, 64)


@pytest.mark.parametrize("value", ["", "0"])
def test_zero_and_empty_are_off(value: str):
    environ = {"REPAGE_DISABLE": value, "REPAGE_STRICT": value, "REPAGE_DEBUG": value}
    assert Settings.from_env(environ) == Settings()


@pytest.mark.parametrize("name", ["REPAGE_DISABLE", "REPAGE_STRICT", "REPAGE_DEBUG"])
@pytest.mark.parametrize("value", ["yes", "2", "true", " 1"])
def test_a_flag_that_is_neither_0_nor_1_is_named(name: str, value: str):
    with pytest.raises(SettingError, match=rf"{name}: expected 0 or 1, got '{value}'"):
        Settings.from_env({name: value})


@pytest.mark.parametrize("value", ["16", "33", "640", "-32", "32.0", "all"])
def test_a_cpu_page_outside_the_list_is_named(value: str):
    with pytest.raises(SettingError, match=r"REPAGE_CPU_PAGE: expected 32, 64, 128 tokens, got"):
        Settings.from_env({"REPAGE_CPU_PAGE": value})


def test_a_disabled_plugin_looks_at_nothing_else():
    environ = {"REPAGE_DISABLE": "1", "REPAGE_CPU_PAGE": "nonsense"}
    assert Settings.from_env(environ) == Settings(disable=True)


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REPAGE_CPU_PAGE", "32")
    assert Settings.from_env().cpu_page == 32
    monkeypatch.setenv("REPAGE_CPU_PAGE", "128")
    assert Settings.from_env().cpu_page == 128


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().disable = True
