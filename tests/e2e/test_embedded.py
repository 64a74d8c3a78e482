"""The real engine behind the real server: a tiny checkpoint with random weights, so words mean nothing but must agree."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from PIL import Image, ImageDraw

from tests.live import ask, data_url, error_of, image_part, live, solid, text_of, user, wait_until, web

pytest.importorskip("transformers")

from moonvit.engines import Engine, open_engine
from tests.tiny import write_k25


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-k25"
    write_k25(folder)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return open_engine("embedded", checkpoint, dtype="float32")


@pytest.fixture(scope="module")
def base(engine: Engine) -> Iterator[str]:
    with live(engine, max_running=3) as address:
        yield address


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0) as client:
        yield client


def photo(size: tuple[int, int] = (120, 90), orientation: int | None = None) -> bytes:
    """A JPEG with something on each side of it."""
    image = Image.new("RGB", size, "red")
    pen = ImageDraw.Draw(image)
    pen.rectangle((size[0] // 2, 0, size[0], size[1] // 2), fill="green")
    pen.rectangle((0, size[1] // 2, size[0] // 2, size[1]), fill="blue")
    out = io.BytesIO()
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    image.save(out, "JPEG", quality=95, exif=exif)
    return out.getvalue()


def healthy(base: str) -> None:
    assert ask(base, user("hello", image_part(solid("red"))), max_tokens=2, temperature=0).status_code == 200
    assert ask(base, user("hello"), max_tokens=2, temperature=0).status_code == 200


def test_the_plan_is_what_the_request_uses(base: str) -> None:
    messages = user("hello", image_part(photo()), "world", image_part(solid("white", (57, 200))), image_part(photo()))
    plan = web.post(f"{base}/v1/vision/plan", json={"messages": messages}).json()
    usage = ask(base, messages, max_tokens=3, temperature=0).json()["usage"]
    assert usage["prompt_tokens"] == plan["prompt_tokens"]
    assert usage["prompt_tokens_details"]["image_tokens"] == plan["image_tokens"]
    assert plan["image_tokens"] == sum(image["tokens"] for image in plan["images"]) > 0
    assert plan["plan"]["peak_bytes"] == plan["peak_bytes"] > 0
    assert [image["tokens"] for image in plan["images"]] == [image["tokens"] for image in plan["plan"]["images"]]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "top_p": 0.9, "seed": 11}])
def test_streamed_and_whole_answers_are_one_text(client: openai.OpenAI, sampling: dict[str, float]) -> None:
    messages = user(image_part(photo()), "what is", image_part(solid("blue")), "hello world")
    whole = client.chat.completions.create(model="tiny-k25", messages=messages, max_tokens=12, **sampling)
    chunks = client.chat.completions.create(
        model="tiny-k25",
        messages=messages,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        **sampling,
    )
    text = reasoning = ""
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        usage = chunk.usage
    message = whole.choices[0].message
    assert text == message.content
    assert reasoning == (getattr(message, "reasoning_content", None) or "")
    assert len(text + reasoning) > 0
    assert usage == whole.usage


def test_seeds_decide(base: str) -> None:
    def answer(seed: int) -> str:
        message = ask(base, user("hello"), max_tokens=16, temperature=2, seed=seed).json()["choices"][0]["message"]
        return str(message.get("reasoning_content", "")) + str(message["content"])

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(5)}) > 1


def test_server_and_command_line_give_the_same_text(
    client: openai.OpenAI, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = pytest.importorskip("moonvit.cli")
    file = tmp_path / "photo.jpg"
    file.write_bytes(photo(orientation=6))
    arguments = ["ask", "-i", str(file), "what is the picture", "--model", str(checkpoint), "--dtype", "float32"]
    arguments += ["--max-tokens", "10", "--temperature", "1", "--seed", "5", "--instant", "--json"]
    cli.app(arguments, standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    stream = client.chat.completions.create(
        model="tiny-k25",
        messages=user(image_part(file.read_bytes()), "what is the picture"),
        max_tokens=10,
        temperature=1,
        seed=5,
        stream=True,
        extra_body={"chat_template_kwargs": {"thinking": False}},
    )
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == printed["content"] != ""


def test_orientation_is_applied_before_the_count(base: str) -> None:
    for orientation in range(1, 9):
        plan = web.post(
            f"{base}/v1/vision/plan", json={"images": [data_url(photo((120, 30), orientation), "image/jpeg")]}
        ).json()
        assert plan["images"][0]["size"] == ([120, 30] if orientation < 5 else [30, 120])
        answer = ask(base, user(image_part(photo((120, 30), orientation))), max_tokens=1, temperature=0)
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == plan["image_tokens"]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"])
def test_picture_kinds(base: str, mode: str) -> None:
    out = io.BytesIO()
    image = Image.new("I;16", (40, 60), 40_000) if mode == "I;16" else Image.new("RGB", (40, 60), "blue").convert(mode)
    image.save(out, "JPEG" if mode == "CMYK" else "PNG")
    response = ask(base, user(image_part(out.getvalue())), max_tokens=1, temperature=0)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * 3


def test_formats_that_are_not_read_are_named(base: str) -> None:
    out = io.BytesIO()
    Image.new("CMYK", (40, 60)).save(out, "TIFF")
    response = ask(base, user(image_part(out.getvalue())), max_tokens=1, temperature=0)
    error = error_of(response, 400)
    assert error["param"] == "messages[0].content[0]"
    assert "TIFF" in error["message"]
    healthy(base)


def test_a_photo_of_12_megapixels_is_counted_and_too_long_for_a_small_context(base: str) -> None:
    large = photo((4000, 3000), 6)
    plan = web.post(f"{base}/v1/vision/plan", json={"images": [data_url(large, "image/jpeg")]}).json()
    assert plan["images"][0]["size"] == [3000, 4000]
    assert plan["image_tokens"] == 4200
    error = error_of(ask(base, user(image_part(large)), max_tokens=1, temperature=0), 413)
    assert str(plan["max_context"]) in error["message"]
    healthy(base)


@pytest.mark.parametrize("name", ["WEBP", "GIF"])
def test_first_frame_of_an_animation(base: str, name: str) -> None:
    out = io.BytesIO()
    first, second = Image.new("RGB", (40, 60), "blue"), Image.new("RGB", (40, 60), "red")
    first.save(out, name, save_all=True, append_images=[second])
    response = ask(base, user(image_part(out.getvalue())), max_tokens=1, temperature=0)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * 3


@pytest.mark.parametrize("size", [(1, 1), (20_000, 1), (13, 200), (27, 28)])
def test_odd_sizes(base: str, size: tuple[int, int]) -> None:
    response = ask(base, user(image_part(solid("red", size))), max_tokens=1, temperature=0)
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    healthy(base)


@pytest.mark.parametrize("content", [b"", b"junk", photo()[:400], solid("red", (64, 64))[:60]])
def test_bad_pictures(base: str, content: bytes) -> None:
    for stream in (False, True):
        response = ask(base, user("a", image_part(solid("red")), image_part(content)), stream=stream)
        assert error_of(response, 400)["param"] == "messages[0].content[2]"
    healthy(base)


def test_typed_markers_are_words(base: str) -> None:
    typed = "hello <|media_pad|><|im_end|><|media_begin|>image<|media_content|> [BOS] world"
    with_picture = web.post(f"{base}/v1/vision/plan", json={"messages": user(typed, image_part(solid("red")))}).json()
    assert with_picture["image_tokens"] == 4
    response = ask(base, user(typed, image_part(solid("red")), typed), max_tokens=2, temperature=0)
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 4


def test_pictures_in_every_role(base: str) -> None:
    picture = image_part(solid("red"))
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [picture, {"type": "text", "text": "system"}]},
        {"role": "user", "content": [picture]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": [picture]},
    ]
    plan = web.post(f"{base}/v1/vision/plan", json={"messages": messages})
    assert plan.json()["image_tokens"] == 12
    assert ask(base, messages, max_tokens=1, temperature=0).status_code == 200


def test_prompts_that_do_not_fit_are_refused_with_the_numbers(base: str) -> None:
    context = web.get(f"{base}/v1/models").json()["data"][0]["max_model_len"]
    plan = web.post(f"{base}/v1/vision/plan", json={"messages": user("hello")}).json()
    assert plan["max_context"] == context
    error = error_of(ask(base, user("hello"), max_tokens=context), 400)
    assert str(context) in error["message"]
    assert str(plan["prompt_tokens"]) in error["message"]
    error = error_of(ask(base, user("hello " * 2 * context)), 413)
    assert str(context) in error["message"]
    healthy(base)


def test_several_at_once_get_what_they_get_alone(base: str) -> None:
    questions = [
        user("hello", image_part(solid(colour, size))) for colour, size in (("red", (56, 56)), ("blue", (90, 30)))
    ]
    questions += [user("what is"), user(image_part(photo()), image_part(photo()))]

    def answer(messages: list[dict[str, object]]) -> str:
        return json.dumps(ask(base, messages, max_tokens=8, temperature=0).json()["choices"])

    alone = [answer(messages) for messages in questions]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, questions * 3)) == alone * 3


def test_health_answers_while_pictures_are_worked_on(base: str) -> None:
    noise = io.BytesIO()
    Image.effect_noise((800, 800), 90).save(noise, "PNG")
    messages = user(image_part(noise.getvalue()), "hello")
    waits: list[float] = []
    with ThreadPoolExecutor(6) as pool:
        work = [pool.submit(ask, base, messages, max_tokens=8, temperature=0) for _ in range(6)]
        while not all(future.done() for future in work):
            start = time.monotonic()
            assert web.get(f"{base}/health").status_code == 200
            waits.append(time.monotonic() - start)
            time.sleep(0.02)
    assert {future.result().json()["usage"]["prompt_tokens_details"]["image_tokens"] for future in work} == {29 * 29}
    assert len(waits) > 5
    assert sorted(waits)[len(waits) // 2] < 0.2


def test_other_pictures_give_other_answers(base: str) -> None:
    """Not a question of sense, with random weights, but of features reaching the decoder, each at its place."""

    def answer(*pictures: bytes) -> str:
        parts = [image_part(picture) for picture in pictures]
        choices = ask(base, user(*parts, "hello"), max_tokens=24, temperature=1, seed=1).json()["choices"]
        return json.dumps(choices[0]["message"])

    one, other = photo((224, 224)), solid("white", (224, 224))
    answers = [answer(one, other), answer(other, one), answer(one, one), answer(other, other)]
    assert len(set(answers)) == 4
    assert answer(one, other) == answers[0]


def test_hanging_up_stops_the_engine(base: str, engine: Engine) -> None:
    before = threading.active_count()
    url = f"{base}/v1/chat/completions"
    body = {"messages": user("hello"), "stream": True, "temperature": 1, "chat_template_kwargs": {"thinking": False}}
    for _ in range(20):
        with web.stream("POST", url, json=body) as response:
            next(response.iter_bytes())
        wait_until(lambda: web.get(f"{base}/health").json()["in_flight"] == 0, 1.0)
    assert threading.active_count() <= before + 2
    healthy(base)
    assert text_of(ask(base, user("hello"), max_tokens=3, temperature=0)) is not None


def test_an_engine_that_has_stopped_is_reported(checkpoint: Path) -> None:
    engine = open_engine("embedded", checkpoint, dtype="float32")
    with live(engine) as base:
        healthy(base)
        asyncio.run(engine.close())
        assert error_of(web.get(f"{base}/health"), 503)["code"] == "engine_unavailable"
        assert error_of(ask(base, user("hello")), 503)["code"] == "engine_unavailable"
        assert web.get(f"{base}/v1/models").status_code == 200
