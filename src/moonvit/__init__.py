"""The Kimi vision stack: pictures in, language-model features out, in memory that is known beforehand.

Names whose rooms need torch, numpy or Pillow are imported when they are first used: ``import moonvit`` loads none of
them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moonvit.errors import (
    AuthenticationError,
    BudgetError,
    CheckpointError,
    ConfigError,
    DivergenceError,
    EmptyInputError,
    EngineError,
    GridError,
    ImageError,
    InvalidInputError,
    MediaFetchError,
    MissingDependencyError,
    MoonvitError,
    NonFiniteError,
    NotFoundError,
    OverloadedError,
    PromptError,
    RequestError,
    SlowRequestError,
    TooLargeError,
    UnsupportedMediaError,
)
from moonvit.families import VisionConfig, family_config
from moonvit.grids import Grid
from moonvit.plan import Budget, Plan

if TYPE_CHECKING:
    from moonvit.encoder import Features, VisionEncoder
    from moonvit.images import FetchPolicy, Limits
    from moonvit.parallel import Parallel
    from moonvit.preprocess import tokens_for

__version__ = "0.1.0"

__all__ = [
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
]

_LATER = {
    "Features": "moonvit.encoder",
    "FetchPolicy": "moonvit.images",
    "Limits": "moonvit.images",
    "Parallel": "moonvit.parallel",
    "VisionEncoder": "moonvit.encoder",
    "tokens_for": "moonvit.preprocess",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'moonvit' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
