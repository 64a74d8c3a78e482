"""The demo's Jinja template, which vLLM and SGLang read, beside the format that moonvit writes prompts in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from moonvit.engines import default_model
from moonvit.prompts import ChatFormat, chat_format
from moonvit.prompts.messages import ImagePart, Message, Part, TextPart, ToolCall
from train.export import TEMPLATE

IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": "What is a star?"}],
    "parts": [{"role": "user", "content": [text("What is"), text(" a star?\n")]}],
    "image": [{"role": "user", "content": [IMAGE, text("What does it say?")]}],
    "images": [{"role": "user", "content": [text("Here:"), IMAGE, IMAGE, text("and "), IMAGE, text("what?")]}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [IMAGE]}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [IMAGE, text("What does it say?")]},
        {"role": "assistant", "content": "stop", "reasoning_content": "It is red."},
        {"role": "user", "content": "And this?", "name": "Ada"},
        {"role": "assistant", "content": [text("1729")], "reasoning": "A number."},
        {"role": "user", "content": [text(" Which is larger? 世界"), IMAGE]},
    ],
    "tools": [
        {"role": "user", "content": "Look it up."},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I need a tool.",
            "tool_calls": [
                {"id": "functions.find:0", "function": {"name": "find", "arguments": '{"a": 1}'}},
                {"id": None, "function": {"name": "find", "arguments": {"b": 2}}},
            ],
        },
        {"role": "tool", "tool_call_id": "functions.find:0", "content": "found"},
        {"role": "user", "content": "So?"},
    ],
}


def ours(message: dict[str, Any]) -> Message:
    content = message["content"] or ()
    parts: list[Part] = [TextPart(content)] if isinstance(content, str) else []
    if not isinstance(content, str):
        parts += [ImagePart(None) if item == IMAGE else TextPart(item["text"]) for item in content]
    calls = []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        calls.append(
            ToolCall(call["id"] or "", name, arguments if isinstance(arguments, str) else json.dumps(arguments))
        )
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    name, answered = message.get("name"), message.get("tool_call_id")
    return Message(message["role"], tuple(parts), reasoning, tuple(calls), answered, name)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(default_model())


@pytest.fixture(scope="module")
def form() -> ChatFormat:
    folder = default_model()
    return chat_format(json.loads((folder / "config.json").read_text()), folder)


@pytest.mark.parametrize("preserve", [None, True])
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_it_gives_the_same_ids(
    tokenizer: Any, form: ChatFormat, name: str, thinking: bool | None, preserve: bool | None
) -> None:
    messages = CONVERSATIONS[name]
    wanted = form.render(
        [ours(message) for message in messages],
        [1] * str(messages).count(str(IMAGE)),
        thinking=thinking,
        preserve_thinking=preserve,
    )
    options = {"thinking": thinking, "preserve_thinking": preserve}
    given = {name: value for name, value in options.items() if value is not None}
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **given)
    assert ids == wanted.ids


def test_the_shipped_one_is_that_of_the_export() -> None:
    assert (Path(default_model()) / "chat_template.jinja").read_text() == TEMPLATE.read_text()
