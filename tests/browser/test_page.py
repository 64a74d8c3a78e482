"""The page in a real browser, against a fake engine behind a real server."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonvit.engines import Delta, Usage
from moonvit.errors import EngineError
from tests.fake_engine import FakeEngine
from tests.live import live, solid, wait_until, web

sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        if CHROMIUM is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium on this machine; set CHROMIUM to its path")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture()
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture()
def base(engine: FakeEngine) -> Iterator[str]:
    with live(engine) as address:
        yield address


@pytest.fixture()
def page(browser: Any, base: str) -> Iterator[Any]:
    yield from opened(browser, base)


def opened(browser: Any, base: str, **options: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    context.set_default_timeout(10_000)
    page = context.new_page()
    failures: list[str] = []
    outside: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((base, "data:")) else outside.append(request.url))
    page.goto(base)
    page.wait_for_selector("#model-name")
    yield page
    context.close()
    assert failures == []
    assert outside == []


DROP = """([encoded, name, type]) => {
  const bytes = Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type }));
  for (const kind of ["dragenter", "dragover", "drop"])
    document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
}"""

PASTE = """([encoded, name, type]) => {
  const bytes = Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type }));
  document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
}"""

PIXELS = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Map();
  for (let i = 0; i < data.length; i += 4) {
    const key = `${data[i]},${data[i + 1]},${data[i + 2]}`;
    seen.set(key, (seen.get(key) || 0) + 1);
  }
  return { width: canvas.width, height: canvas.height, colours: Object.fromEntries(seen) };
}"""


def drop(page: Any, content: bytes, name: str = "picture.png", script: str = DROP) -> None:
    page.evaluate(script, [base64.b64encode(content).decode(), name, "image/png"])


def answered(page: Any) -> str:
    page.wait_for_selector(".turn.assistant:last-child:not(.busy)")
    return str(page.inner_text(".turn.assistant:last-child .text"))


def until(page: Any, condition: str) -> None:
    """The page's own policy forbids the polling that the browser driver would inject."""
    wait_until(lambda: bool(page.evaluate(condition)))


