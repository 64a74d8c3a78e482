"""Answers to content, reasoning and tool calls: the same result however they are cut, and no marker in any of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonvit.prompts import CallArguments, CallStart, Content, Event, OutputParser, Reasoning, Tokenizer
from moonvit.prompts import kimi_k25 as k25
from moonvit.prompts import kimi_vl as vl
from moonvit.prompts.parser import Mark
from train import vocabulary

NAMES = [*k25.STRUCTURE, *k25.SPECIAL_MARKERS, "[EOS]", "[BOS]", "<|reserved_token_9|>"]
STOP = "<|im_end|>"
SPELLED = frozenset([*k25.MARKERS, *vl.MARKERS])


@dataclass
class Result:
    """An answer put together from its pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> Result:
        for event in events:
            if isinstance(event, Content):
                assert event.text
                self.content += event.text
            elif isinstance(event, Reasoning):
                assert event.text
                self.reasoning += event.text
            elif isinstance(event, CallStart):
                assert event.index == len(self.calls)
                self.calls.append([event.id, event.name, ""])
            else:
                assert event.text
                assert isinstance(event, CallArguments)
                assert event.index == len(self.calls) - 1, "arguments belong to the call begun last"
                self.calls[event.index][2] += event.text
        return self


def parser_for(
    pieces: list[bytes | str], *, family: str = "k25", thinking: bool = True
) -> tuple[OutputParser, list[int]]:
    """A parser whose vocabulary has each piece as a token: a string is a special token, bytes are ordinary ones."""
    specials = {name: number for number, name in enumerate(NAMES)}
    base = {len(NAMES) + number: piece for number, piece in enumerate(pieces) if isinstance(piece, bytes)}
    tokenizer = Tokenizer(base, specials, lambda text: [])
    ids = [len(NAMES) + number if isinstance(piece, bytes) else specials[piece] for number, piece in enumerate(pieces)]
    stop = frozenset([specials[STOP], specials["[EOS]"]])
    markers = k25.MARKERS if family == "k25" else vl.MARKERS
    return OutputParser(tokenizer, markers, stop, reasoning=family == "k25" and thinking), ids


def read(*pieces: bytes | str, truncated: bool | None = None, **options: object) -> Result:
    parser, ids = parser_for(list(pieces), **options)  # type: ignore[arg-type]
    result = Result()
    for number in ids:
        result.add(parser.feed(number))
    return result.add(parser.finish(truncated=truncated))


def by_id(text: str, names: Iterable[str] = NAMES) -> list[bytes | str]:
    """Text with its special tokens as tokens."""
    import re

    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return [part if part in names else part.encode() for part in parts if part]


def call(name: str = "functions.look:0", arguments: str = '{"at": "sky"}') -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*calls: str) -> str:
    return "<|tool_calls_section_begin|>" + "".join(calls) + "<|tool_calls_section_end|>"


