"""What every chat format shares: a prompt as ids, a writer that keeps structure and typed text apart, and the checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonvit.errors import ConfigError, PromptError
from moonvit.prompts.messages import ImagePart, Message, TextPart
from moonvit.prompts.parser import Mark, OutputParser
from moonvit.prompts.tokenizer import Tokenizer

MEDIA_PAD = "<|media_pad|>"
"""The special token that is repeated where the features of a picture go."""
IM_END = "<|im_end|>"
"""The special token that ends a turn."""


@dataclass(frozen=True)
class Prompt:
    """A conversation as the model reads it.

    Attributes:
        ids: Token ids.
        spans: (start, length) of each picture's placeholders, in the order of the pictures.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def image_tokens(self) -> int:
        """How many of the ids are placeholders of pictures."""
        return sum(length for _, length in self.spans)


class Writer:
    """Lays a prompt out. Text between two special tokens is encoded in one piece, as the released templates do.

    Args:
        tokenizer: Of the model.
        media_id: The placeholder.
    """

    def __init__(self, tokenizer: Tokenizer, media_id: int) -> None:
        self._tokenizer = tokenizer
        self._media_id = media_id
        self._ids: list[int] = []
        self._text: list[str] = []
        self._spans: list[tuple[int, int]] = []

    def special(self, *names: str) -> None:
        """Write special tokens."""
        self._flush()
        self._ids += [self._tokenizer.special_id(name) for name in names]

    def text(self, text: str) -> None:
        """Write text; whatever it holds, it stays text."""
        self._text.append(text)

    def pads(self, count: int) -> None:
        """Write the placeholders of the next picture."""
        self._flush()
        self._spans.append((len(self._ids), count))
        self._ids += [self._media_id] * count

    def prompt(self) -> Prompt:
        """What was written."""
        self._flush()
        return Prompt(tuple(self._ids), tuple(self._spans))

    def _flush(self) -> None:
        if self._text:
            self._ids += self._tokenizer.encode_text("".join(self._text))
            self._text = []


class ChatFormat(ABC):
    """The chat format of a family, for one tokenizer.

    Args:
        tokenizer: Of the model.
        media_id: The placeholder, as the configuration of the model says; None takes the tokenizer's.

    Attributes:
        tokenizer: Of the model.
        media_id: The placeholder.
        end_ids: Tokens that end an answer.

    Raises:
        ConfigError: The tokenizer lacks a special token of the format, or disagrees on the placeholder.
    """

    name: str
    structure: tuple[str, ...]
    """Special tokens the format cannot do without."""

    def __init__(self, tokenizer: Tokenizer, media_id: int | None = None) -> None:
        missing = [name for name in (*self.structure, MEDIA_PAD, IM_END) if name not in tokenizer.specials]
        if missing:
            raise ConfigError(f"the tokenizer lacks special tokens of the {self.name} format: {', '.join(missing)}")
        pad = tokenizer.special_id(MEDIA_PAD)
        if media_id is not None and media_id != pad:
            raise ConfigError(
                f"media_placeholder_token_id = {media_id}, but {MEDIA_PAD} of the tokenizer is {pad}",
                param="media_placeholder_token_id",
            )
        self.tokenizer = tokenizer
        self.media_id = pad
        self.end_ids = frozenset({tokenizer.special_id(IM_END)})
        named = [name for name in tokenizer.specials if name.startswith("<|") and "reserved_token_" not in name]
        self._marks = dict.fromkeys(named, Mark.NOTHING) | dict(self.marks())

    @abstractmethod
    def marks(self) -> Mapping[str, Mark]:
        """Spelling -> meaning of the marks that may stand in an answer."""

    @abstractmethod
    def render(
        self,
        messages: Sequence[Message],
        image_tokens: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> Prompt:
        """Lay a conversation out, with the beginning of the answer.

        Args:
            messages: The conversation.
            image_tokens: Feature rows of each picture, in the order of the pictures.
            tools: Schemas of tools, in the OpenAI shape.
            thinking: Whether the answer begins with reasoning; None takes the format's default.

        Returns:
            Ids, and where the features go.

        Raises:
            PromptError: A message is empty, holds something the format has no place for, or the number of pictures is
                not that of ``image_tokens``.
        """

    @abstractmethod
    def starts_reasoning(self, thinking: bool | None) -> bool:
        """Whether ``render`` with the same argument ends inside the reasoning."""

    def parser(self, thinking: bool | None = None, stop: Collection[str] = ()) -> OutputParser:
        """A parser for one answer.

        Args:
            thinking: As given to ``render``.
            stop: The content ends before the first of these.

        Returns:
            The parser.
        """
        return OutputParser(self.tokenizer, self._marks, reasoning=self.starts_reasoning(thinking), stop=stop)


def check_messages(messages: Sequence[Message], image_tokens: Sequence[int]) -> None:
    """The checks that do not depend on the family.

    Args:
        messages: The conversation.
        image_tokens: Feature rows of each picture.

    Raises:
        PromptError: There are no messages, one of them is empty, an assistant message holds a picture, the number of
            pictures is not that of ``image_tokens``, or a picture has no rows.
    """
    if not messages:
        raise PromptError("messages is empty: a conversation needs at least one message", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        written = any(isinstance(part, ImagePart) or part.text for part in message.parts)
        if not written and not message.tool_calls and not message.reasoning:
            raise PromptError(f"{where} is empty: it holds neither text nor a picture", param=f"{where}.content")
        if message.role == "assistant" and message.images:
            raise PromptError(
                f"{where}: the model writes no pictures, so an assistant message cannot hold one; "
                "put it into a user or tool message",
                param=message.images[0].param or f"{where}.content",
            )
    pictures = sum(len(message.images) for message in messages)
    if pictures != len(image_tokens):
        raise PromptError(
            f"the messages hold {pictures} picture(s), but features of {len(image_tokens)} were given", param="messages"
        )
    for index, count in enumerate(image_tokens):
        if count < 1:
            raise PromptError(f"picture {index} has {count} tokens, expected at least 1", param=f"images[{index}]")


def text_of(message: Message) -> str:
    """The text parts of a message, one behind the other."""
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))
