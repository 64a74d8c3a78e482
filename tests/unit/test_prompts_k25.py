"""K2.5 conversations and tool declarations, to the letter of the official template; and which format a model has."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from moonvit.errors import ConfigError, PromptError
from moonvit.prompts import ChatFormat, chat_format
from moonvit.prompts.messages import ImagePart, Message, Part, TextPart, ToolCall
from moonvit.prompts.tools import declare
from train import vocabulary
from train.batches import Renderer
from train.draw import KINDS, Sample, Turn

PICTURE = ImagePart(b"")
BLOCK = "<|media_begin|>image<|media_content|><|media_pad|><|media_pad|><|media_end|>\n"
END = "<|im_assistant|>assistant<|im_middle|><think>"
PAD = vocabulary.MEDIA_PAD
CONFIG = {"model_type": "kimi_k25", "media_placeholder_token_id": PAD, "eos_token_id": vocabulary.IM_END}
CALL = ToolCall("functions.look:0", "look", '{"at": "sky"}')
CALLED = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"at": "sky"}<|tool_call_end|><|tool_calls_section_end|>'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k25")
    vocabulary.write(path)
    return path


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatFormat:
    return chat_format(CONFIG, folder)


def turn(role: Any, *parts: str | Part, **fields: Any) -> Message:
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts), **fields)


def written(chat: ChatFormat, *messages: Message, **options: Any) -> str:
    """The prompt as text; every picture has two tokens."""
    pictures = sum(len(message.images) for message in messages)
    return chat.tokenizer.decode_bytes(chat.render(messages, [2] * pictures, **options).ids).decode()


def test_one_picture_and_a_question(chat: ChatFormat) -> None:
    body = f"<|im_user|>user<|im_middle|>{BLOCK}What is it?<|im_end|>"
    message = turn("user", PICTURE, "What is it?")
    assert written(chat, message) == written(chat, message, thinking=True) == body + END
    assert written(chat, message, thinking=False) == body + END + "</think>"


def test_no_default_system_message(chat: ChatFormat) -> None:
    assert written(chat, turn("system", "Be brief."), turn("user", "Hi")) == (
        f"<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>{END}"
    )


def test_history_loses_thinking_up_to_the_last_answer_without_calls(chat: ChatFormat, folder: Path) -> None:
    messages = [
        turn("user", "1"),
        turn("assistant", "", reasoning="early call", tool_calls=(CALL,)),
        turn("tool", "blue", tool_call_id="functions.look:0", name="look"),
        turn("assistant", "It is blue.", reasoning="old"),
        turn("user", "2"),
        turn("assistant", "Wait.", reasoning="new call", tool_calls=(CALL,)),
        turn("tool", "red", tool_call_id="functions.look:0"),
    ]

    def expected(early: str, old: str, new: str) -> str:
        return (
            "<|im_user|>user<|im_middle|>1<|im_end|>"
            f"<|im_assistant|>assistant<|im_middle|><think>{early}</think>{CALLED}<|im_end|>"
            "<|im_system|>look<|im_middle|>## Return of functions.look:0\nblue<|im_end|>"
            f"<|im_assistant|>assistant<|im_middle|><think>{old}</think>It is blue.<|im_end|>"
            "<|im_user|>user<|im_middle|>2<|im_end|>"
            f"<|im_assistant|>assistant<|im_middle|><think>{new}</think>Wait.{CALLED}<|im_end|>"
            f"<|im_system|>tool<|im_middle|>## Return of functions.look:0\nred<|im_end|>{END}"
        )

    assert written(chat, *messages) == expected("", "", "new call")
    assert written(chat, *messages, thinking=False) == expected("", "", "") + "</think>"
    preserving = chat_format(CONFIG, folder, preserve_thinking=True)
    assert written(preserving, *messages) == expected("early call", "old", "new call")
    assert written(chat, *messages, preserve_thinking=True) == written(preserving, *messages)
    assert written(preserving, *messages, preserve_thinking=False) == written(chat, *messages)
    assert written(preserving, *messages, thinking=False) == expected("early call", "old", "new call") + "</think>"


def test_calls_without_an_id_are_numbered_through_the_conversation(chat: ChatFormat) -> None:
    text = written(
        chat,
        turn("user", "Hi"),
        turn("assistant", tool_calls=(ToolCall("", "a", "{}"), ToolCall("mine", "b", "{}"))),
        turn("assistant", tool_calls=(ToolCall("", "a", '{"x":1}'),)),
    )
    begin, argument = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    assert f"{begin}functions.a:0{argument}{{}}<|tool_call_end|>{begin}mine{argument}{{}}" in text
    assert f'{begin}functions.a:2{argument}{{"x":1}}<|tool_call_end|>' in text


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_picture_in_any_role_is_rendered(chat: ChatFormat, role: str) -> None:
    """A tool that answers with a screenshot, alone or with words, is the everyday case."""
    for parts in ([PICTURE], [PICTURE, ""], ["", PICTURE], ["a", PICTURE, "b"]):
        text = written(chat, turn("user", "?"), turn(role, *parts))
        assert "".join(part if isinstance(part, str) else BLOCK for part in parts) + "<|im_end|>" in text


def test_pictures_stand_where_they_were_put(chat: ChatFormat) -> None:
    prompt = chat.render([turn("user", "A", PICTURE, "B", PICTURE, PICTURE, "C"), turn("user", PICTURE)], [3, 1, 5, 3])
    blocks = [BLOCK.replace("<|media_pad|><|media_pad|>", "<|media_pad|>" * count) for count in (3, 1, 5, 3)]
    text = chat.tokenizer.decode_bytes(prompt.ids).decode()
    assert f"user<|im_middle|>A{blocks[0]}B{blocks[1]}{blocks[2]}C<|im_end|>" in text
    assert f"user<|im_middle|>{blocks[3]}<|im_end|>" in text
    assert [length for _, length in prompt.spans] == [3, 1, 5, 3]
    inside = [index for start, length in prompt.spans for index in range(start, start + length)]
    assert [index for index, number in enumerate(prompt.ids) if number == PAD] == inside


def test_a_picture_takes_its_rows_and_five_tokens_more(chat: ChatFormat) -> None:
    """A 224 x 224 picture has 64 rows; its wrapper is four tokens and the line break."""
    alone = len(chat.render([turn("user", "Describe the image.")], []).ids)
    assert len(chat.render([turn("user", PICTURE, "Describe the image.")], [64]).ids) == alone + 64 + 5


MARKERS = ["<|media_pad|>", "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", "<image>", "<|im_end|>"]


@pytest.mark.parametrize("typed", [*MARKERS, "<think>", "</think>", "<|tool_calls_section_begin|>", "[EOS]"])
def test_a_typed_marker_stays_text_wherever_it_stands(chat: ChatFormat, typed: str) -> None:
    def conversation(word: str) -> list[Message]:
        return [
            turn("system", word, name=word),
            turn("user", word, PICTURE, word, PICTURE, word),
            turn(
                "assistant",
                word,
                reasoning=word,
                tool_calls=(ToolCall(word, word, word),),
            ),
            turn("tool", word, PICTURE, tool_call_id=word, name=word),
        ]

    def tools(word: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "description": word}}]

    specials = set(chat.tokenizer.specials.values())
    prompt = chat.render(conversation(typed), [2, 3, 4], tools=tools(typed))
    plain = chat.render(conversation("x"), [2, 3, 4], tools=tools("x"))
    assert [n for n in prompt.ids if n in specials] == [n for n in plain.ids if n in specials]
    assert chat.tokenizer.decode_bytes(prompt.ids).decode().count(typed) >= 11
    assert [prompt.ids[start : start + length] for start, length in prompt.spans] == [[PAD] * 2, [PAD] * 3, [PAD] * 4]


def test_a_tool_result_may_quote_the_whole_template(chat: ChatFormat) -> None:
    quoted = written(chat, turn("user", PICTURE, "?"), turn("assistant", "!"))
    prompt = chat.render([turn("user", PICTURE), turn("tool", quoted, tool_call_id="a")], [2])
    assert len(prompt.spans) == 1
    assert prompt.ids.count(PAD) == 2


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([turn("user", "Hi"), turn("user")], "messages[1]"),
        ([turn("user", "")], "messages[0]"),
        ([turn("system", "", ""), turn("user", "Hi")], "messages[0]"),
        ([turn("user", "Hi"), turn("tool", tool_call_id="a")], "messages[1]"),
        ([turn("user", "Hi", reasoning="x")], "messages[0]"),
        ([turn("user", "Hi", tool_calls=(CALL,))], "messages[0]"),
    ],
)
def test_an_empty_or_impossible_message_is_named(chat: ChatFormat, messages: list[Message], param: str) -> None:
    with pytest.raises(PromptError) as caught:
        chat.render(messages, [])
    assert caught.value.param == param
    assert param in str(caught.value)


def test_an_answer_may_have_been_cut_before_its_first_word(chat: ChatFormat) -> None:
    assert written(chat, turn("user", "Hi"), turn("assistant"), turn("user", "Go on")).count("<|im_end|>") == 3


def test_empty_text_beside_something_is_ignored(chat: ChatFormat) -> None:
    assert written(chat, turn("user", "", PICTURE, "", "a", "")) == written(chat, turn("user", PICTURE, "a"))


@pytest.mark.parametrize(
    ("pictures", "counts", "numbers"),
    [
        (1, [], "hold 1 pictures, but token counts of 0"),
        (1, [4, 4], "hold 1 pictures, but token counts of 2"),
        (0, [4], "hold 0 pictures, but token counts of 1"),
        (2, [4, -1], "picture 1 has -1 tokens"),
    ],
)
def test_pictures_and_counts_must_match(chat: ChatFormat, pictures: int, counts: list[int], numbers: str) -> None:
    with pytest.raises(PromptError, match=numbers):
        chat.render([turn("user", "<|media_pad|>", *[PICTURE] * pictures)], counts)


def test_instant_prompts_are_what_the_demo_model_was_trained_on(chat: ChatFormat) -> None:
    rng = random.Random(0)
    renderer = Renderer()
    words = ["What does the text say?", "How many circles are there?", "Which picture is red?"]
    for _ in range(20):
        counts = [rng.randint(1, 30) for _ in range(rng.randint(1, 3))]
        turns = [
            Turn(question=rng.choice(words), answer=rng.choice(["red", "K7X2", "4"]), kind=KINDS[0])
            for _ in range(rng.randint(1, 3))
        ]
        sample = Sample(images=[Image.new("RGB", (56, 56))] * len(counts), turns=turns, marks=[[]] * len(counts))
        row = renderer.render(counts, sample)
        answer = row.flags.index(len(turns))
        first = turn("user", *[PICTURE] * len(counts), turns[0].question)
        rest = [
            message
            for before, after in itertools.pairwise(turns)
            for message in (turn("assistant", before.answer), turn("user", after.question))
        ]
        prompt = chat.render([first, *rest], counts, thinking=False)
        assert prompt.ids == row.ids[: answer + 1]
        assert row.positions == list(range(len(row.ids)))
        assert prompt.ids[-1] == vocabulary.special("</think>")
        apart = renderer.render(counts, sample, apart=True)
        for number, asked in enumerate(turns, 1):
            alone = chat.render([turn("user", *[PICTURE] * len(counts), asked.question)], counts, thinking=False).ids
            seen = [index for index, of in enumerate(apart.turns) if of in (0, number)]
            assert [apart.ids[index] for index in seen][: len(alone)] == alone
            assert [apart.positions[index] for index in seen] == list(range(len(seen)))


def function(name: str = "f", description: str | None = None, **parameters: Any) -> dict[str, Any]:
    inner: dict[str, Any] = {"name": name, "parameters": {"type": "object", **parameters}}
    return {"type": "function", "function": inner | ({"description": description} if description else {})}


def body(tool: dict[str, Any]) -> str:
    """The declaration of one function without the frame around it."""
    text = declare([tool])
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head), text
    assert text.endswith(tail)
    return text[len(head) : -len(tail)]


def test_tools_stand_before_everything(chat: ChatFormat) -> None:
    tool = function("get_weather", "Get weather", properties={"city": {"type": "string"}}, required=["city"])
    text = written(chat, turn("system", "S"), turn("user", "U"), tools=[tool])
    assert text.startswith(
        "<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n"
        "// Get weather\ntype get_weather = (_: {\n  city: string\n}) => any;\n}\n<|im_end|>"
        "<|im_system|>system<|im_middle|>S<|im_end|>"
    )


SCHEMAS = {
    "nothing": ({}, "{}"),
    "required first, then optional, each by name": (
        {
            "properties": {"d": {"type": "integer"}, "c": {"type": "boolean"}, "b": {}, "a": {"type": "number"}},
            "required": ["d", "c"],
        },
        "{\n  c: boolean,\n  d: number,\n  a?: number,\n  b?: any\n}",
    ),
    "descriptions, limits and defaults": (
        {
            "properties": {
                "a": {"type": "string", "description": "One\n\ntwo", "pattern": "^x$", "maxLength": 3, "default": "é"},
                "b": {"type": "integer", "minimum": 0, "maximum": 9, "default": 5},
                "c": {"type": "boolean", "default": False},
                "d": {"type": "array", "minItems": 1, "default": [1, "a"]},
            }
        },
        "{\n  // One\n\n  // two\n  // maxLength: 3, pattern: ^x$\n"
        '  // Default: "é"\n  a?: string,\n'
        "  // maximum: 9, minimum: 0\n  // Default: 5\n  b?: number,\n"
        "  // Default: False\n  c?: boolean,\n"
        '  // minItems: 1\n  // Default: [1, "a"]\n  d?: Array<any>\n}',
    ),
    "enumerations": (
        {
            "properties": {
                "a": {"enum": ["x", "y"], "type": "string"},
                "b": {"enum": [1, 2.5, None, True]},
                "c": {"enum": ["x", None], "type": ["string", "null"]},
            }
        },
        '{\n  a?: "x" | "y",\n  b?: 1 | 2.5 | None | True,\n  c?: "x" | None\n}',
    ),
    "unions": (
        {
            "properties": {
                "a": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
                "b": {"type": ["integer", "array", "object", "null"]},
                "c": {"type": "uuid"},
                "d": True,
                "e": False,
            }
        },
        "{\n  a?: string | number | null,\n  b?: number | Array<any> | {} | null,\n  c?: uuid,\n  d?: any,\n  e?: null\n}",
    ),
    "nested objects": (
        {
            "properties": {
                "user": {
                    "type": "object",
                    "description": "Who",
                    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "description": "Years"}},
                    "required": ["name"],
                    "additionalProperties": False,
                }
            },
            "required": ["user"],
            "additionalProperties": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
        "{\n  // Who\n  user: {\n    name: string,\n    // Years\n    age?: number,\n    [k: string]: never\n  },\n"
        "  [k: string]: {\n    x?: string\n  }\n}",
    ),
    "arrays": (
        {
            "properties": {
                "a": {"type": "array", "items": {"type": "string"}},
                "b": {"type": "array", "items": {"type": "string", "description": "One"}},
                "c": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                "d": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}}}},
            },
            "additionalProperties": True,
        },
        "{\n  a?: Array<string>,\n  b?: Array<\n    // One\n    string\n  >,\n  c?: Array<Array<number>>,\n"
        "  d?: Array<{\n    x?: string\n  }>,\n  [k: string]: any\n}",
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_as_types(name: str) -> None:
    schema, expected = SCHEMAS[name]
    assert body(function(**schema)) == f"type f = (_: {expected}) => any;"


def test_definitions_become_interfaces() -> None:
    tool = function(
        "create_node",
        "Make it",
        **{
            "$defs": {
                "Node": {
                    "type": "object",
                    "description": "A node",
                    "properties": {"id": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
                    "required": ["id"],
                },
                "Colour": {"enum": ["red", "blue"]},
            },
            "properties": {"node": {"$ref": "#/$defs/Node"}, "tint": {"$ref": "#/$defs/Colour", "description": "T"}},
            "required": ["node"],
        },
    )
    assert body(tool) == (
        'interface Colour "red" | "blue"\n'
        "// A node\ninterface Node {\n  id: string,\n  next?: Node\n}\n"
        "// Make it\ntype create_node = (_: {\n  node: Node,\n  // T\n  tint?: Colour\n}) => any;"
    )


def test_a_schema_that_names_itself() -> None:
    tool = function(properties={"b": {"type": "string"}, "a": {"$ref": "#"}}, required=["b"])
    assert body(tool) == "interface parameters {\n  a?: parameters,\n  b: string\n}\ntype f = (_: parameters) => any;"


def test_several_tools_and_the_order_of_keys_does_not_matter() -> None:
    first, second = function("a", properties={"y": {}, "x": {}}), function("b")
    text = declare([first, second])
    assert text == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "type a = (_: {\n  x?: any,\n  y?: any\n}) => any;\ntype b = (_: {}) => any;\n}\n"
    )
    assert declare([json.loads(json.dumps(first), object_pairs_hook=lambda p: dict(reversed(p))), second]) == text
    assert body({"type": "function", "function": {"name": "c"}}) == "type c = (_: {}) => any;"
    assert body({"type": "function", "function": {"name": "c", "parameters": None}}) == "type c = (_: {}) => any;"


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"const": "end"}, {"type": "integer"}]},
        {"$ref": "#/$defs/Nowhere"},
        {"$ref": "https://example.org/schema"},
        {"$ref": 3},
        {"enum": ["x"], "type": "integer"},
        {"enum": ["x"], "type": ["string", "integer"]},
        {"enum": ["x"], "type": ["string", "integer", "null"]},
        {"type": ["string", "uuid"]},
        {"type": "object", "additionalProperties": "no"},
        {"type": "string", "description": 5},
        "string",
        None,
    ],
)
def test_what_types_cannot_say_is_declared_as_sorted_compact_json(schema: Any) -> None:
    """No tool is ever lost: one odd schema puts the whole list into JSON."""
    tools = [function("ok"), function("é", "d", properties={"p": schema})]
    text = declare(tools)
    assert text == json.dumps(tools, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    assert '"name":"é"' in text


def test_a_tool_that_is_no_function_is_not_lost() -> None:
    tools = [function("a"), {"type": "other", "name": "b"}]
    assert json.loads(declare(tools)) == tools


def test_tools_that_are_no_json_are_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"properties": {"a": nested}, "type": "object"}
    with pytest.raises(PromptError, match="nested too deeply"):
        declare([{"type": "function", "function": {"name": "f", "parameters": nested}}])
    with pytest.raises(PromptError, match="not JSON objects"):
        declare([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"oneOf": {1}}}}}}])


def test_stop_ids_come_from_every_file_that_names_some(tmp_path: Path) -> None:
    vocabulary.write(tmp_path)
    config = {"model_type": "kimi_k25", "eos_token_id": vocabulary.EOS}
    assert chat_format(config, tmp_path).stop_ids == {vocabulary.IM_END, vocabulary.EOS}
    assert chat_format({"model_type": "kimi_k25"}, tmp_path).stop_ids == {vocabulary.IM_END}
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [vocabulary.IM_END, 777]}))
    assert chat_format(config, tmp_path).stop_ids == {vocabulary.IM_END, vocabulary.EOS, 777}
    generation.write_text(json.dumps({"eos_token_id": 1024}))
    with pytest.raises(ConfigError, match=r"eos_token_id 1024 of generation_config.json .* vocabulary of 1024"):
        chat_format(config, tmp_path)
    for damaged in ("{", "[]"):
        generation.write_text(damaged)
        with pytest.raises(ConfigError, match=r"generation_config\.json (cannot be read as JSON|holds list)"):
            chat_format(config, tmp_path)


@pytest.mark.parametrize("kind", ["kimi_k3", "llama", None])
def test_an_unknown_model_type_is_named(folder: Path, kind: str | None) -> None:
    with pytest.raises(ConfigError, match=f"model_type {kind!r}"):
        chat_format({"model_type": kind}, folder)


def test_configuration_and_vocabulary_must_agree_on_the_placeholder(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"media_placeholder_token_id is 163606, but <\|media_pad\|> is 789"):
        chat_format(CONFIG | {"media_placeholder_token_id": 163606}, folder)
    assert chat_format({"model_type": "kimi_k25"}, folder).placeholder_id == 789


def test_a_vocabulary_without_the_structure_is_refused(tmp_path: Path) -> None:
    vocabulary.write(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<think>", "<thought>").replace("<|tool_call_end|>", "<|x|>"))
    with pytest.raises(
        ConfigError, match=r"lacks special tokens of the Kimi-K2.5 format: <think>, <\|tool_call_end\|>"
    ):
        chat_format(CONFIG, tmp_path)
