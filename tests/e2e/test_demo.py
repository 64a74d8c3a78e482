"""The shipped model behind the server: right answers, streamed, about the pictures the page offers."""

from __future__ import annotations

import io
from collections.abc import Iterator

import openai
import pytest
from PIL import Image

from moonvit.engines import default_model, open_engine
from tests.live import image_part, live, solid, user

SAMPLES = default_model() / "samples"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with live(open_engine("embedded")) as base, openai.OpenAI(base_url=f"{base}/v1", api_key="x") as client:
        yield client


def answer(client: openai.OpenAI, *content: object) -> str:
    chunks = client.chat.completions.create(
        model="moonvit-demo",
        messages=user(*content),
        temperature=0,
        max_tokens=40,
        stream=True,
        extra_body={"chat_template_kwargs": {"thinking": False}},
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return text.strip().strip(".").lower()


def test_it_is_small_enough_to_ship() -> None:
    files = [path for path in default_model().rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) <= 24_000_000


@pytest.mark.parametrize(
    ("picture", "question", "expected"),
    [
        ("stop", "What does it say?", "stop"),
        ("number", "What does it say?", "1729"),
        ("shapes", "How many shapes are there?", "3"),
        ("shapes", "What colour is the star?", "orange"),
        ("chart", "What colour is the tallest bar?", "purple"),
    ],
)
def test_samples_are_answered_right(client: openai.OpenAI, picture: str, question: str, expected: str) -> None:
    assert answer(client, image_part((SAMPLES / f"{picture}.png").read_bytes()), question) == expected


def test_order_of_pictures_decides(client: openai.OpenAI) -> None:
    stop, number = (image_part((SAMPLES / f"{name}.png").read_bytes()) for name in ("stop", "number"))
    assert answer(client, stop, number, "What does picture 2 say?") == "1729"
    assert answer(client, number, stop, "What does picture 2 say?") == "stop"


def test_a_blank_picture_is_not_answered_from_memory(client: openai.OpenAI) -> None:
    assert answer(client, image_part(solid("white", (224, 140))), "What does it say?") != "stop"


def test_a_photo_of_12_megapixels_is_answered(client: openai.OpenAI) -> None:
    large = Image.new("RGB", (4000, 3000), "white")
    with Image.open(SAMPLES / "stop.png") as stop:
        large.paste(stop.convert("RGB").resize((2000, 2000 * stop.height // stop.width)), (900, 700))
    out = io.BytesIO()
    large.save(out, "JPEG")
    assert answer(client, image_part(out.getvalue()), "What does it say?")
    stop = image_part((SAMPLES / "stop.png").read_bytes())
    assert answer(client, stop, "What does it say?") == "stop"