def send(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.keyboard.press("Enter")


def test_the_model_is_named(page: Any) -> None:
    page.wait_for_selector("#dot.up")
    assert page.inner_text("#model-name") == "fake-vl"
    facts = page.inner_text("#model-facts")
    for fact in ("kimi-k2.5", "4,096 tokens", "12,345", "float32"):
        assert fact in facts


def test_drop_ask_and_watch(page: Any, engine: FakeEngine) -> None:
    engine.delay = 0.5
    drop(page, solid("red", (60, 90)), "sign.png")
    page.wait_for_selector(".picture canvas")
    caption = page.inner_text(".picture figcaption")
    for fact in ("sign.png", "60 × 90 px", "6 × 8 patches", "12 tokens"):
        assert fact in caption
    page.fill("#question", "what is this")
    until(page, "document.getElementById('tokens').textContent === '15'")
    assert page.inner_text("#image-tokens") == "12"
    assert page.inner_text("#memory") == "12 KiB"
    assert "KiB" in page.inner_text("#upload") or "B" in page.inner_text("#upload")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.turn.assistant .text')?.textContent.startsWith('[red 60x90]')")
    assert page.is_visible("#stop")
    assert page.query_selector(".turn.assistant.busy") is not None
    assert answered(page) == "[red 60x90] what is this"
    note = page.inner_text(".turn.assistant .note")
    assert "15 tokens in (12 from pictures), 4 out" in note
    assert page.is_hidden("#stop")
    assert page.query_selector(".turn.user canvas") is not None
    assert page.query_selector(".picture") is None


def test_the_grid_is_drawn_over_the_picture(page: Any) -> None:
    drop(page, solid("red", (60, 90)))
    page.wait_for_selector(".picture canvas")
    pixels = page.eval_on_selector(".picture canvas", PIXELS)
    assert abs(pixels["width"] / pixels["height"] - 84 / 112) < 0.02
    area = pixels["width"] * pixels["height"]
    colours = {tuple(map(int, key.split(","))): count for key, count in pixels["colours"].items()}
    red = colours[255, 0, 0] / area
    assert 0.3 < red < 60 * 90 / (84 * 112)  # less than the picture: lines cross it
    lines = sum(count for (r, g, b), count in colours.items() if b > 150 and g > 100)
    assert lines / area > 0.01
    black = colours.get((0, 0, 0), 0) / area
    assert 0.1 < black < 1 - 60 * 90 / (84 * 112)  # the padding is shown


def test_several_pictures_paste_choose_and_remove(page: Any, engine: FakeEngine) -> None:
    drop(page, solid("red"), "one.png")
    page.wait_for_selector(".picture:nth-of-type(1) canvas")
    drop(page, solid("white", (28, 28)), "two.png", PASTE)
    page.wait_for_selector(".picture:nth-of-type(2) canvas")
    page.set_input_files("#files", [{"name": "three.png", "mimeType": "image/png", "buffer": solid("black")}])
    page.wait_for_selector(".picture:nth-of-type(3) canvas")
    page.click("[aria-label='Remove one.png']")
    until(page, "document.querySelectorAll('.picture').length === 2")
    page.click("[aria-label='Enlarge two.png']")
    assert page.is_visible("#large-canvas")
    page.keyboard.press("Escape")
    send(page, "compare")
    assert answered(page) == "[white 28x28] [black 56x56] compare"
    assert len(engine.seen) == 1


def test_a_bad_file_is_told_with_the_servers_words(page: Any) -> None:
    drop(page, b"this is not a picture", "broken.png")
    page.wait_for_selector("#alert:not([hidden])")
    message = page.inner_text("#alert-text")
    assert message.startswith("broken.png: ")
    assert len(message) > len("broken.png: ") + 10
    assert page.query_selector(".picture") is None
    drop(page, solid("red"), "good.png")
    page.wait_for_selector(".picture canvas")
    assert page.is_hidden("#alert")
    send(page, "fine")
    assert answered(page) == "[red 56x56] fine"


def test_sample_pictures(page: Any, base: str) -> None:
    samples = web.get(f"{base}/samples").json()["data"]
    assert page.is_visible("#samples") == bool(samples)
    for number, sample in enumerate(samples, 1):
        page.click(f"#sample-list button[title='{sample['name']}']")
        page.wait_for_selector(f".picture:nth-of-type({number}) canvas")
    assert page.is_hidden("#alert")


def test_counting_while_an_answer_is_on_its_way(page: Any, engine: FakeEngine) -> None:
    engine.delay = 0.5
    send(page, "slow words")
    page.fill("#question", "what comes next")
    until(page, "document.getElementById('tokens').textContent === '5'")
    assert page.is_hidden("#alert")
    assert answered(page) == "slow words"
    until(page, "document.getElementById('tokens').textContent === '7'")
    assert page.input_value("#question") == "what comes next"


def test_a_failed_request_gives_the_question_back(page: Any, engine: FakeEngine) -> None:
    engine.fail_at, engine.failure = 1, EngineError("the engine caught fire")
    drop(page, solid("red"), "kept.png")
    page.wait_for_selector(".picture canvas")
    send(page, "why so serious")
    page.wait_for_selector("#alert:not([hidden])")
    assert "the engine caught fire" in page.inner_text("#alert-text")
    assert page.query_selector(".turn") is None
    assert page.input_value("#question") == "why so serious"
    assert "kept.png" in page.inner_text(".picture")
    engine.fail_at = None
    page.focus("#question")
    page.keyboard.press("Enter")
    assert answered(page) == "[red 56x56] why so serious"
    assert page.is_hidden("#alert")


def test_stop(page: Any, engine: FakeEngine) -> None:
    engine.delay = 0.1
    send(page, "word " * 200)
    until(page, "(document.querySelector('.turn.assistant .text')?.textContent.length || 0) > 15")
    page.click("#stop")
    assert wait_until(lambda: engine.running == 0) < 1.0
    text = answered(page)
    assert 0 < len(text) < 900
    assert page.inner_text(".turn.assistant .note") == "stopped"
    assert page.is_visible("#send")
    engine.delay = 0
    send(page, "again")
    until(page, "document.querySelectorAll('.turn').length === 4")
    assert answered(page) == "again"
    assert [message.role for message in engine.seen[-1].messages] == ["user", "assistant", "user"]


def test_conversation_is_kept_and_can_be_left(page: Any, engine: FakeEngine) -> None:
    drop(page, solid("red"))
    page.wait_for_selector(".picture canvas")
    send(page, "one")
    answered(page)
    send(page, "two")
    until(page, "document.querySelectorAll('.turn').length === 4")
    assert answered(page) == "two"
    history = engine.seen[1].messages
    assert [len(message.images) for message in history] == [1, 0, 0]
    assert history[1].parts[0].text == "[red 56x56] one"  # type: ignore[union-attr]
    page.click("#new")
    assert page.query_selector(".turn") is None
    assert page.is_visible("#empty")
    send(page, "three")
    answered(page)
    assert len(engine.seen[2].messages) == 1


def test_reasoning_is_folded(page: Any, engine: FakeEngine) -> None:
    engine.script = [
        Delta(reasoning="let me see"),
        Delta(content="yes"),
        Delta(finish_reason="stop", usage=Usage(3, 4, 0, 3)),
    ]
    send(page, "q")
    assert answered(page) == "yes"
    assert page.is_hidden(".turn.assistant details > div")
    page.click(".turn.assistant summary")
    assert page.inner_text(".turn.assistant details > div") == "let me see"


def test_an_answer_that_was_all_reasoning_is_explained_and_left_out(page: Any, engine: FakeEngine) -> None:
    engine.script = [Delta(reasoning="endless"), Delta(finish_reason="length", usage=Usage(3, 9, 0, 9))]
    send(page, "q")
    answered(page)
    assert "reached while thinking" in page.inner_text(".turn.assistant .note")
    engine.script = None
    send(page, "and now")
    until(page, "document.querySelectorAll('.turn').length === 4")
    assert answered(page) == "and now"
    assert len(engine.seen[1].messages) == 1


def test_options_reach_the_request(page: Any, engine: FakeEngine) -> None:
    page.click("#options summary")
    page.fill("#max-tokens", "2")
    page.fill("#temperature", "0")
    page.fill("#seed", "7")
    page.select_option("#thinking", "off")
    page.keyboard.press("Escape")
    send(page, "a b c d")
    assert answered(page) == "a b"
    assert "cut at the longest answer" in page.inner_text(".turn.assistant .note")
    sampling = engine.seen[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (2, 0.0, 7)
    assert engine.seen[0].thinking is False


def test_keyboard_alone(page: Any, engine: FakeEngine) -> None:
    page.wait_for_selector("#dot.up")
    page.focus("#question")
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    assert answered(page) == "line one line two"
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"choose", "send"} <= set(reached)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_phone_width_and_dark(browser: Any, base: str) -> None:
    for page in opened(browser, base, color_scheme="dark"):
        page.set_viewport_size({"width": 360, "height": 740})
        drop(page, solid("red", (200, 100)))
        page.wait_for_selector(".picture canvas")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.is_visible("#send")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, dark[4:-1].split(","))) < 200 < 600 < sum(map(int, light[4:-1].split(",")))
        page.reload()
        page.wait_for_selector("#dot.up")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light


def test_every_control_has_a_name(page: Any) -> None:
    drop(page, solid("red"))
    page.wait_for_selector(".picture canvas")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select, summary")]
        .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length || e.querySelector("img[alt]")))
        .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"


def test_a_key_is_asked_for(browser: Any, engine: FakeEngine) -> None:
    with live(engine, api_key="s3cret") as base:
        for page in opened(browser, base):
            page.wait_for_selector("#key-form:not([hidden])")
            assert "key" in page.inner_text("#alert-text")
            page.fill("#key", "s3cret")
            page.keyboard.press("Enter")
            page.wait_for_selector("#dot.up")
            assert page.is_hidden("#key-form")
            send(page, "hello")
            assert answered(page) == "hello"
            assert "s3cret" not in page.content()


def test_a_server_that_is_gone(browser: Any) -> None:
    with live(FakeEngine()) as base:
        pages = opened(browser, base)
        page = next(pages)
        page.wait_for_selector("#dot.up")
    send(page, "anyone there")
    page.wait_for_selector("#alert:not([hidden])")
    assert "cannot be reached" in page.inner_text("#alert-text")
    assert page.input_value("#question") == "anyone there"
    next(pages, None)
