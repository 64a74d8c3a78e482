"""The chat format of Kimi-K2.5, K2.6 and K2.7-Code.

A picture is ``<|media_begin|>image<|media_content|><|media_pad|>...<|media_end|>`` and a line break. Every assistant
turn opens with a think block: empty up to the last answer that called no tool, whole after it. The prompt ends inside
an open think block, or behind an empty one where no thinking is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from moonvit.prompts.chat import Prompt, Writer, check, parts_of, require
from moonvit.prompts.messages import ImagePart, Message
from moonvit.prompts.parser import Mark, OutputParser
from moonvit.prompts.tokenizer import Tokenizer
from moonvit.prompts.tools import declare

STRUCTURE: Final = (
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
)
"""Special tokens that turns and pictures are written with."""
SPECIAL_MARKERS: Final[Mapping[str, Mark]] = {
    "<think>": Mark.THINK,
    "</think>": Mark.END_THINK,
    "<|tool_calls_section_begin|>": Mark.SECTION,
    "<|tool_calls_section_end|>": Mark.END_SECTION,
    "<|tool_call_begin|>": Mark.CALL,
    "<|tool_call_argument_begin|>": Mark.ARGUMENTS,
    "<|tool_call_end|>": Mark.END_CALL,
}
"""Special tokens of thinking and tool calls."""
MARKERS: Final[Mapping[str, Mark]] = {
    **SPECIAL_MARKERS,
    # Some answers spell the section in the singular, which is no special token.
    "<|tool_call_section_begin|>": Mark.SECTION,
    "<|tool_call_section_end|>": Mark.END_SECTION,
    **dict.fromkeys(STRUCTURE, Mark.NOISE),
}
"""What an answer may hold that is no text."""


class KimiK25Format:
    """K2.5 conversations.

    Args:
        tokenizer: The vocabulary.
        placeholder_id: Id that stands for one row of picture features.
        eos_ids: Ids beside ``<|im_end|>`` that end an answer.
        preserve_thinking: Keep the thinking of every earlier answer, as K2.6 does on request and K2.7-Code always.

    Raises:
        ConfigError: If the vocabulary lacks a special token of the format.

    Raises:
        ConfigError: If the vocabulary lacks a special token of the format.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        placeholder_id: int,
        eos_ids: Sequence[int] = (),
        *,
        preserve_thinking: bool = False,
    ) -> None:
        require(tokenizer, [*STRUCTURE, *SPECIAL_MARKERS], "Kimi-K2.5")
        self.tokenizer = tokenizer
        self.placeholder_id = placeholder_id
        self.stop_ids = frozenset([tokenizer.special_id("<|im_end|>"), *eos_ids])
        self.preserve_thinking = preserve_thinking

    def render(
        self,
        messages: Sequence[Message],
        image_tokens: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> Prompt:
        """Write a conversation, ending where the assistant is to speak.

        Args:
            messages: The turns.
            image_tokens: Feature rows of every picture of the messages, in order.
            tools: Tools the model may call, in the OpenAI shape.
            thinking: False closes the think block at once and drops the thinking of earlier turns, unless all of it
                is to be preserved; None and True leave it open.

        Returns:
            The ids and the places of the pictures.

        Raises:
            PromptError: If a message or the conversation is empty, or pictures and counts do not match.
        """
        check(messages, image_tokens)
        writer = Writer(self.tokenizer, self.placeholder_id, image_tokens)
        if tools:
            writer.special("<|im_system|>")
            writer.text("tool_declare")
            writer.special("<|im_middle|>")
            writer.text(declare(tools))
            writer.special("<|im_end|>")
        answers = [i for i, message in enumerate(messages) if message.role == "assistant" and not message.tool_calls]
        settled = answers[-1] if answers else -1
        calls = 0
        for index, message in enumerate(messages):
            self._open(writer, message)
            if message.role == "tool":
                writer.text(f"## Return of {message.tool_call_id or ''}\n")
            if message.role == "assistant":
                writer.special("<think>")
                wanted = self.preserve_thinking or (index > settled and thinking is not False)
                if wanted and message.reasoning:
                    writer.text(message.reasoning)
                writer.special("</think>")
            self._content(writer, message)
            if message.tool_calls:
                writer.special("<|tool_calls_section_begin|>")
                for call in message.tool_calls:
                    writer.special("<|tool_call_begin|>")
                    writer.text(call.id or f"functions.{call.name}:{calls}")
                    writer.special("<|tool_call_argument_begin|>")
                    writer.text(call.arguments)
                    writer.special("<|tool_call_end|>")
                    calls += 1
                writer.special("<|tool_calls_section_end|>")
            writer.special("<|im_end|>")
        writer.special("<|im_assistant|>")
        writer.text("assistant")
        writer.special("<|im_middle|>", "<think>")
        if thinking is False:
            writer.special("</think>")
        return writer.prompt()

    def parser(self, thinking: bool | None = None) -> OutputParser:
        """A reader for one answer to a prompt rendered with the same ``thinking``.

        Args:
            thinking: As in ``render``.

        Returns:
            The reader.
        """
        return OutputParser(self.tokenizer, MARKERS, self.stop_ids, reasoning=thinking is not False)

    @staticmethod
    def _open(writer: Writer, message: Message) -> None:
        writer.special("<|im_system|>" if message.role == "tool" else f"<|im_{message.role}|>")
        writer.text(message.name or message.role)
        writer.special("<|im_middle|>")

    @staticmethod
    def _content(writer: Writer, message: Message) -> None:
        for part in parts_of(message):
            if isinstance(part, ImagePart):
                writer.special("<|media_begin|>")
                writer.text("image")
                writer.special("<|media_content|>")
                writer.placeholder()
                writer.special("<|media_end|>")
                writer.text("\n")
            else:
                writer.text(part.text)
