"""MOE_PATCH: which values are on, which are off, which are refused."""

from __future__ import annotations

import runpy

import pytest

from moe_patch import environment, switch
from moe_patch.__main__ import main
from moe_patch.switch import OFF, ON, is_on


@pytest.mark.parametrize("word", ["0", "false", "off", "no", "False", "OFF", " No "])
def test_off(word):
    assert is_on(word) is False


@pytest.mark.parametrize("word", [None, "", " ", "1", "true", "on", "yes", "TRUE", "Yes"])
def test_on(word):
    assert is_on(word) is True


@pytest.mark.parametrize("word", ["2", "of", "none", "disabled", "00", "n"])
def test_another_value_is_refused_by_name(word):
    with pytest.raises(ValueError) as caught:
        is_on(word)
    said = str(caught.value)
    assert f"MOE_PATCH is {word!r}" in said and all(known in said for known in ON + OFF)


def test_commands_name_the_value(capsys, monkeypatch):
    monkeypatch.setattr(switch, "ENABLED", False)
    monkeypatch.setattr(environment, "table", str)
    monkeypatch.setenv("MOE_PATCH", "off")
    assert main(["env"]) == 0
    assert "run Hugging Face's own forward (MOE_PATCH=off)" in capsys.readouterr().out
    assert main(["parity"]) == 2
    assert "MOE_PATCH=off is set" in capsys.readouterr().err


def test_an_empty_value_is_not_set(capsys, monkeypatch):
    monkeypatch.setattr(environment, "table", str)
    monkeypatch.setenv("MOE_PATCH", "")
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("MOE_PATCH"))
    assert line.endswith("not set")


@pytest.mark.parametrize("value, enabled", [("No", False), ("yes", True), ("", True)])
def test_it_is_read_on_import(monkeypatch, value, enabled):
    """Runs the module; test_decorated has a process with MOE_PATCH=0, and one without it."""
    monkeypatch.setenv("MOE_PATCH", value)
    assert runpy.run_path(switch.__file__)["ENABLED"] is enabled
