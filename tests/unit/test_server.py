"""The server against a fake engine, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import importlib
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from moonvit.engines import Delta, ToolCallDelta, Usage
from moonvit.errors import BudgetError, ConfigError, EngineError, MissingDependencyError, OverloadedError
from moonvit.server.queue import Admission, PendingBytes
from moonvit.server.settings import Settings, load_settings
from tests.fake_engine import FakeEngine
from tests.live import ask, data_url, error_of, image_part, live, solid, text_of, user, wait_until, web


@pytest.fixture()
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture()
def base(engine: FakeEngine) -> Iterator[str]:
    with live(engine) as address:
        yield address


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    """A server for tests that leave nothing behind."""
    with live(FakeEngine()) as address:
        yield address


def healthy(base: str) -> None:
    """One picture and one text request still work."""
    assert text_of(ask(base, user("is", image_part(solid("red"))))) == "is [red 56x56]"
    assert text_of(ask(base, user("only words"))) == "only words"


# ---- answers --------------------------------------------------------------------------------------------------------


def test_text_and_pictures_in_any_order(base: str, engine: FakeEngine) -> None:
    red, blue = image_part(solid("red")), image_part(solid("blue", (28, 84), "JPEG"))
    response = ask(base, user("A", red, "B", blue, red, "C"))
    body = response.json()
    assert text_of(response).replace("other", "blue") == "A [red 56x56] B [blue 28x84] [red 56x56] C"
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake-vl"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens_details"]["image_tokens"] == 4 + 3 + 4
    assert body["usage"]["prompt_tokens"] == 11 + 3
    assert response.headers["x-request-id"] == engine.seen[0].id


def test_text_only_requests_never_hand_over_a_picture(base: str, engine: FakeEngine) -> None:
    assert text_of(ask(base, [{"role": "user", "content": "hello there"}])) == "hello there"
    history = [*user("what", image_part(solid("red"))), {"role": "assistant", "content": "red"}]
    assert text_of(ask(base, [*history, {"role": "user", "content": "sure?"}])) == "sure?"
    assert not any(message.images for message in engine.seen[0].messages)
    assert [len(message.images) for message in engine.seen[1].messages] == [1, 0, 0]


def test_pictures_reach_the_engine_as_bytes(base: str, engine: FakeEngine) -> None:
    content = solid("green")
    ask(base, user(image_part(content)))
    (part,) = engine.seen[0].messages[0].images
    assert part.source == content
    assert part.param == "messages[0].content[0]"


def test_raw_bytes_of_a_stream(base: str, engine: FakeEngine) -> None:
    engine.script = [
        Delta(reasoning="hm"),
        Delta(content="zwölf 🌙"),
        Delta(),
        Delta(content="\n\ndata: x"),
        Delta(finish_reason="stop", usage=Usage(7, 3, 2, 1)),
    ]
    with web.stream(
        "POST",
        f"{base}/v1/chat/completions",
        json={"messages": user("q"), "stream": True, "stream_options": {"include_usage": True}},
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert "content-length" not in response.headers
        raw = response.read()
    assert raw.endswith(b"}\n\ndata: [DONE]\n\n")
    events = raw.split(b"\n\n")
    assert events.pop() == b""
    assert events.pop() == b"data: [DONE]"
    assert all(event.startswith(b"data: {") and b"\n" not in event for event in events)
    documents = [json.loads(event[6:]) for event in events]
    assert [document["choices"][0]["delta"] for document in documents[:-1]] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "zwölf 🌙"},
        {"content": "\n\ndata: x"},
        {},
    ]
    assert "🌙".encode() in raw
    assert documents[-1]["choices"] == []
    assert documents[-1]["usage"]["total_tokens"] == 10
    assert all(document["usage"] is None for document in documents[:-1])
    assert len({document["id"] for document in documents}) == 1


def test_stream_without_usage(base: str) -> None:
    raw = ask(base, user("a b"), stream=True).text
    assert "usage" not in raw
    assert raw.count('"finish_reason":"stop"') == 1


def test_pieces_arrive_while_the_answer_is_written(base: str, engine: FakeEngine) -> None:
    engine.delay = 0.15
    with web.stream(
        "POST", f"{base}/v1/chat/completions", json={"messages": user("a b c d e"), "stream": True}
    ) as response:
        arrivals = [time.monotonic() for line in response.iter_lines() if '"content":' in line]
    assert arrivals[-1] - arrivals[0] > 0.4


def test_tool_calls(base: str, engine: FakeEngine) -> None:
    engine.script = [
        Delta(tool_calls=(ToolCallDelta(0, "functions.f:0", "f"),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments='{"a":1}'),)),
        Delta(finish_reason="tool_calls", usage=Usage(3, 5)),
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    choice = ask(base, user("q"), tools=tools).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert engine.seen[0].tools == tuple(tools)
    raw = ask(base, user("q"), tools=tools, stream=True).text
    assert '"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\":1}"}}]' in raw


# ---- other addresses ------------------------------------------------------------------------------------------------


def test_models_and_health(base: str, engine: FakeEngine) -> None:
    listed = web.get(f"{base}/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == ["fake-vl"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert web.get(f"{base}/v1/models/fake-vl").json() == listed["data"][0]
    assert error_of(web.get(f"{base}/v1/models/other/one"), 404)["param"] == "model"
    assert web.get(f"{base}/health").json()["status"] == "ok"
    engine.alive = False
    assert error_of(web.get(f"{base}/health"), 503)["code"] == "engine_unavailable"


def test_health_of_an_engine_that_hangs(base: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonvit.server.app._HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(engine, "health", lambda: asyncio.sleep(60))
    assert "0.1 s" in error_of(web.get(f"{base}/health"), 503)["message"]


def test_a_model_that_is_not_served(shared: str) -> None:
    assert text_of(ask(shared, user("a"), model="fake-vl")) == "a"
    error = error_of(ask(shared, user("a"), model="gpt-x"), 404)
    assert error["param"] == "model"
    assert "gpt-x" in error["message"]
    assert "fake-vl" in error["message"]
    assert error_of(web.post(f"{shared}/v1/vision/plan", json={"model": "x", "sizes": [[1, 1]]}), 404)


def test_metrics(base: str) -> None:
    ask(base, user("one two", image_part(solid("red"))))
    ask(base, user("x"), top_k=1)
    text = web.get(f"{base}/metrics").text
    for line in (
        'moonvit_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'moonvit_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        'moonvit_errors_total{code="invalid_request"} 1.0',
        'moonvit_tokens_total{kind="image"} 4.0',
        'moonvit_tokens_total{kind="prompt"} 6.0',
        "moonvit_images_total 1.0",
        "moonvit_in_flight 0.0",
        "moonvit_running 0.0",
        "moonvit_pending_body_bytes 0.0",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/docs", 404),
    ],
)
def test_framework_errors_have_the_same_shape(shared: str, method: str, path: str, status: int) -> None:
    error = error_of(web.request(method, shared + path), status)
    assert path in error["message"]


def test_request_ids(shared: str) -> None:
    def id_for(given: str | None) -> str:
        headers = {} if given is None else {"x-request-id": given}
        return web.get(f"{shared}/health", headers=headers).headers["x-request-id"]

    assert id_for("trace-1.a_B") == "trace-1.a_B"
    for unfit in (None, "", "a b", "x" * 65, 'a"b'):
        assert id_for(unfit).startswith("req-")
    assert id_for(None) != id_for(None)
    assert web.get(f"{shared}/nope").headers["x-request-id"].startswith("req-")


# ---- the plan -------------------------------------------------------------------------------------------------------


def plan(base: str, **body: Any) -> httpx.Response:
    return web.post(f"{base}/v1/vision/plan", json=body)


def test_plan_of_sizes_pictures_and_messages_agree(base: str, engine: FakeEngine) -> None:
    picture = solid("red", (60, 90))
    by_size = plan(base, sizes=[[60, 90]]).json()
    assert by_size["images"] == [
        {
            "param": "sizes[0]",
            "size": [60, 90],
            "resized": [60, 90],
            "padded": [84, 112],
            "grid": [1, 8, 6],
            "patches": 48,
            "tokens": 12,
        }
    ]
    assert (by_size["prompt_tokens"], by_size["image_tokens"], by_size["peak_bytes"]) == (12, 12, 12000)
    by_picture = plan(base, images=[data_url(picture)]).json()
    by_message = plan(base, messages=user("two words", image_part(picture))).json()
    size_part = {"type": "image_size", "image_size": {"width": 60, "height": 90}}
    by_size_part = plan(base, messages=user("two words", size_part)).json()
    for other in (by_picture, by_message, by_size_part):
        assert {**other["images"][0], "param": "sizes[0]"} == by_size["images"][0]
    assert by_message == by_size_part
    assert by_message["prompt_tokens"] == 14
    assert engine.seen == []


def test_plan_of_words_alone(shared: str) -> None:
    body = plan(shared, messages=user("just three words")).json()
    assert (body["prompt_tokens"], body["images"], body["peak_bytes"]) == (3, [], 0)


def test_plan_refusals(shared: str) -> None:
    assert error_of(plan(shared), 400)["param"] == "messages"
    assert error_of(plan(shared, sizes=[[0, 1]]), 400)["param"] == "sizes[0][0]"
    assert error_of(plan(shared, images=[data_url(b"junk")]), 400)["param"] == "images[0]"
    assert error_of(plan(shared, sizes=[[1, 1]] * 33), 400)["param"] == "sizes"


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_refusals_come_before_the_engine(base: str, engine: FakeEngine) -> None:
    for fields in ({"n": 2}, {"logprobs": True}, {"top_k": 5}, {"temperature": 3}, {"stop": ["a"] * 5}):
        error = error_of(ask(base, user("a"), **fields), 400)
        assert error["param"] == next(iter(fields))
        assert error["type"] == "invalid_request_error"
        assert error_of(ask(base, user("a"), stream=True, **fields), 400) == error
    assert engine.seen == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"messages": NaN}', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "JSON object"),
        (b'"x"', "JSON object"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", ""),
    ],
)
def test_broken_bodies(shared: str, content: bytes, said: str) -> None:
    response = web.post(f"{shared}/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert said in error_of(response, 400)["message"]
    assert len(response.content) < 1000


def test_other_content_types_and_encodings(shared: str) -> None:
    body = json.dumps({"messages": user("a")}).encode()
    for headers in ({"content-type": "text/plain"}, {}, {"content-type": "application/x-www-form-urlencoded"}):
        error = error_of(web.post(f"{shared}/v1/chat/completions", content=body, headers=headers), 400)
        assert error["param"] == "Content-Type"
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert error_of(web.post(f"{shared}/v1/chat/completions", content=body, headers=headers), 400)["param"] == (
        "Content-Encoding"
    )
    fine = web.post(
        f"{shared}/v1/chat/completions", content=body, headers={"content-type": "application/json; charset=utf-8"}
    )
    assert text_of(fine) == "a"


def test_a_model_without_vision() -> None:
    with live(FakeEngine(vision=False)) as text_only:
        assert text_of(ask(text_only, user("hi"))) == "hi"
        error = error_of(ask(text_only, user("a", image_part(solid("red")))), 400)
        assert error["param"] == "messages[0].content[1]"
        assert error_of(plan(text_only, sizes=[[1, 1]]), 400)["param"] == "sizes[0]"


def test_picture_limit(engine: FakeEngine) -> None:
    with live(engine, max_images=4) as base:
        history: list[dict[str, Any]] = []
        for turn in range(8):
            history += user("see", image_part(solid("red")))
            response = ask(base, history)
            if turn < 4:
                history.append({"role": "assistant", "content": text_of(response)})
            else:
                message = error_of(response, 400)["message"]
                assert f"{turn + 1} pictures" in message
                assert "allowed 4" in message


# ---- pictures -------------------------------------------------------------------------------------------------------


def bad_pictures() -> dict[str, bytes]:
    good_jpeg, good_png = solid("red", (64, 64), "JPEG"), solid("red", (64, 64))
    flipped = bytearray(good_png)
    flipped[good_png.index(b"IDAT") + 8] ^= 0xFF
    huge = bytearray(good_png)
    huge[16:24] = (2**31 - 1).to_bytes(4, "big") * 2
    return {
        "empty": b"",
        "text": b"this is no picture",
        "html": b"<html><body>not found</body></html>",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "truncated jpeg": good_jpeg[:-128],
        "truncated png": good_png[:-20],
        "truncated webp": solid("red", (64, 64), "WEBP")[:40],
        "flipped byte": bytes(flipped),
        "png that claims 2^31 px a side": bytes(huge),
        "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
    }


@pytest.mark.parametrize("name", sorted(bad_pictures()))
def test_bad_pictures_get_400_and_harm_nobody(shared: str, name: str) -> None:
    content = bad_pictures()[name]
    messages = [*user("first"), {"role": "assistant", "content": "ok"}, *user("a", image_part(content))]
    error = error_of(ask(shared, messages), 400)
    assert error["param"] == "messages[2].content[1]"
    assert error_of(ask(shared, messages, stream=True), 400) == error
    assert "moonvit/" not in error["message"]
    assert "Traceback" not in error["message"]
    healthy(shared)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,",
        "data:image/png;base64,AAAAA",
        "data:image/png;base64,!!!!",
        "data:image/png",
        "data:,",
    ],
)
def test_broken_data_urls(shared: str, url: str) -> None:
    error = error_of(ask(shared, user({"type": "image_url", "image_url": url})), 400)
    assert error["param"] == "messages[0].content[0]"


def test_data_urls_in_the_wild(shared: str) -> None:
    content = solid("red")
    encoded = base64.b64encode(content).decode()
    wrapped = "\r\n".join(encoded[i : i + 60] for i in range(0, len(encoded), 60))
    for url in (
        f"data:image/png;charset=utf-8;base64,{encoded}",
        f"data:image/jpeg;base64,{encoded}",
        f"data:image/png;base64,{wrapped}",
    ):
        assert text_of(ask(shared, user({"type": "image_url", "image_url": url}))) == "[red 56x56]"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_picture_modes(shared: str, mode: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (30, 40), "white").convert("I" if mode == "I;16" else mode).convert(mode).save(out, "PNG")
    assert "30x40" in text_of(ask(shared, user(image_part(out.getvalue()))))
    healthy(shared)


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_bodies_over_the_limit(engine: FakeEngine) -> None:
    with live(engine, max_body=100_000, max_pending=200_000) as base:
        big = json.dumps({"messages": user("x" * 2_000_000)}).encode()
        headers = {"content-type": "application/json"}
        start = time.monotonic()
        error = error_of(web.post(f"{base}/v1/chat/completions", content=big, headers=headers), 413)
        assert str(len(big)) in error["message"]
        assert "100000" in error["message"]
        pieces = (big[i : i + 50_000] for i in range(0, len(big), 50_000))  # no Content-Length
        error = error_of(web.post(f"{base}/v1/chat/completions", content=pieces, headers=headers), 413)
        assert "100000" in error["message"]
        assert time.monotonic() - start < 5
        assert text_of(ask(base, user("small"))) == "small"
        assert "moonvit_pending_body_bytes 0.0" in web.get(f"{base}/metrics").text


def test_a_body_that_never_ends(engine: FakeEngine) -> None:
    with live(engine, body_timeout=0.3) as base, raw_post(base, b'{"mess', declared=100) as sock:
        assert b"408" in sock.recv(4096).split(b"\r\n")[0]
        assert text_of(ask(base, user("hello"))) == "hello"


def test_all_bodies_together_are_bounded(engine: FakeEngine) -> None:
    with live(engine, max_body=100_000, max_pending=150_000) as base:
        engine.delay = 0.5
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask, base, user("x" * 90_000))
            wait_until(lambda: engine.running == 1)
            error = error_of(ask(base, user("y" * 90_000)), 429)
            assert "150000" in error["message"]
            assert first.result().status_code == 200
        engine.delay = 0
        assert ask(base, user("y" * 90_000)).status_code == 200


def test_full_queue_answers_429_at_once(engine: FakeEngine) -> None:
    engine.delay = 0.4
    with live(engine, max_running=2, max_waiting=1) as base, ThreadPoolExecutor() as pool:
        inside = [pool.submit(ask, base, user(f"word{i}")) for i in range(3)]
        wait_until(lambda: web.get(f"{base}/health").json()["in_flight"] == 3)
        start = time.monotonic()
        response = ask(base, user("one too many"))
        assert time.monotonic() - start < 0.3
        error = error_of(response, 429)
        assert error["code"] == "overloaded"
        assert "3 requests" in error["message"]
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert [text_of(future.result()) for future in inside] == ["word0", "word1", "word2"]
        assert engine.peak == 2
        assert text_of(ask(base, user("later"))) == "later"


def test_admission_is_first_come_first_served() -> None:
    async def run() -> list[int]:
        admission, order = Admission(1, 5), []

        async def one(number: int) -> None:
            with admission.place():
                async with admission.turn():
                    await asyncio.sleep(0.001)
                    order.append(number)

        await asyncio.gather(*(one(number) for number in range(6)))
        assert (admission.inside, admission.running) == (0, 0)
        return order

    assert asyncio.run(run()) == list(range(6))


def test_admission_counts_survive_failures() -> None:
    async def run() -> None:
        admission = Admission(1, 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError), admission.place():
                async with admission.turn():
                    raise ZeroDivisionError
        with admission.place():
            with pytest.raises(OverloadedError, match=r"1 requests .* allowed 1"), admission.place():
                pass
            assert admission.inside == 1
        assert admission.inside == 0

    asyncio.run(run())


def test_pending_bytes() -> None:
    pending = PendingBytes(10)
    pending.take(6)
    with pytest.raises(OverloadedError, match="hold 6 bytes and this one needs 5 more, allowed 10"):
        pending.take(5)
    pending.take(4)
    pending.give_back(10)
    assert pending.held == 0


# ---- hanging up -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def raw_post(base: str, body: bytes, declared: int | None = None) -> Iterator[socket.socket]:
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body) if declared is None else declared}\r\n\r\n"
        )
        sock.sendall(head.encode() + body)
        yield sock


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_cancels_within_a_second(base: str, engine: FakeEngine, stream: bool) -> None:
    engine.delay = 0.2
    body = json.dumps({"messages": user("w " * 200), "stream": stream}).encode()
    with raw_post(base, body) as sock:
        wait_until(lambda: engine.running == 1)
        if stream:
            assert sock.recv(100)
    assert wait_until(lambda: engine.running == 0) < 1.0
    assert engine.cancelled == 1
    wait_until(lambda: web.get(f"{base}/health").json()["in_flight"] == 0)
    engine.delay = 0
    healthy(base)


def test_hanging_up_again_and_again_leaks_nothing(engine: FakeEngine) -> None:
    engine.delay = 0.005
    with live(engine, max_running=2, max_waiting=2) as base:
        picture = image_part(solid("red"))
        for attempt in range(60):
            body = json.dumps({"messages": user(picture, "w " * 300), "stream": attempt % 2 == 0}).encode()
            with raw_post(base, body[: len(body) // 2] if attempt % 3 == 0 else body, len(body)) as sock:
                if attempt % 3 == 2 and attempt % 2 == 0:
                    sock.recv(10)
            wait_until(lambda: web.get(f"{base}/health").json()["in_flight"] == 0, 3)
        metrics = web.get(f"{base}/metrics").text
        assert "moonvit_pending_body_bytes 0.0" in metrics
        assert "moonvit_running 0.0" in metrics
        assert engine.running == 0
        healthy(base)


def test_hanging_up_while_waiting_for_a_turn(engine: FakeEngine) -> None:
    engine.delay = 0.3
    with live(engine, max_running=1) as base, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, base, user("a b c"))
        wait_until(lambda: engine.running == 1)
        with raw_post(base, json.dumps({"messages": user("never")}).encode()):
            wait_until(lambda: web.get(f"{base}/health").json()["in_flight"] == 2)
        assert wait_until(lambda: web.get(f"{base}/health").json()["in_flight"] == 1) < 1.0
        assert text_of(first.result()) == "a b c"
        assert len(engine.seen) == 1


def test_a_reader_that_stops_is_dropped(engine: FakeEngine) -> None:
    engine.script = [Delta(content="x" * 100_000) for _ in range(500)]
    with live(engine, write_timeout=0.3) as base:
        body = json.dumps({"messages": user("go"), "stream": True}).encode()
        with raw_post(base, body) as sock:
            assert sock.recv(10)
            assert wait_until(lambda: engine.running == 0) < 3
        assert engine.cancelled == 1
        engine.script = None
        healthy(base)


# ---- failures inside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure_before_the_first_piece(
    base: str, engine: FakeEngine, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine.fail_at = 0
    with caplog.at_level(logging.INFO):
        response = ask(base, user("a"), stream=stream)
    error = error_of(response, 500)
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert error["code"] == "internal_error"
    assert response.headers["x-request-id"] in error["message"]
    assert response.headers["x-request-id"] in caplog.text
    for failure, status in (
        (BudgetError("needs 5 bytes, allowed 4"), 400),
        (EngineError("stopped"), 503),
        (OverloadedError("full"), 429),
        (MemoryError(), 503),
    ):
        engine.failure = failure
        answer = ask(base, user("a"), stream=stream)
        error_of(answer, status)
        assert ("retry-after" in answer.headers) == (status in (429, 503))
    engine.fail_at = None
    healthy(base)


def test_engine_failure_in_mid_stream(base: str, engine: FakeEngine) -> None:
    engine.fail_at = 1
    events = ask(base, user("a b c"), stream=True).text.split("\n\n")
    assert json.loads(events[1][6:])["choices"][0]["delta"] == {"content": "a"}
    error = json.loads(events[2][6:])["error"]
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    assert events[3] == "data: [DONE]"
    assert 'moonvit_errors_total{code="internal_error"} 1.0' in web.get(f"{base}/metrics").text
    assert error_of(ask(base, user("a b c")), 500)


@pytest.mark.parametrize("script", [[], [Delta(content="cut")]])
def test_an_answer_without_an_end_is_not_passed_off_as_whole(
    base: str, engine: FakeEngine, script: list[Delta]
) -> None:
    engine.script = script
    assert error_of(ask(base, user("a")), 503)["code"] == "engine_unavailable"
    assert '"error"' in ask(base, user("a"), stream=True).text


# ---- what is logged -------------------------------------------------------------------------------------------------


def test_payloads_never_reach_the_log(base: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        picture = data_url(solid("red", (300, 300)) + b"tail" * 500)
        ask(base, user("SECRETWORDS", {"type": "image_url", "image_url": picture}), user="ann\nforged line")
        ask(base, user(f"look: {picture}"))
        ask(base, user({"type": "image_url", "image_url": "data:image/png;base64," + "Q" * 5000}))
        ask(base, user("a"), **{"K" * 3000: 1})
        web.get(f"{base}/" + "p" * 3000)
    ours = [record for record in caplog.records if record.name.startswith("moonvit")]
    text = "\n".join(record.getMessage() for record in ours)
    assert "SECRETWORDS" not in text
    assert "iVBOR" not in text
    assert "QQQQQQ" not in text
    assert "ann\\nforged" in text
    assert "sent a data URL as text" in text
    assert max(len(record.getMessage()) for record in ours) < 400
    assert not [record for record in caplog.records if "http_request" in record.name]


# ---- keys and other origins -----------------------------------------------------------------------------------------


def test_api_key(engine: FakeEngine) -> None:
    with live(engine, api_key="s3cret") as base:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "s3cret"},
            {"authorization": "Basic s3cret"},
        ):
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                response = web.get(base + path, headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert "s3cret" not in response.text
        good = {"authorization": "Bearer s3cret"}
        assert web.get(f"{base}/v1/models", headers=good).status_code == 200
        assert web.get(f"{base}/v1/models", headers={"authorization": "bearer s3cret"}).status_code == 200
        assert web.get(f"{base}/health").status_code == 200
        assert web.get(f"{base}/").status_code == 200


def test_cross_origin_calls_are_off_by_default(engine: FakeEngine) -> None:
    preflight = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-lang",
    }
    with live(engine) as base:
        assert web.options(f"{base}/v1/chat/completions", headers=preflight).status_code == 405
        response = web.get(f"{base}/v1/models", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers
    with live(FakeEngine(), cors_origins="https://a.example", api_key="k") as base:
        response = web.options(f"{base}/v1/chat/completions", headers=preflight)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
        other = web.options(f"{base}/v1/chat/completions", headers={**preflight, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


# ---- the page -------------------------------------------------------------------------------------------------------


def test_page_is_self_contained(shared: str) -> None:
    for path, kind in (("/", "text/html"), ("/static/style.css", "text/css"), ("/static/app.js", "javascript")):
        response = web.get(shared + path)
        assert response.status_code == 200
        assert kind in response.headers["content-type"]
        assert "default-src 'self'" in response.headers["content-security-policy"]
        without_namespaces = response.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in without_namespaces
        assert "https://" not in without_namespaces
    assert web.get(f"{shared}/static/../app.py").status_code == 404
    assert web.get(f"{shared}/static/%2e%2e/app.py").status_code == 404
    for sample in web.get(f"{shared}/samples").json()["data"]:
        Image.open(io.BytesIO(web.get(shared + sample["url"]).content)).verify()


# ---- settings -------------------------------------------------------------------------------------------------------


def test_settings_come_from_flags_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONVIT_MAX_IMAGES", "7")
    monkeypatch.setenv("MOONVIT_MEDIA_HOSTS", "a.example, b.example")
    monkeypatch.setenv("MOONVIT_MAX_BODY", "1MiB")
    settings = load_settings(max_images=None, port=9000)
    assert (settings.max_images, settings.port, settings.max_body) == (7, 9000, 1 << 20)
    assert settings.media_hosts == ("a.example", "b.example")
    assert load_settings(max_images=3).max_images == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"port": 70000}, "port = '70000'"),
        ({"max_body": "512MiB"}, "max_pending = 268435456 bytes is less than max_body = 536870912"),
        ({"api_key": " "}, "api_key is empty"),
        ({"api_key": "key\n"}, "api_key begins or ends with a blank"),
        ({"cors_origins": "*,https://a.example"}, "'*' and also"),
        ({"cors_origins": "a.example"}, "not an origin"),
        ({"media_hosts": "https://a.example"}, "not a host name"),
        ({"media_private": True}, "media_hosts is empty"),
        ({"colour": "red"}, "colour"),
        ({"log_level": "loud"}, "log_level"),
    ],
)
def test_contradictory_settings_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(**flags)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_misspelt_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONVIT_MAX_IMAGE", "7")
    with pytest.raises(ConfigError, match="did you mean MOONVIT_MAX_IMAGES"):
        load_settings()


def test_the_key_is_not_shown() -> None:
    assert "s3cret" not in repr(load_settings(api_key="s3cret"))


def test_every_setting_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    for name, field in Settings.model_fields.items():
        assert field.description
        assert f"| `{name}` | " in text
        assert f" | {field.description} |\n" in text


def test_the_engine_is_closed_at_the_end(engine: FakeEngine) -> None:
    with live(engine):
        assert not engine.closed
    assert engine.closed


# ---- picture addresses ----------------------------------------------------------------------------------------------


class Pictures(http.server.BaseHTTPRequestHandler):
    """Serves pictures well and badly; the path says how."""

    def do_GET(self) -> None:
        kind = self.path.strip("/").split("?")[0]
        if kind == "stall":
            time.sleep(1.5)
        if kind == "loop":
            self.send_response(302)
            self.send_header("Location", "/loop")
            self.end_headers()
            return
        if kind == "moved":
            self.send_response(302)
            self.send_header("Location", "/good")
            self.end_headers()
            return
        if kind == "missing":
            self.send_error(404)
            return
        body = b"<html>no</html>" if kind == "page" else solid("red")
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            if kind == "drip":
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.2)
            else:
                self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def pictures() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def address_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_addresses_are_not_fetched_by_default(base: str, pictures: str) -> None:
    error = error_of(ask(base, user(address_part(f"{pictures}/good?token=SECRET"))), 400)
    assert error["param"] == "messages[0].content[0]"
    assert error["code"] == "media_fetch_failed"
    assert "SECRET" not in error["message"]


def test_addresses_of_named_hosts(engine: FakeEngine, pictures: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        live(engine, media_hosts="127.0.0.1", media_private=True, media_timeout=0.6) as base,
    ):
        assert text_of(ask(base, user("a", address_part(f"{pictures}/good"), "b"))) == "a [red 56x56] b"
        assert text_of(ask(base, user(address_part(f"{pictures}/moved")))) == "[red 56x56]"
        for kind in ("stall", "drip", "loop", "missing", "page"):
            start = time.monotonic()
            error = error_of(ask(base, user("a", address_part(f"{pictures}/{kind}?token=SECRET"))), 400)
            assert error["param"] == "messages[0].content[1]"
            assert "SECRET" not in error["message"]
            assert time.monotonic() - start < 1.4
        assert error_of(ask(base, user(address_part("http://localhost.evil.example/good"))), 400)
        healthy(base)
    assert not [
        r for r in caplog.records if "SECRET" in r.getMessage() and not r.name.startswith(("httpcore", "hpack"))
    ]


def test_private_hosts_need_to_be_allowed(engine: FakeEngine, pictures: str) -> None:
    with live(engine, media_hosts="127.0.0.1") as base:
        error_of(ask(base, user(address_part(f"{pictures}/good"))), 400)


def test_slow_hosts_delay_nobody_else(engine: FakeEngine, pictures: str) -> None:
    settings = {"media_hosts": "127.0.0.1", "media_private": True, "media_timeout": 5, "max_running": 2}
    with (
        live(engine, **settings) as base,
        ThreadPoolExecutor(8) as pool,
        httpx.Client(verify=False, trust_env=False) as client,
    ):
        slow = [pool.submit(ask, base, user(address_part(f"{pictures}/stall"))) for _ in range(8)]
        wait_until(lambda: client.get(f"{base}/health").json()["in_flight"] == 8)
        waits = []
        while not any(future.done() for future in slow):
            start = time.monotonic()
            assert client.get(f"{base}/health").status_code == 200
            waits.append(time.monotonic() - start)
            start = time.monotonic()
            assert client.post(f"{base}/v1/chat/completions", json={"messages": user("quick")}).status_code == 200
            waits.append(time.monotonic() - start)
            time.sleep(0.05)
        assert len(waits) > 10
        assert sorted(waits)[int(len(waits) * 0.99) - 1] < 0.2
        assert all(text_of(future.result()) == "[red 56x56]" for future in slow)


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import moonvit.server

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(MissingDependencyError, match=r"needs uvicorn: pip install 'moonvit\[serve\]'"):
        importlib.reload(moonvit.server)
    monkeypatch.undo()
    importlib.reload(moonvit.server)


def test_every_setting_is_a_flag() -> None:
    typer_main = pytest.importorskip("typer.main")
    cli = pytest.importorskip("moonvit.cli")
    command = typer_main.get_command(cli.app).commands["serve"]
    names = {name for parameter in command.params for name in parameter.opts}
    assert {"--" + name.replace("_", "-") for name in Settings.model_fields} <= names
