"""The chat format of Kimi-K2.5, K2.6 and K2.7-Code.

A picture is ``<|media_begin|>image<|media_content|><|media_pad|>...<|media_end|>`` and a line break. Every assistant
turn opens with a think block: empty up to the last answer that called no tool, whole after it. The prompt ends inside
an open think block, or behind an empty one where no thinking is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from moonvit.prompts.chat import PICTURE, TURN, Prompt, Writer, check, parts_of, require
from moonvit.prompts.messages import ImagePart, Message
from moonvit.prompts.parser import Mark, OutputParser
from moonvit.prompts.tokenizer import Tokenizer
from moonvit.prompts.tools import declare

STRUCTURE: Final = (*TURN, "<|media_begin|>", *PICTURE)
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
        preserve_thinking: bool | None = None,
    ) -> Prompt:
        """Write a conversation, ending where the assistant is to speak.

        Args:
            messages: The turns.
            image_tokens: Feature rows of every picture of the messages, in order.
            tools: Tools the model may call, in the OpenAI shape.
            thinking: False closes the think block at once and drops the thinking of earlier turns, unless all of it
                is to be preserved; None and True leave it open.
            preserve_thinking: Keep the thinking of every earlier answer; None does as the format was made to.

        Returns:
            The ids and the places of the pictures.

        Raises:
            PromptError: If a message or the conversation is empty, or pictures and counts do not match.
        """
        check(messages, image_tokens)
        preserve = self.preserve_thinking if preserve_thinking is None else preserve_thinking
        writer = Writer(self.tokenizer, self.placeholder_id, image_tokens)
        if tools:
            writer.open("system", "tool_declare")
            writer.text(declare(tools))
            writer.special("<|im_end|>")
        answers = [i for i, message in enumerate(messages) if message.role == "assistant" and not message.tool_calls]
        settled = answers[-1] if answers else -1
        calls = 0
        for index, message in enumerate(messages):
            writer.open("system" if message.role == "tool" else message.role, message.name or message.role)
            if message.role == "tool":
                writer.text(f"## Return of {message.tool_call_id or ''}\n")
            if message.role == "assistant":
                writer.special("<think>")
                wanted = preserve or (index > settled and thinking is not False)
                if wanted and message.reasoning:
                    writer.text(message.reasoning)
                writer.special("</think>")
            for part in parts_of(message):
                if isinstance(part, ImagePart):
                    writer.picture("<|media_begin|>")
                    writer.text("\n")
                else:
                    writer.text(part.text)
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
        writer.open("assistant", "assistant")
        writer.special("<think>")
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