SINGULAR = section(call()).replace("tool_calls_section", "tool_call_section")
LOOK = ["functions.look:0", "look", '{"at": "sky"}']
ANSWERS = {
    "only the closing tag": ("hm</think>It is 4.", True, Result("It is 4.", "hm")),
    "both tags": ("<think>hm</think>It is 4.", True, Result("It is 4.", "hm")),
    "no tag, thinking off": ("It is 4.", False, Result("It is 4.")),
    "both tags, thinking off": ("<think>hm</think>It is 4.", False, Result("It is 4.", "hm")),
    "a closing tag, thinking off": ("It</think> is 4.", False, Result("It is 4.")),
    "thinking used up the tokens": ("hm " * 50, True, Result("", "hm " * 50)),
    "thinking twice": ("a</think>b<think>c</think>d", True, Result("bd", "ac")),
    "a call after the answer": (f"hm</think>Wait.{section(call())}", True, Result("Wait.", "hm", [LOOK])),
    "a call ends the thinking": (f"hm{section(call())}", True, Result("", "hm", [LOOK])),
    "a closing tag after the call": (f"hm{section(call())}</think>Done.", True, Result("Done.", "hm", [LOOK])),
    "tags between the calls": (
        "hm" + section("</think>\n", call(), "<think>\n") + "Done.",
        True,
        Result("Done.", "hm", [LOOK]),
    ),
    "text after the call": (f"{section(call())}Done.", False, Result("Done.", "", [LOOK])),
    "the section in the singular": (f"hm</think>{SINGULAR}", True, Result("", "hm", [LOOK])),
    "two calls, blanks between": (
        section(call(), "\n", call("functions.a.b:1", "[1]"), "\n"),
        False,
        Result("", "", [LOOK, ["functions.a.b:1", "a.b", "[1]"]]),
    ),
    "a call without a section": (call() + "x", False, Result("", "", [LOOK])),
    "a section that is not closed": (
        f"{section(call())[: -len('<|tool_calls_section_end|>')]}",
        False,
        Result("", "", [LOOK]),
    ),
    "a call that is not closed": (
        section(call()).replace("<|tool_call_end|>", "") + "x",
        False,
        Result("x", "", [LOOK]),
    ),
    "a call opened by the next one": (
        section(call().replace("<|tool_call_end|>", ""), call("functions.b:1", "{}")),
        False,
        Result("", "", [LOOK, ["functions.b:1", "b", "{}"]]),
    ),
    "a call without arguments": (
        section("<|tool_call_begin|>functions.now:0<|tool_call_end|>", call("functions.b:1", "")),
        False,
        Result("", "", [["functions.now:0", "now", "{}"], ["functions.b:1", "b", "{}"]]),
    ),
    "a call without a number": (
        section(call(" look \n"), call("functions.b")),
        False,
        Result("", "", [["functions.look:0", "look", LOOK[2]], ["functions.b:1", "b", LOOK[2]]]),
    ),
    "a call without a name": (section(call(""), call()), False, Result("", "", [LOOK])),
    "think tags in arguments are data": (
        section(call("functions.w:0", '{"t": "<think>x</think><|im_end"}')),
        False,
        Result("", "", [["functions.w:0", "w", '{"t": "<think>x</think><|im_end"}']]),
    ),
    "stray tool markers": (
        "a<|tool_call_end|>b<|tool_call_argument_begin|>c<|tool_calls_section_end|>d",
        False,
        Result("abcd"),
    ),
    "stray structure": ("a<|im_user|>b<|media_pad|>c<|im_middle|>d", False, Result("abcd")),
    "what only looks like a marker": (
        "a < b, x <t> y</thin k> <| <|tool_call| <<think <|im_end| ◁x▷",
        False,
        Result("a < b, x <t> y</thin k> <| <|tool_call| <<think <|im_end| ◁x▷"),
    ),
    "many scripts": ("é漢</think>字😀👩‍👩‍👧", True, Result("字😀👩‍👩‍👧", "é漢")),
}
TRIANGLES = {
    "thinking": ("◁think▷hm◁/think▷It is 4.", Result("It is 4.", "hm")),
    "no thinking": ("It is 4.", Result("It is 4.")),
    "a stray closing mark": ("It◁/think▷ is 4.", Result("It is 4.")),
    "thinking without an end": ("◁think▷hm", Result("", "hm")),
    "near misses": ("◁◁think▷a◀◁b▷◁/thin k▷◁/think▷c◁▷◁thinking▷", Result("◁c◁▷◁thinking▷", "a◀◁b▷◁/thin k▷")),
    "tags of another family": ("<think>a</think>", Result("<think>a</think>")),
    "structure": ("a<|im_end|>b<|media_start|>c", Result("abc")),
}
CASES = [("k25", text, thinking, result) for text, thinking, result in ANSWERS.values()] + [
    ("vl", text, True, result) for text, result in TRIANGLES.values()
]
CASE_IDS = [f"k25: {name}" for name in ANSWERS] + [f"vl: {name}" for name in TRIANGLES]


@pytest.mark.parametrize(("family", "text", "thinking", "expected"), CASES, ids=CASE_IDS)
def test_every_cut_gives_the_same_and_leaks_nothing(family: str, text: str, thinking: bool, expected: Result) -> None:
    data = text.encode()
    options = {"family": family, "thinking": thinking, "truncated": False}
    assert read(data, **options) == expected
    assert read(*[data[i : i + 1] for i in range(len(data))], **options) == expected, "byte by byte"
    for cut in range(1, len(data)):
        assert read(data[:cut], data[cut:], **options) == expected, data[:cut]


@pytest.mark.parametrize(("family", "text", "thinking", "expected"), CASES, ids=CASE_IDS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_number_of_cuts_gives_the_same(
    family: str, text: str, thinking: bool, expected: Result, data: st.DataObject
) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=12)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert read(*pieces, family=family, thinking=thinking, truncated=False) == expected


