"""Kimi-VL conversations, to the letter of the official template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonvit.errors import ConfigError, PromptError
from moonvit.prompts import ChatFormat, chat_format
from moonvit.prompts.messages import ImagePart, Message, Part, TextPart, ToolCall
from train import vocabulary

PICTURE = ImagePart(b"")
BLOCK = "<|media_start|>image<|media_content|><|media_pad|><|media_pad|><|media_end|>"
SYSTEM = "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
END = "<|im_assistant|>assistant<|im_middle|>"
PAD = vocabulary.MEDIA_PAD


def write(folder: Path) -> Path:
    """The demo vocabulary with Kimi-VL's names."""
    vocabulary.write(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    added = {
        number: entry for number, entry in config["added_tokens_decoder"].items() if "think" not in entry["content"]
    }
    added[str(vocabulary.special("<|media_begin|>"))]["content"] = "<|media_start|>"
    path.write_text(json.dumps(config | {"added_tokens_decoder": added}))
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    config = {"model_type": "kimi_vl", "media_placeholder_token_id": PAD, "eos_token_id": vocabulary.EOS}
    return chat_format(config, write(tmp_path_factory.mktemp("vl")))


def turn(role: Any, *parts: str | Part, **fields: Any) -> Message:
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts), **fields)


def written(chat: ChatFormat, *messages: Message) -> str:
    """The prompt as text; every picture has two tokens."""
    pictures = sum(len(message.images) for message in messages)
    return chat.tokenizer.decode_bytes(chat.render(messages, [2] * pictures).ids).decode()


def test_what_the_format_has_no_place_for_is_refused_by_name(chat: ChatFormat) -> None:
    with pytest.raises(PromptError, match="no place for names") as caught:
        chat.render([turn("user", "Hi", name="Ada")], [])
    assert caught.value.param == "messages[0].name"
    with pytest.raises(PromptError, match="preserve_thinking is True"):
        chat.render([turn("user", "Hi")], [], preserve_thinking=True)


def test_one_picture_and_a_question(chat: ChatFormat) -> None:
    text = written(chat, turn("user", PICTURE, "What is it?"))
    assert text == f"{SYSTEM}<|im_user|>user<|im_middle|>{BLOCK}What is it?<|im_end|>{END}"


def test_a_system_message_replaces_the_default(chat: ChatFormat) -> None:
    text = written(chat, turn("system", "Be brief."), turn("user", "Hi"))
    assert text == f"<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>{END}"


def test_a_later_system_message_does_not(chat: ChatFormat) -> None:
    text = written(chat, turn("user", "Hi"), turn("system", "Be brief."))
    assert text.startswith(f"{SYSTEM}<|im_user|>user<|im_middle|>Hi<|im_end|><|im_system|>system<|im_middle|>Be brief.")


def test_history_keeps_answers_and_drops_thinking(chat: ChatFormat) -> None:
    text = written(chat, turn("user", "Hi"), turn("assistant", "Hello.", reasoning="greet"), turn("user", "Bye"))
    assert text == (
        f"{SYSTEM}<|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>Hello.<|im_end|>"
        f"<|im_user|>user<|im_middle|>Bye<|im_end|>{END}"
    )


def test_pictures_stand_where_they_were_put(chat: ChatFormat) -> None:
    parts = ["A", PICTURE, "B", PICTURE, PICTURE, "C"]
    prompt = chat.render([turn("user", *parts)], [3, 1, 5])
    pads = "<|media_start|>image<|media_content|>", "<|media_end|>"
    expected = [f"{pads[0]}{'<|media_pad|>' * count}{pads[1]}" for count in (3, 1, 5)]
    text = chat.tokenizer.decode_bytes(prompt.ids).decode()
    assert f"user<|im_middle|>A{expected[0]}B{expected[1]}{expected[2]}C<|im_end|>" in text
    assert [length for _, length in prompt.spans] == [3, 1, 5]
    inside = [index for start, length in prompt.spans for index in range(start, start + length)]
    assert [index for index, number in enumerate(prompt.ids) if number == PAD] == inside


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_picture_in_any_role_is_rendered(chat: ChatFormat, role: str) -> None:
    assert f"<|im_{role}|>{role}<|im_middle|>{BLOCK}<|im_end|>" in written(chat, turn(role, PICTURE), turn("user", "?"))


@pytest.mark.parametrize("name", ["<|media_pad|>", "<|media_start|>", "<|im_end|>", "<image>", "◁think▷"])
def test_a_typed_marker_stays_text(chat: ChatFormat, name: str) -> None:
    prompt = chat.render([turn("user", name, PICTURE, name, PICTURE, name)], [2, 2])
    plain = chat.render([turn("user", "x", PICTURE, "x", PICTURE, "x")], [2, 2])
    specials = set(chat.tokenizer.specials.values())
    assert [n for n in prompt.ids if n in specials] == [n for n in plain.ids if n in specials]
    assert len(prompt.spans) == 2


def test_what_the_format_cannot_hold_is_refused(chat: ChatFormat) -> None:
    hello = turn("user", "Hi")
    with pytest.raises(PromptError, match="no tools, but 1 were given"):
        chat.render([hello], [], tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(PromptError, match=r"messages\[1\] \(tool\) is about a tool call"):
        chat.render([hello, turn("tool", "42", tool_call_id="f:0")], [])
    with pytest.raises(PromptError, match=r"messages\[0\] \(assistant\) is about a tool call"):
        chat.render([turn("assistant", tool_calls=(ToolCall("a", "f", "{}"),))], [])
    for thinking in (True, False):
        with pytest.raises(PromptError, match=f"no switch for thinking, but thinking is {thinking}"):
            chat.render([hello], [], thinking=thinking)
        with pytest.raises(PromptError, match=f"no switch for thinking, but thinking is {thinking}"):
            chat.parser(thinking)


@pytest.mark.parametrize(("counts", "numbers"), [([], "1 .* 0"), ([4, 4], "1 .* 2"), ([0], "0 has 0 tokens")])
def test_pictures_and_counts_must_match(chat: ChatFormat, counts: list[int], numbers: str) -> None:
    with pytest.raises(PromptError, match=numbers):
        chat.render([turn("user", PICTURE)], counts)


def test_a_picture_too_many_is_named(chat: ChatFormat) -> None:
    with pytest.raises(PromptError, match="hold 0 pictures, but token counts of 1"):
        chat.render([turn("user", "<|media_pad|>")], [4])


def test_stop_ids(chat: ChatFormat) -> None:
    assert chat.stop_ids == {vocabulary.IM_END, vocabulary.EOS}


def test_a_vocabulary_of_another_family_is_refused(tmp_path: Path) -> None:
    vocabulary.write(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks special tokens of the Kimi-VL format: <\|media_start\|>"):
        chat_format({"model_type": "kimi_vl"}, tmp_path)


def test_preserved_thinking_is_not_of_this_family(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preserve_thinking is True"):
        chat_format({"model_type": "kimi_vl"}, write(tmp_path), preserve_thinking=True)
