"""The chat format of Kimi-VL, Instruct and Thinking alike.

Turns are ``<|im_ROLE|>role<|im_middle|>text<|im_end|>``, a picture is
``<|media_start|>image<|media_content|><|media_pad|>...<|media_end|>`` with nothing after it, and thinking is ordinary
text between two markers that are no special tokens. There are no tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from moonvit.errors import PromptError
from moonvit.prompts.chat import PICTURE, TURN, Prompt, Writer, check, parts_of, require
from moonvit.prompts.messages import ImagePart, Message
from moonvit.prompts.parser import Mark, OutputParser
from moonvit.prompts.tokenizer import Tokenizer

DEFAULT_SYSTEM: Final = "You are a helpful assistant"
"""System message of a conversation that does not begin with one."""
STRUCTURE: Final = (*TURN, "<|media_start|>", *PICTURE)
MARKERS: Final[Mapping[str, Mark]] = {
    "◁think▷": Mark.THINK,
    "◁/think▷": Mark.END_THINK,
    **dict.fromkeys(STRUCTURE, Mark.NOISE),
}
"""What an answer may hold that is no text."""


class KimiVLFormat:
    """Kimi-VL conversations.

    Args:
        tokenizer: The vocabulary.
        placeholder_id: Id that stands for one row of picture features.
        eos_ids: Ids beside ``<|im_end|>`` that end an answer.

    Raises:
        ConfigError: If the vocabulary lacks a special token of the format.
    """

    def __init__(self, tokenizer: Tokenizer, placeholder_id: int, eos_ids: Sequence[int] = ()) -> None:
        require(tokenizer, STRUCTURE, "Kimi-VL")
        self.tokenizer = tokenizer
        self.placeholder_id = placeholder_id
        self.stop_ids = frozenset([tokenizer.special_id("<|im_end|>"), *eos_ids])

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
            messages: The turns; thinking of earlier answers is left out.
            image_tokens: Feature rows of every picture of the messages, in order.
            tools: Refused unless empty.
            thinking: Refused unless None: whether a Kimi-VL thinks is a matter of its weights.
            preserve_thinking: Refused unless None.

        Returns:
            The ids and the places of the pictures.

        Raises:
            PromptError: If the format cannot hold the conversation, or pictures and counts do not match.
        """
        check(messages, image_tokens)
        if tools:
            raise PromptError(f"Kimi-VL has no tools, but {len(tools)} were given", param="tools")
        self._check_thinking(thinking)
        if preserve_thinking is not None:
            raise PromptError(
                f"Kimi-VL keeps no thinking, but preserve_thinking is {preserve_thinking}; leave it out",
                param="preserve_thinking",
            )
        writer = Writer(self.tokenizer, self.placeholder_id, image_tokens)
        if messages[0].role != "system":
            writer.open("system", "system")
            writer.text(DEFAULT_SYSTEM)
            writer.special("<|im_end|>")
        for index, message in enumerate(messages):
            if message.role == "tool" or message.tool_calls:
                raise PromptError(
                    f"messages[{index}] ({message.role}) is about a tool call, and Kimi-VL has no tools",
                    param=f"messages[{index}]",
                )
            if message.name is not None:
                raise PromptError(
                    f"messages[{index}].name is {message.name[:40]!r}, and Kimi-VL has no place for names",
                    param=f"messages[{index}].name",
                )
            writer.open(message.role, message.role)
            for part in parts_of(message):
                if isinstance(part, ImagePart):
                    writer.picture("<|media_start|>")
                else:
                    writer.text(part.text)
            writer.special("<|im_end|>")
        writer.open("assistant", "assistant")
        return writer.prompt()

    def parser(self, thinking: bool | None = None) -> OutputParser:
        """A reader for one answer.

        Args:
            thinking: Refused unless None.

        Returns:
            The reader.

        Raises:
            PromptError: If ``thinking`` is not None.
        """
        self._check_thinking(thinking)
        return OutputParser(self.tokenizer, MARKERS, self.stop_ids, reasoning=False)

    @staticmethod
    def _check_thinking(thinking: bool | None) -> None:
        if thinking is not None:
            raise PromptError(
                f"Kimi-VL has no switch for thinking, but thinking is {thinking}; leave it out", param="thinking"
            )
