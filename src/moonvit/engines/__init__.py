"""Engines: what turns a conversation with pictures into a stream of text. The server knows only what is here."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from moonvit.errors import ConfigError
from moonvit.families import VisionConfig
from moonvit.prompts.messages import Message

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_tokens: Tokens to generate at most; None fills the context.
        temperature: 0 is greedy; None takes the model's default.
        top_p: Nucleus of the distribution that is sampled from.
        seed: The same seed, prompt and settings give the same text; None draws one.
        stop: The answer ends before the first of these strings, which is not part of it.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerateRequest:
    """One request to an engine.

    Attributes:
        messages: The conversation.
        sampling: How to choose tokens.
        tools: JSON schemas of the tools the model may call, in the OpenAI shape.
        thinking: Ask for reasoning or not; None takes the model's default.
        preserve_thinking: Keep the reasoning of all earlier answers in the prompt; None takes the engine's default.
        id: Name of the request in logs.
    """

    messages: tuple[Message, ...]
    sampling: Sampling = Sampling()
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    id: str = ""


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: ``image_tokens`` are some of ``prompt_tokens``, ``reasoning_tokens`` of the completion's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call: ``id`` and ``name`` come once, ``arguments`` grow."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """A piece of the answer. The last one carries ``finish_reason`` and ``usage``."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class RequestCost:
    """What a request will take, known before it runs.

    Attributes:
        prompt_tokens: Tokens of the whole prompt.
        image_tokens: Those of them that are picture features.
        plan: ``moonvit.plan.Plan.to_dict()`` of its pictures; None for a text-only request.
    """

    prompt_tokens: int
    image_tokens: int
    plan: dict[str, Any] | None = None


@dataclass(frozen=True)
class EngineInfo:
    """What an engine serves.

    Attributes:
        model: Name to use in requests.
        family: Row of ``moonvit.families.FAMILIES``.
        max_context: Tokens of prompt and answer together.
        details: Parameters, dtype, device, budget and the like, for people to read.
        vision: The tower and its picture rule; None for a text-only model, to which no picture is ever handed.
    """

    model: str
    family: str
    max_context: int
    details: dict[str, Any] = field(default_factory=dict)
    vision: VisionConfig | None = None


class Engine(Protocol):
    """The whole contract between the server and whatever runs the model."""

    info: EngineInfo

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Answer a request, piece by piece. Closing the iterator cancels the work."""
        ...

    async def count_tokens(self, request: GenerateRequest) -> RequestCost:
        """Count a request without running the tower or the decoder.

        An ``ImagePart.source`` may here also be ``(width, height)``, upright, where only the size is known.
        """
        ...

    async def health(self) -> bool:
        """Whether the next request can be answered."""
        ...

    async def close(self) -> None:
        """Stop the work in progress and free the model."""
        ...


ENGINES = ("embedded", "vllm")
"""Names of engines; ``vllm`` has a server of its own, which ``moonvit serve`` starts."""


def default_model() -> Path:
    """Where the demo model of this package is."""
    return Path(__file__).parents[1] / "demo"


def open_engine(name: str, model: str | Path | None = None, /, **options: Any) -> Engine:
    """Load an engine; its packages are imported now and not before.

    Args:
        name: ``"embedded"``.
        model: Checkpoint directory or hub id; None takes the demo model.
        **options: What the engine's ``from_pretrained`` takes, such as ``device``, ``dtype`` and ``budget``.

    Returns:
        The engine, ready.

    Raises:
        ConfigError: There is no such engine, or it has no such option.
        CheckpointError: The model's files are missing, broken or do not fit.
        MissingDependencyError: A package the engine needs is not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}", param="engine")
    if name == "vllm":
        raise ConfigError("engine 'vllm' is a server of its own: moonvit serve --engine vllm", param="engine")
    from moonvit.engines.embedded import EmbeddedEngine

    known = set(inspect.signature(EmbeddedEngine.from_pretrained).parameters) - {"path"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"engine {name!r} has no option {', '.join(unknown)}", param=unknown[0])
    return EmbeddedEngine.from_pretrained(default_model() if model is None else model, **options)
