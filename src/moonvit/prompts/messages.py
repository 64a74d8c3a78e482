"""The conversation as plain data: what the server and the command line hand to a prompt format and an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class TextPart:
    """Words typed by somebody; never read as structure, whatever they contain."""

    text: str


@dataclass(frozen=True)
class ImagePart:
    """One picture at its place in the message.

    Attributes:
        source: Anything ``moonvit.images.open_picture`` reads.
        param: Where it stood in the request, for error messages.
    """

    source: Any
    param: str | None = None


Part = TextPart | ImagePart


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by the assistant; ``arguments`` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: Who speaks.
        parts: Text and pictures in the order given.
        reasoning: Thinking of an assistant turn, where history holds it.
        tool_calls: Calls of an assistant turn.
        tool_call_id: The call a tool turn answers.
        name: Name of the tool or speaker.
    """

    role: Role
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """The pictures of this turn, in order."""
        return tuple(part for part in self.parts if isinstance(part, ImagePart))