@pytest.mark.parametrize(("text", "thinking", "expected"), ANSWERS.values(), ids=list(ANSWERS))
def test_special_tokens_do_the_same_as_their_names(text: str, thinking: bool, expected: Result) -> None:
    names = [name for name in NAMES if name != STOP]
    if "think tags in arguments" in next(name for name, case in ANSWERS.items() if case[0] == text):
        names = [name for name in names if "think" not in name]
    assert read(*by_id(text, names), thinking=thinking, truncated=False) == expected
    assert read(*by_id(text, names), STOP, b"never read", thinking=thinking) == expected
    assert read(*by_id(text, names), "[EOS]", thinking=thinking) == expected


@pytest.mark.parametrize(("family", "text", "thinking", "expected"), CASES, ids=CASE_IDS)
def test_an_answer_cut_short_is_a_beginning_of_the_whole(
    family: str, text: str, thinking: bool, expected: Result
) -> None:
    """At max_tokens a marker may be cut: its beginning is dropped, and nothing else is."""
    data = text.encode()
    for cut in range(len(data)):
        short = read(*[data[i : i + 1] for i in range(cut)], family=family, thinking=thinking)
        for mine, whole in ((short.content, expected.content), (short.reasoning, expected.reasoning)):
            assert whole.startswith(mine.removesuffix("\ufffd")), data[:cut]
            assert not any(name in mine for name in SPELLED & set(k25.MARKERS if family == "k25" else vl.MARKERS))
        for mine_call, call_ in zip(short.calls, expected.calls, strict=False):
            assert call_[:2] == mine_call[:2]
            assert call_[2].startswith(mine_call[2].removesuffix("\ufffd"))
        assert len(short.calls) <= len(expected.calls)


@pytest.mark.parametrize("marker", k25.MARKERS)
def test_every_beginning_of_a_marker_is_trimmed_at_the_limit_and_kept_at_the_end(marker: str) -> None:
    for size in range(1, len(marker)):
        text = f"see {marker[:size]}".encode()
        assert read(text, thinking=False) == Result("see ")
        assert read(text, STOP, thinking=False) == Result(text.decode())
        assert read(text, thinking=False, truncated=False) == Result(text.decode())
        assert read(text, "<think>", b"x", thinking=False) == Result(text.decode(), "x"), "a token cannot continue it"


def test_content_comes_as_soon_as_it_is_certain() -> None:
    parser, ids = parser_for([b"He", b"llo <", b"b>", b"\xc3", b"\xa9 <|to", b"ol", b"!"], thinking=False)
    events = [parser.feed(number) for number in ids]
    assert events == [
        [Content("He")],
        [Content("llo ")],
        [Content("<b>")],
        [],
        [Content("é ")],
        [],
        [Content("<|tool!")],
    ]
    assert parser.finish() == []


@pytest.mark.parametrize("tail", [b"\xe6", b"\xe6\xbc", b"\xf0\x9f\x98", "◁".encode()[:2]])
@pytest.mark.parametrize("family", ["k25", "vl"])
def test_an_unfinished_character_becomes_one_replacement(tail: bytes, family: str) -> None:
    for stop in ([], [STOP]):
        assert read(b"ab", tail, *stop, family=family, thinking=False) == Result("ab\ufffd")


def test_an_unfinished_character_does_not_cross_a_marker() -> None:
    assert read(b"a\xe6", "</think>", b"\xbc\xa2b") == Result("\ufffd\ufffdb", "a\ufffd")
    assert read(b"a\xe6</think>\xbc\xa2b") == Result("\ufffd\ufffdb", "a\ufffd")


@given(st.binary(max_size=80), st.data())
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_decoded_as_at_once(raw: bytes, data: st.DataObject) -> None:
    raw = raw.replace(b"<", b".").replace(b"\xe2", b"\xe6")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert read(*pieces, thinking=False) == Result(raw.decode("utf-8", "replace"))


