"""The names the package gives, and nothing it gives by accident."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import moonvit
from moonvit import errors

NAMES = {
    "AuthenticationError",
    "Budget",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "EmptyInputError",
    "EngineError",
    "Features",
    "FetchPolicy",
    "Grid",
    "GridError",
    "ImageError",
    "InvalidInputError",
    "Limits",
    "MediaFetchError",
    "MissingDependencyError",
    "MoonvitError",
    "NonFiniteError",
    "NotFoundError",
    "OverloadedError",
    "Parallel",
    "Plan",
    "PromptError",
    "RequestError",
    "SlowRequestError",
    "TooLargeError",
    "UnsupportedMediaError",
    "VisionConfig",
    "VisionEncoder",
    "__version__",
    "family_config",
    "tokens_for",
}


def test_exported_names() -> None:
    assert set(moonvit.__all__) == NAMES
    assert len(moonvit.__all__) == len(NAMES)
    for name in NAMES:
        assert getattr(moonvit, name) is not None
        assert name in dir(moonvit)


def test_every_error_is_exported() -> None:
    kinds = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert kinds <= NAMES
    assert all(getattr(moonvit, name) is getattr(errors, name) for name in kinds)


def test_names_come_from_where_they_live() -> None:
    from moonvit.encoder import Features, VisionEncoder
    from moonvit.images import FetchPolicy, Limits
    from moonvit.parallel import Parallel
    from moonvit.preprocess import tokens_for

    expected: dict[str, Any] = {
        "Features": Features,
        "VisionEncoder": VisionEncoder,
        "FetchPolicy": FetchPolicy,
        "Limits": Limits,
        "Parallel": Parallel,
        "tokens_for": tokens_for,
    }
    assert {name: getattr(moonvit, name) for name in expected} == expected


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'moonvit' has no attribute 'Encoder'"):
        _ = moonvit.Encoder
    with pytest.raises(ImportError):
        from moonvit import Encoder  # noqa: F401


def test_the_version_is_that_of_the_project() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    match = re.search(r'^version = "([^"]+)"$', text, re.M)
    assert match is not None and match[1] == moonvit.__version__


def test_what_is_exported_is_documented() -> None:
    for name in NAMES - {"__version__"}:
        thing = getattr(moonvit, name)
        assert inspect.getdoc(thing), name
    for thing in (
        moonvit.VisionEncoder,
        moonvit.Budget,
        moonvit.Plan,
        moonvit.Grid,
        moonvit.Limits,
        moonvit.FetchPolicy,
        moonvit.Parallel,
    ):
        for name, member in inspect.getmembers(thing):
            if not name.startswith("_") and callable(member) and name in vars(thing):
                assert inspect.getdoc(member), f"{thing.__name__}.{name}"
