"""What every chat format shares: the prompt it gives, and the writer that keeps structure and text apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from moonvit.errors import ConfigError, PromptError
from moonvit.prompts.messages import ImagePart, Message, Part
from moonvit.prompts.parser import OutputParser
from moonvit.prompts.tokenizer import Tokenizer

TURN: Final = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
"""Special tokens that turns are written with."""
PICTURE: Final = ("<|media_content|>", "<|media_end|>", "<|media_pad|>")
"""Special tokens of a picture, behind the one that opens it, which every family calls differently."""


@dataclass(frozen=True)
class Prompt:
    """A conversation as the model reads it.

    Attributes:
        ids: Token ids; each picture is a run of the placeholder id as long as its features.
        spans: (start, length) of the run of each picture, in the order of the pictures.
    """

    ids: list[int]
    spans: tuple[tuple[int, int], ...]


class ChatFormat(Protocol):
    """How one model family writes a conversation and how its answers are read.

    Attributes:
        tokenizer: The vocabulary.
        placeholder_id: Id that stands for one row of picture features.
        stop_ids: Ids that end an answer; they are not part of it.
    """

    tokenizer: Tokenizer
    placeholder_id: int
    stop_ids: frozenset[int]

    def render(
        self,
        messages: Sequence[Message],
        image_tokens: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
        preserve_thinking: bool | None = None,
    ) -> Prompt:
        """Write a conversation, ending where the assistant is to speak.

        Args:
            messages: The turns.
            image_tokens: Feature rows of every picture of the messages, in order.
            tools: Tools the model may call, in the OpenAI shape.
            thinking: Ask for reasoning or not; None takes the model's default.
            preserve_thinking: Keep the reasoning of all earlier answers; None takes the format's default.

        Returns:
            The ids and the places of the pictures.

        Raises:
            PromptError: If the conversation or a message that is no answer is empty, or pictures and counts do not
                match.
        """
        ...

    def parser(self, thinking: bool | None = None) -> OutputParser:
        """A reader for one answer to a prompt rendered with the same ``thinking``."""
        ...


class Writer:
    """Collects a prompt. Text between two special tokens is encoded as one stretch, as the official templates do.

    Args:
        tokenizer: The vocabulary.
        placeholder_id: Id that stands for one row of picture features.
        image_tokens: Feature rows of every picture to come, in order.
    """

    def __init__(self, tokenizer: Tokenizer, placeholder_id: int, image_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._placeholder = placeholder_id
        self._counts = list(image_tokens)
        self._ids: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._text: list[str] = []

    def text(self, text: str) -> None:
        """Add ordinary text."""
        self._text.append(text)

    def special(self, *names: str) -> None:
        """Add special tokens."""
        self._flush()
        self._ids += [self._tokenizer.special_id(name) for name in names]

    def open(self, role: str, name: str) -> None:
        """Begin a turn of a role: user, assistant or system."""
        self.special(f"<|im_{role}|>")
        self.text(name)
        self.special("<|im_middle|>")

    def picture(self, begin: str) -> None:
        """Add the next picture, opened by this token."""
        self.special(begin)
        self.text("image")
        self.special("<|media_content|>")
        count = self._counts[len(self._spans)]
        self._spans.append((len(self._ids), count))
        self._ids += [self._placeholder] * count
        self.special("<|media_end|>")

    def prompt(self) -> Prompt:
        """The prompt so far."""
        self._flush()
        return Prompt(list(self._ids), tuple(self._spans))

    def _flush(self) -> None:
        if self._text:
            self._ids += self._tokenizer.encode_text("".join(self._text))
            self._text = []


def require(tokenizer: Tokenizer, names: Sequence[str], family: str) -> None:
    """Refuse a vocabulary that a format cannot be written with, before any request needs it.

    Args:
        tokenizer: The vocabulary.
        names: Special tokens of the format.
        family: Its name, for the message.

    Raises:
        ConfigError: Naming every token that is missing.
    """
    missing = [name for name in names if name not in tokenizer.specials]
    if missing:
        raise ConfigError(f"the vocabulary lacks special tokens of the {family} format: {', '.join(missing)}")


def placeholder_id(config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Id of the picture placeholder, on which configuration and vocabulary must agree.

    Args:
        config: Content of ``config.json``.
        tokenizer: The vocabulary.

    Returns:
        The id.

    Raises:
        ConfigError: If they disagree.
    """
    known = tokenizer.special_id("<|media_pad|>")
    given = config.get("media_placeholder_token_id", config.get("image_token_id", known))
    if given != known:
        raise ConfigError(f"media_placeholder_token_id is {given!r}, but <|media_pad|> is {known} in the vocabulary")
    return known


def check(messages: Sequence[Message], image_tokens: Sequence[int]) -> None:
    """Refuse what no format can render.

    Args:
        messages: The turns.
        image_tokens: Feature rows of every picture.

    Raises:
        PromptError: Naming the message, or both numbers of pictures.
    """
    if not messages:
        raise PromptError("messages is empty; at least one message is needed", param="messages")
    for index, message in enumerate(messages):
        has_text = any(parts_of(message))
        if not has_text and message.role != "assistant":
            raise PromptError(f"messages[{index}] ({message.role}) is empty", param=f"messages[{index}]")
        if message.role != "assistant" and (message.tool_calls or message.reasoning):
            raise PromptError(
                f"messages[{index}] ({message.role}) carries reasoning or tool calls, which only an assistant has",
                param=f"messages[{index}]",
            )
    pictures = sum(len(message.images) for message in messages)
    if pictures != len(image_tokens):
        raise PromptError(
            f"the messages hold {pictures} pictures, but token counts of {len(image_tokens)} were given",
            param="messages",
        )
    for index, count in enumerate(image_tokens):
        if count < 1:
            raise PromptError(f"picture {index} has {count} tokens; at least 1 is needed", param="messages")


def parts_of(message: Message) -> tuple[Part, ...]:
    """The parts of a message that say something: pictures and text that is not empty."""
    return tuple(part for part in message.parts if isinstance(part, ImagePart) or part.text)
