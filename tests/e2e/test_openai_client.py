"""The official client against a real server: what it sends is understood, what it gets back it can read."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from moonvit.engines import Delta, ToolCallDelta, Usage
from tests.fake_engine import FakeEngine
from tests.live import image_part, live, solid, user


@pytest.fixture()
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture()
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with live(engine) as base, openai.OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake-vl",
        messages=user("a", image_part(solid("red")), "b"),
        max_tokens=2,
        temperature=0,
        seed=1,
        user="me",
    )
    assert answer.choices[0].message.content == "a [red 56x56]"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.image_tokens == 4


def test_streamed_answer_is_the_whole_answer(client: openai.OpenAI) -> None:
    messages = user("one", image_part(solid("red")), "two", image_part(solid("white", (28, 28))), "three")
    whole = client.chat.completions.create(model="fake-vl", messages=messages)
    chunks = list(
        client.chat.completions.create(
            model="fake-vl", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == "one [red 56x56] two [white 28x28] three"
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_the_stream_helper_of_the_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake-vl", messages=user("a b c")) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == "a b c"


def test_conversation_with_the_clients_own_messages(client: openai.OpenAI, engine: FakeEngine) -> None:
    messages = user("first", image_part(solid("red")))
    answer = client.chat.completions.create(model="fake-vl", messages=messages)
    messages.append(answer.choices[0].message.model_dump())
    messages += user("second")
    again = client.chat.completions.create(model="fake-vl", messages=messages)
    assert again.choices[0].message.content == "second"
    assert [message.role for message in engine.seen[1].messages] == ["user", "assistant", "user"]


def test_reasoning_and_tools(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = [
        Delta(reasoning="think"),
        Delta(tool_calls=(ToolCallDelta(0, "functions.look:0", "look"),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments='{"at": "sky"}'),)),
        Delta(finish_reason="tool_calls", usage=Usage(5, 9, 0, 4)),
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    messages = user("q")
    answer = client.chat.completions.create(
        model="fake-vl", messages=messages, tools=tools, extra_body={"chat_template_kwargs": {"thinking": True}}
    )
    message = answer.choices[0].message
    assert message.reasoning_content == "think"  # type: ignore[attr-defined]
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"at": "sky"}'  # type: ignore[union-attr]
    assert engine.seen[0].thinking is True
    engine.script = None
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": "functions.look:0", "content": "blue"}]
    assert (
        client.chat.completions.create(model="fake-vl", messages=messages, tools=tools).choices[0].message.content
        == "blue"
    )
    history = engine.seen[1].messages
    assert history[1].reasoning == "think"
    assert history[1].tool_calls[0].arguments == '{"at": "sky"}'
    assert history[2].tool_call_id == "functions.look:0"


def test_errors_are_the_clients_own(client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake-vl", messages=user("a"), n=2)
    assert bad.value.param == "n"
    assert bad.value.code == "invalid_request"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=user("a"))
    with pytest.raises(openai.BadRequestError, match="top_k"):
        client.chat.completions.create(model="fake-vl", messages=user("a"), extra_body={"top_k": 5})
    engine.fail_at = 1
    with pytest.raises(openai.APIError, match="the server failed"):
        list(client.chat.completions.create(model="fake-vl", messages=user("a b"), stream=True))
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="fake-vl", messages=user("a b"))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake-vl"]
    assert client.models.retrieve("fake-vl").owned_by == "moonvit"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_key() -> None:
    with live(FakeEngine(), api_key="k") as base:
        good = openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0)
        bad = openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0)
        with good, bad:
            assert [model.id for model in good.models.list()] == ["fake-vl"]
            with pytest.raises(openai.AuthenticationError):
                bad.models.list()


def test_the_client_waits_and_tries_again_when_the_queue_is_full() -> None:
    from concurrent.futures import ThreadPoolExecutor

    engine = FakeEngine(delay=0.2)
    with live(engine, max_running=1, max_waiting=0) as base, ThreadPoolExecutor() as pool:
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=6)

        def one(word: str) -> str | None:
            return client.chat.completions.create(model="fake-vl", messages=user(word)).choices[0].message.content

        assert list(pool.map(one, ["a", "b", "c"])) == ["a", "b", "c"]
        assert engine.peak == 1
        client.close()
