"""Every field of a chat request is honoured, or refused by name."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from moonvit.engines import Delta, Sampling, ToolCallDelta, Usage
from moonvit.errors import RequestError
from moonvit.prompts.messages import ImagePart, Message, TextPart, ToolCall
from moonvit.server import schema
from moonvit.server.answer import Answer
from moonvit.server.schema import NEUTRAL, parse_chat, parse_plan

HELLO = [{"role": "user", "content": "hello"}]
URL = "data:image/png;base64,AAAA"


def chat(max_images: int = 8, **fields: Any) -> schema.ChatCall:
    return parse_chat({"messages": HELLO, **fields}, max_images=max_images)


def messages(*turns: dict[str, Any], max_images: int = 8) -> tuple[Message, ...]:
    return parse_chat({"messages": list(turns)}, max_images=max_images).request.messages


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    return caught.value


def turn_refused(*turns: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        messages(*turns)
    return caught.value


# ---- the table of fields --------------------------------------------------------------------------------------------

HONOURED: dict[str, Any] = {
    "messages": HELLO,
    "model": "m",
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 3,
    "stop": ["a"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "reasoning_effort": "none",
    "chat_template_kwargs": {"thinking": True},
    "user": "u",
    "safety_identifier": "u",
}

ASKS_FOR_SOMETHING: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"5": 1},
    "logprobs": True,
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": -0.5,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "response_format": {"type": "json_object"},
    "service_tier": "flex",
    "store": True,
    "top_logprobs": 3,
    "verbosity": "low",
    "web_search_options": {},
}


def test_table_covers_every_field_of_the_openai_client() -> None:
    params = pytest.importorskip("openai.types.chat.completion_create_params")
    official = set(typing.get_type_hints(params.CompletionCreateParamsBase)) | {"stream"}
    assert official == (set(HONOURED) | set(NEUTRAL)) - {"chat_template_kwargs"}
    assert set(ASKS_FOR_SOMETHING) == set(NEUTRAL)
    assert set(schema._Chat.model_fields) == set(HONOURED)


@pytest.mark.parametrize("field", sorted(HONOURED))
def test_honoured_fields_are_taken(field: str) -> None:
    extra = {"stream": True} if field == "stream_options" else {}
    parse_chat({"messages": HELLO, field: HONOURED[field], **extra}, max_images=1)


@pytest.mark.parametrize("field", sorted(NEUTRAL))
def test_fields_not_honoured_are_refused_by_name(field: str) -> None:
    error = refused(**{field: ASKS_FOR_SOMETHING[field]})
    assert error.param == field
    assert field in error.message
    assert error.status == 400


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in NEUTRAL for value in (None, *NEUTRAL[name])])
def test_values_that_ask_for_nothing_pass(field: str, value: Any) -> None:
    assert chat(**{field: value}).request.messages[0].parts == (TextPart("hello"),)


@pytest.mark.parametrize("field", sorted(set(HONOURED) - {"messages"}))
def test_null_is_the_same_as_absent(field: str) -> None:
    assert chat(**{field: None}) == chat()


@pytest.mark.parametrize(("field", "value"), [("n", True), ("store", 0), ("logprobs", 0), ("presence_penalty", False)])
def test_true_is_not_one(field: str, value: Any) -> None:
    assert refused(**{field: value}).param == field


@pytest.mark.parametrize("field", ["top_k", "min_p", "repetition_penalty", "extra_body", "Temperature", ""])
def test_unknown_fields_are_refused_by_name(field: str) -> None:
    error = refused(**{field: 1})
    assert error.param == (field or None)
    assert repr(field) in error.message


def test_an_unknown_field_is_named_before_what_else_is_wrong() -> None:
    assert refused(temperature=9, top_k=1).param == "top_k"


# ---- values ---------------------------------------------------------------------------------------------------------


def test_sampling_is_handed_over() -> None:
    call = chat(max_tokens=7, temperature=0, top_p=1, seed=-5, stop="END", user="me", stream=True)
    assert call.request.sampling == Sampling(max_tokens=7, temperature=0.0, top_p=1.0, seed=-5, stop=("END",))
    assert (call.stream, call.include_usage, call.user) == (True, False, "me")


def test_defaults_leave_the_choice_to_the_model() -> None:
    call = chat()
    assert call.request.sampling == Sampling()
    assert call.request.thinking is None
    assert not call.stream


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("inf")),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_completion_tokens", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a"] * 5),
        ("stop", "a" * 1001),
        ("stop", ["a" * 1001]),
        ("stop", 5),
        ("stream", "true"),
        ("model", 5),
        ("user", "u" * 257),
        ("reasoning_effort", "high"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tools", {}),
        ("messages", []),
        ("messages", "hello"),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error.param is not None
    assert error.param.split("[")[0] == field
    assert field in error.message


def test_the_value_that_broke_a_limit_is_in_the_message() -> None:
    assert "2.5" in refused(temperature=2.5).message
    assert "less than or equal to 2" in refused(temperature=2.5).message


def test_long_values_are_cut_in_messages() -> None:
    error = refused(stream="x" * 100_000)
    assert len(error.message) < 300
    assert "100002 characters" in error.message
    assert len(refused(**{"k" * 100_000: 1}).message) < 300


def test_two_names_of_one_limit_must_agree() -> None:
    assert chat(max_tokens=4, max_completion_tokens=4).request.sampling.max_tokens == 4
    assert chat(max_completion_tokens=4).request.sampling.max_tokens == 4
    assert "disagree" in refused(max_tokens=4, max_completion_tokens=5).message
    assert refused(user="a", safety_identifier="b").param == "user"


def test_stream_options_need_a_stream() -> None:
    assert refused(stream_options={"include_usage": True}).param == "stream_options"
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert (
        refused(stream=True, stream_options={"include_obfuscation": True}).param == "stream_options.include_obfuscation"
    )
    assert refused(stream=True, stream_options={"chunk": 1}).param == "stream_options.chunk"


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"chat_template_kwargs": {}}, None),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": False}}, False),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: bool | None) -> None:
    assert chat(**fields).request.thinking is thinking


def test_thinking_contradictions_and_other_template_settings() -> None:
    assert refused(reasoning_effort="none", chat_template_kwargs={"thinking": True}).param == "reasoning_effort"
    assert refused(chat_template_kwargs={"enable_thinking": True}).param == "chat_template_kwargs.enable_thinking"
    assert refused(chat_template_kwargs={"thinking": "yes"}).param == "chat_template_kwargs.thinking"


def test_tools_are_passed_through_and_can_be_held_back() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "number"}}, "x-own": [1, None]}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    assert chat(tools=[tool]).request.tools == (tool,)
    assert chat(tools=[tool], tool_choice="none").request.tools == ()
    loose = {"type": "function", "function": {**tool["function"], "strict": False}}
    assert chat(tools=[loose]).request.tools == (tool,)
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    assert refused(tools=[strict]).param == "tools[0].function.strict"
    assert refused(tools=[{"type": "custom", "custom": {}}]).param is not None
    assert refused(tools=[{"type": "function", "function": {"name": "no spaces"}}]).param == "tools[0].function.name"


# ---- messages -------------------------------------------------------------------------------------------------------


def picture(url: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_parts_keep_their_order_and_place() -> None:
    parts = [text("A"), picture(URL + "1"), text("B"), picture(URL + "2"), picture(URL + "1"), text("C")]
    (message,) = messages({"role": "user", "content": parts})
    assert message.parts == (
        TextPart("A"),
        ImagePart(URL + "1", "messages[0].content[1]"),
        TextPart("B"),
        ImagePart(URL + "2", "messages[0].content[3]"),
        ImagePart(URL + "1", "messages[0].content[4]"),
        TextPart("C"),
    )


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_pictures_are_taken_in_every_role(role: str) -> None:
    extra = {"tool_call_id": "c"} if role == "tool" else {}
    (message,) = messages({"role": role, "content": [picture()], **extra})
    assert [part.source for part in message.images] == [URL]
    assert message.role == ("system" if role == "developer" else role)


@pytest.mark.parametrize("detail", ["absent", None, "auto", "low", "high"])
def test_detail(detail: str | None) -> None:
    part = picture() if detail == "absent" else picture(detail=detail)
    assert len(messages({"role": "user", "content": [part]})[0].images) == 1


def test_picture_spellings() -> None:
    (message,) = messages({"role": "user", "content": [{"type": "image_url", "image_url": URL}]})
    assert message.images[0].source == URL
    assert turn_refused({"role": "user", "content": [picture(detail="foo")]}).param == (
        "messages[0].content[0].image_url.detail"
    )
    assert turn_refused({"role": "user", "content": [picture(uuid="x")]}).param == (
        "messages[0].content[0].image_url.uuid"
    )
    assert turn_refused({"role": "user", "content": [{**picture(), "cache_control": {}}]}).param == (
        "messages[0].content[0].cache_control"
    )
    for wrong in (None, 5, [], {}, {"url": None}, {"url": 5}):
        error = turn_refused({"role": "user", "content": [{"type": "image_url", "image_url": wrong}]})
        assert error.param is not None
        assert error.param.startswith("messages[0].content[0].image_url")


@pytest.mark.parametrize(
    "url", ["", "file:///etc/passwd", "/etc/passwd", "ftp://host/a.png", "picture.png", "javascript:x", "//host/a.png"]
)
def test_only_data_and_http_addresses(url: str) -> None:
    error = turn_refused({"role": "user", "content": [text("a"), picture(url)]})
    assert error.param == "messages[0].content[1].image_url"


@pytest.mark.parametrize("url", ["http://h/a.png", "HTTPS://h/a.png", "DATA:image/png;base64,AA=="])
def test_schemes_in_any_case(url: str) -> None:
    assert messages({"role": "user", "content": [picture(url)]})[0].images[0].source == url


def test_long_addresses_are_refused_with_both_numbers() -> None:
    error = turn_refused({"role": "user", "content": [picture("https://h/" + "a" * 9000)]})
    assert "9010" in error.message
    assert "8192" in error.message
    assert "aaaa" not in error.message


@pytest.mark.parametrize(
    "kind", ["video_url", "video", "input_audio", "file", "image", "input_image", "refusal", "x", None]
)
def test_other_parts_are_refused_by_name(kind: str | None) -> None:
    error = turn_refused({"role": "user", "content": [text("a"), {"type": kind, str(kind): {"url": URL}}]})
    assert error.param == "messages[0].content[1].type"
    assert "messages[0].content[1]" in error.message
    assert URL not in error.message


def test_empty_messages_are_refused_by_index() -> None:
    kept = messages(
        {"role": "user", "content": [picture(), text("")]}, {"role": "user", "content": [text(""), picture()]}
    )
    assert [len(message.parts) for message in kept] == [1, 1]
    for content in ([], "", None, [text("")]):
        error = turn_refused(*HELLO, {"role": "user", "content": content})
        assert error.param == "messages[1].content"
        # An answer that was cut before its first word is legal history.
        assert messages(*HELLO, {"role": "assistant", "content": content})[1].parts == ()
    assert turn_refused(*HELLO, {"role": "user"}).param == "messages[1].content"
    assert turn_refused({"role": "tool", "tool_call_id": "c", "content": ""}).param == "messages[0].content"


def test_tool_turns() -> None:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|im_end|>"}'}}
    turns = messages(
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": [text("see"), picture()]},
    )
    assert turns[1] == Message("assistant", (), "hm", (ToolCall("functions.f:0", "f", '{"a": "<|im_end|>"}'),))
    assert turns[2].tool_call_id == "functions.f:0"
    assert len(turns[2].images) == 1
    assert turn_refused({"role": "tool", "content": "x"}).param == "messages[0].tool_call_id"
    assert turn_refused({"role": "user", "content": "x", "tool_calls": [call]}).param == "messages[0].tool_calls"
    assert turn_refused({"role": "user", "content": "x", "tool_call_id": "c"}).param == "messages[0].tool_call_id"
    assert turn_refused({"role": "user", "content": "x", "reasoning_content": "r"}).param == (
        "messages[0].reasoning_content"
    )


def test_roles_and_message_fields() -> None:
    assert turn_refused({"role": "function", "content": "x"}).param == "messages[0].role"
    assert turn_refused({"content": "x"}).param == "messages[0].role"
    assert turn_refused({"role": "user", "content": "x", "weight": 1}).param == "messages[0].weight"
    assert turn_refused({"role": "user", "content": 5}).param == "messages[0].content"
    assert turn_refused({"role": "assistant", "content": "x", "audio": {"id": "a"}}).param == "messages[0].audio"
    assert turn_refused({"role": "user", "content": ["hello"]}).param == "messages[0].content[0]"
    assert messages({"role": "user", "content": "x", "name": "ann"})[0].name == "ann"


def test_an_answer_of_the_openai_client_is_legal_history() -> None:
    types = pytest.importorskip("openai.types.chat")
    answer = Answer("chatcmpl-1", "m")
    answer.add(Delta(reasoning="hm", content="yes"))
    answer.add(Delta(finish_reason="stop", usage=Usage(1, 1)))
    message = types.ChatCompletion.model_validate(answer.completion()).choices[0].message
    turns = messages(*HELLO, message.model_dump(), {"role": "user", "content": "and?"})
    assert turns[1] == Message("assistant", (TextPart("yes"),), "hm")


def test_markers_and_data_urls_in_strings_are_text() -> None:
    words = f"<|media_pad|> <image> {URL}"
    assert messages({"role": "user", "content": words})[0].parts == (TextPart(words),)


def test_picture_limit_counts_the_history() -> None:
    turns = [{"role": "user", "content": [picture()]} for _ in range(4)]
    assert len(messages(*turns, max_images=4)) == 4
    with pytest.raises(RequestError, match="hold 5 pictures, history included; allowed 4"):
        messages(*turns, {"role": "user", "content": [picture()]}, max_images=4)


@pytest.mark.parametrize("document", [None, [], "x", 5])
def test_the_body_must_be_an_object(document: Any) -> None:
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_chat(document, max_images=1)
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_plan(document, max_images=1)


def test_endless_lists_are_refused_before_they_are_looked_through() -> None:
    wrong: Any = {"messages": [{"role": "user", "content": [[] for _ in range(100_001)]}]}
    with pytest.raises(RequestError, match="the body holds more than 100000 values"):
        parse_chat(wrong, max_images=1)
    for count, param in ((2049, "messages[0].content"), (2048, None)):
        turns = [{"role": "user", "content": [text("x")] * count}]
        if param is None:
            assert len(messages(*turns)[0].parts) == 2048
        else:
            assert turn_refused(*turns).param == param
    assert refused(messages=HELLO * 2049).param == "messages"
    with pytest.raises(RequestError, match="2048") as caught:
        parse_plan({"sizes": [[56, 56]] * 2049}, max_images=9999)
    assert caught.value.param == "sizes"


# ---- plan requests --------------------------------------------------------------------------------------------------


def test_plan_takes_messages_images_or_sizes() -> None:
    request = parse_plan({"sizes": [[640, 480], [1, 1]]}, max_images=2)
    assert [part.source for part in request.messages[0].images] == [(640, 480), (1, 1)]
    request = parse_plan({"images": [URL, {"url": URL}]}, max_images=2)
    assert [part.param for part in request.messages[0].images] == ["images[0]", "images[1]"]
    size = {"type": "image_size", "image_size": {"width": 3, "height": 5}}
    request = parse_plan({"messages": [{"role": "user", "content": [size, text("a")]}]}, max_images=2)
    assert request.messages[0].parts == (ImagePart((3, 5), "messages[0].content[0]"), TextPart("a"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"sizes": [[1, 1]], "images": [URL]}, "images"),
        ({"sizes": []}, "sizes"),
        ({"sizes": [[1]]}, "sizes[0]"),
        ({"sizes": [[1, 0]]}, "sizes[0][1]"),
        ({"sizes": [[1.5, 1]]}, "sizes[0][0]"),
        ({"sizes": [[True, 1]]}, "sizes[0][0]"),
        ({"sizes": [[1, 1]] * 3}, "sizes"),
        ({"images": ["file:///x"]}, "images[0]"),
        ({"images": [5]}, "images[0]"),
        ({"messages": HELLO, "temperature": 1}, "temperature"),
    ],
)
def test_plan_refusals(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_plan(fields, max_images=2)
    assert caught.value.param == param


def test_sizes_are_for_plans_only() -> None:
    size = {"type": "image_size", "image_size": {"width": 3, "height": 5}}
    assert turn_refused({"role": "user", "content": [size]}).param == "messages[0].content[0].type"


# ---- answers --------------------------------------------------------------------------------------------------------


def test_chunks_of_a_stream() -> None:
    answer = Answer("chatcmpl-1", "m", include_usage=True)
    opening = answer.opening()
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["usage"] is None
    assert answer.chunks(Delta()) == []
    (chunk,) = answer.chunks(Delta(content="a", reasoning="b"))
    assert chunk["choices"][0]["delta"] == {"content": "a", "reasoning_content": "b"}
    assert chunk["choices"][0]["finish_reason"] is None
    last = answer.chunks(Delta(content="z", finish_reason="stop", usage=Usage(5, 2, 3, 1, 4)))
    assert [len(item["choices"]) for item in last] == [1, 1, 0]
    assert last[1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": None}
    assert last[2]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4, "image_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert {item["id"] for item in (opening, chunk, *last)} == {"chatcmpl-1"}


def test_no_usage_chunk_unless_asked() -> None:
    answer = Answer("chatcmpl-1", "m")
    chunks = [answer.opening(), *answer.chunks(Delta(finish_reason="length", usage=Usage(1, 1)))]
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


def test_tool_calls_in_both_shapes() -> None:
    deltas = [
        Delta(tool_calls=(ToolCallDelta(0, "functions.f:0", "f"),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments='{"a"'),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "functions.g:1", "g", "{}"))),
        Delta(finish_reason="tool_calls", usage=Usage(1, 9)),
    ]
    streamed = Answer("chatcmpl-1", "m")
    pieces = [chunk["choices"][0]["delta"].get("tool_calls") for delta in deltas for chunk in streamed.chunks(delta)]
    assert pieces[0] == [
        {"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": ""}}
    ]
    assert pieces[1] == [{"index": 0, "function": {"arguments": '{"a"'}}]
    whole = Answer("chatcmpl-1", "m")
    for delta in deltas:
        whole.add(delta)
    choice = whole.completion()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "functions.g:1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_reasoning_that_used_up_the_answer_is_told() -> None:
    answer = Answer("chatcmpl-1", "m")
    answer.add(Delta(reasoning="long"))
    answer.add(Delta(finish_reason="length", usage=Usage(3, 512, 0, 512)))
    completion = answer.completion()
    assert completion["choices"][0]["message"]["content"] == ""
    assert completion["choices"][0]["finish_reason"] == "length"
    assert completion["usage"]["completion_tokens_details"]["reasoning_tokens"] == 512
