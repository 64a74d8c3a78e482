"""The demo model in vLLM's server: what it answers, and that it answers the same with the plugin off."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image, ImageOps

from tests.vllm.serving import Server, part, sample, serving

FIVE = ("stop", "number", "shapes", "chart", "stop")
QUESTIONS = [
    (("stop",), "What does it say?", "stop"),
    (("number",), "What does it say?", "1729"),
    (("shapes",), "How many shapes are there?", "3"),
    (("shapes",), "What colour is the star?", "orange"),
    (("chart",), "What colour is the tallest bar?", "purple"),
    (("number", "stop"), "What does picture 2 say?", "stop"),
    (FIVE, "What does picture 1 say?", "stop"),
    (FIVE, "What colour is the star in picture 3?", "orange"),
]
"""Pictures, question and the right answer."""
UNSURE = [((), "What does it say?"), ((), "Hello"), (FIVE, "What does picture 4 say?"), (FIVE[::-1], "How many bars?")]
"""What the demo has no right answer to; it is only the same."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("ours") / "log", "--budget", "64MiB") as server:
        yield server


def ask(server: Server, names: tuple[str, ...], question: str) -> str:
    return server.text(*map(sample, names), question)


def test_it_says_that_the_plugin_is_active(ours: Server) -> None:
    [line, *_] = [line for line in ours.log.read_text().splitlines() if "moonvit" in line and "bounded" in line]
    assert "INFO" in line and "kimi-k2.5" in line


def test_the_model_has_the_name_that_moonvit_serves_it_by(ours: Server) -> None:
    headers = {"Authorization": "Bearer sesame"}
    [model] = httpx.get(f"{ours.base}/v1/models", headers=headers, trust_env=False).json()["data"]
    assert model["id"] == "moonvit-demo"
    assert httpx.get(f"{ours.base}/v1/models", trust_env=False).status_code == 401


@pytest.mark.parametrize(("names", "question", "expected"), QUESTIONS)
def test_answers_are_right(ours: Server, names: tuple[str, ...], question: str, expected: str) -> None:
    assert ask(ours, names, question) == expected


def test_order_of_pictures_decides(ours: Server) -> None:
    assert ask(ours, ("number", *FIVE[1:]), "What does picture 1 say?") == "1729"


def test_a_stream_says_the_same(ours: Server) -> None:
    for names, question, expected in QUESTIONS[1], QUESTIONS[-1]:
        pieces = ours.stream(*map(sample, names), question, stream_options={"include_usage": True})
        text = "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])
        assert text == expected
        assert len(pieces) > 2
        whole = ours.answer(*map(sample, names), question)["usage"]
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert pieces[-1]["usage"][count] == whole[count]


def test_text_alone_is_answered(ours: Server) -> None:
    answer = ours.answer("Hello")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens_details"]["multimodal_tokens"] is None


@pytest.mark.parametrize("broken", [b"no picture", b"", sample("stop")[:400]], ids=["text", "nothing", "half"])
def test_a_bad_picture_is_refused_and_the_server_goes_on(ours: Server, broken: bytes) -> None:
    response = ours.post([part(broken), part("What does it say?")])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert ask(ours, ("stop",), "What does it say?") == "stop"


def test_a_repeat_is_taken_from_the_prefix_cache(ours: Server) -> None:
    with Image.open(io.BytesIO(sample("number"))) as picture:
        changed = io.BytesIO()
        ImageOps.expand(picture.convert("RGB"), 28, "white").save(changed, "PNG")
    first, second = (ours.answer(changed.getvalue(), "What does it say?") for _ in range(2))
    counts = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert counts[0] == 0
    assert counts[1] > 0.7 * second["usage"]["prompt_tokens"]
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"] == "1729"


def test_requests_at_once_get_their_own_answers(ours: Server) -> None:
    jobs = [(names, question) for names, question, _ in QUESTIONS] * 2 + [((), "Hello")] * 2
    jobs = jobs[::3] + jobs[1::3] + jobs[2::3]  # of every kind at any moment
    alone = {job: ask(ours, *job) for job in set(jobs)}
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda job: ask(ours, *job), jobs))
    assert together == [alone[job] for job in jobs]


def test_stock_says_the_same(ours: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    jobs = [(names, question) for names, question, _ in QUESTIONS] + UNSURE
    mine = [ask(ours, *job) for job in jobs]
    with serving(tmp_path_factory.mktemp("stock") / "log", MOONVIT_VLLM="off") as stock:
        assert "bounded" not in stock.log.read_text()
        assert [ask(stock, *job) for job in jobs] == mine
