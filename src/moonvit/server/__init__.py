"""The server: OpenAI chat completions with pictures, what a request costs, and a page; see ``moonvit.server.app``."""

from __future__ import annotations

from importlib.util import find_spec

from moonvit.errors import MissingDependencyError

_NEEDED = ("fastapi", "uvicorn", "pydantic_settings", "prometheus_client")
_missing = [name for name in _NEEDED if find_spec(name) is None]
if _missing:
    raise MissingDependencyError(f"the server needs {', '.join(_missing)}: pip install 'moonvit[serve]'")

from moonvit.server.app import create_app, run  # noqa: E402  what is missing is said first

__all__ = ["create_app", "run"]
