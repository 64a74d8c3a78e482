"""The plugin's registration, without vLLM: what it leaves alone, and what it says then."""

from __future__ import annotations

import logging
import subprocess
import sys
import types

import pytest

from moonvit.engines import vllm as room


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a registry of vLLM 0.32 was told."""
    told: dict[str, str] = {}
    fake = types.ModuleType("vllm")
    fake.ModelRegistry = types.SimpleNamespace(register_model=told.__setitem__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(room, "_installed", lambda: "0.32.0+cpu")
    monkeypatch.delenv(room.SWITCH, raising=False)
    return told


def test_classes_are_named_under_the_stock_architectures(registered: dict[str, str]) -> None:
    for _ in range(2):
        room.register()
    assert registered == {
        "KimiVLForConditionalGeneration": "moonvit.engines.vllm.model:BoundedKimiVL",
        "KimiK25ForConditionalGeneration": "moonvit.engines.vllm.model:BoundedKimiK25",
    }


@pytest.mark.parametrize("said", ["off", "OFF", "0", "false", "no"])
def test_it_can_be_switched_off(
    registered: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(room.SWITCH, said)
    with caplog.at_level(logging.INFO, logger=room.log.name):
        room.register()
    assert registered == {} and "switched off by MOONVIT_VLLM" in caplog.text


@pytest.mark.parametrize("release", ["0.29.1", "0.33.0", "1.0.0", "dev", None])
def test_another_release_is_left_alone_with_one_warning(
    registered: dict[str, str], release: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "_installed", lambda: release)
    room.register()
    assert registered == {}
    [record] = caplog.records
    assert record.levelno == logging.WARNING and (release or "unknown") in record.getMessage()
    assert "known are 0.30 to 0.32" in record.getMessage()


@pytest.mark.parametrize("release", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.32.1rc1"])
def test_known_releases(registered: dict[str, str], release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_installed", lambda: release)
    room.register()
    assert len(registered) == 2


def test_registering_opens_neither_torch_nor_vllm() -> None:
    code = "import sys, moonvit.engines.vllm as room; room.register(); print('torch' in sys.modules, 'vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"], "vLLM is not installed here"