@given(
    st.lists(
        st.one_of(st.sampled_from(sorted(SPELLED)), st.text("a<|think>/_tool◁▷ é", max_size=6)), min_size=1, max_size=12
    ),
    st.sampled_from(["k25", "vl"]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_no_mixture_of_markers_leaks_or_depends_on_the_cuts(
    parts: list[str], family: str, thinking: bool, data: st.DataObject
) -> None:
    raw = "".join(parts).encode()
    whole = read(raw, family=family, thinking=thinking, truncated=False)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=20)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert read(*pieces, family=family, thinking=thinking, truncated=False) == whole
    markers = k25.MARKERS if family == "k25" else vl.MARKERS
    # Pieces of text around a dropped marker may meet and spell one; the stream itself never said it.
    events = [event for piece in [raw] for event in _events(piece, family, thinking)]
    for event in events:
        if isinstance(event, (Content, Reasoning)):
            assert not any(name in event.text for name in markers), event


def _events(raw: bytes, family: str, thinking: bool) -> list[Event]:
    parser, ids = parser_for([raw], family=family, thinking=thinking)
    return parser.feed(ids[0]) + parser.finish(truncated=False)


def test_what_is_counted() -> None:
    parser, ids = parser_for([b"a", b"b", "</think>", b"c", *by_id(section(call())), "<think>", b"d", STOP])
    for number in ids:
        parser.feed(number)
    assert parser.reasoning_tokens == 4
    assert parser.calls == 1
    parser, ids = parser_for([b"x"] * 600)
    for number in ids:
        parser.feed(number)
    assert parser.reasoning_tokens == 600


def test_a_call_cut_short_keeps_what_was_said() -> None:
    text = section(call("functions.look:0", '{"at": "sk'))
    begun = text[: text.index("<|tool_call_end|>")]
    assert read(begun.encode(), thinking=False) == Result("", "", [["functions.look:0", "look", '{"at": "sk']])
    assert read(text[: text.index("look")].encode(), thinking=False) == Result()
    assert read(begun[: begun.index("{")].encode(), thinking=False) == Result(
        "", "", [["functions.look:0", "look", ""]]
    )


def test_the_formats_start_their_parsers_where_their_prompts_end(tmp_path: Path) -> None:
    vocabulary.write(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    chat = k25.KimiK25Format(tokenizer, vocabulary.MEDIA_PAD)
    answer = [*tokenizer.encode_text("hm"), tokenizer.special_id("</think>"), *tokenizer.encode_text("four 漢")]
    for thinking, expected in (
        (None, Result("four 漢", "hm")),
        (True, Result("four 漢", "hm")),
        (False, Result("hmfour 漢")),
    ):
        parser = chat.parser(thinking)
        result = Result()
        for number in [*answer, vocabulary.IM_END]:
            result.add(parser.feed(number))
        assert result.add(parser.finish()) == expected
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|media_begin|>", "<|media_start|>"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    parser = vl.KimiVLFormat(tokenizer, vocabulary.MEDIA_PAD).parser()
    result = Result()
    for number in tokenizer.encode_text("◁think▷hm◁/think▷four"):
        result.add(parser.feed(number))
    assert result.add(parser.finish()) == Result("four", "hm")


def test_arguments_may_quote_a_tool_call() -> None:
    """Where special tokens frame the arguments, names of special tokens inside them are data."""
    quoted = json.dumps({"text": section(call())})
    pieces: list[bytes | str] = [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        b"functions.write:0",
        "<|tool_call_argument_begin|>",
        *[bytes([value]) for value in quoted.encode()],
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        b"Done.",
    ]
    assert read(*pieces, STOP, thinking=False) == Result("Done.", "", [["functions.write:0", "write", quoted]])
    pieces[-2] = b"<|tool_call_section_end|>"
    assert read(*pieces, STOP, thinking=False) == Result("Done.", "", [["functions.write:0", "write", quoted]])


def test_arguments_round_trip_through_history(tmp_path: Path) -> None:
    """What the parser gives is what the next prompt writes."""
    from moonvit.prompts.messages import Message, TextPart, ToolCall

    vocabulary.write(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    chat = k25.KimiK25Format(tokenizer, vocabulary.MEDIA_PAD)
    arguments = json.dumps({"text": "<|tool_call|> é </think>"}, ensure_ascii=False)
    asked = Message("user", (TextPart("Go"),))
    answered = Message("assistant", reasoning="hm", tool_calls=(ToolCall("functions.f:0", "f", arguments),))
    prompt = chat.render([asked], [])
    ids = chat.render([asked, answered], []).ids[len(prompt.ids) :]
    parser = chat.parser()
    result = Result()
    for number in ids[: ids.index(vocabulary.IM_END) + 1]:
        result.add(parser.feed(number))
    assert result.add(parser.finish()) == Result("", "hm", [["functions.f:0", "f", arguments]])


def test_a_parser_without_markers_passes_text_through() -> None:
    tokenizer = Tokenizer({0: b"<think>"}, {"[EOS]": 1}, lambda text: [])
    parser = OutputParser(tokenizer, {}, frozenset([1]), reasoning=False)
    assert parser.feed(0) == [Content("<think>")]
    assert parser.feed(1) == parser.finish() == []
    quiet = OutputParser(tokenizer, {"<think>": Mark.NOISE}, frozenset(), reasoning=False)
    assert quiet.feed(0) == quiet.feed(1) == []
