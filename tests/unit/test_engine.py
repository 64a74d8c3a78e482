"""The embedded engine: the right numbers, and good manners between requests."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from moonvit.checkpoint import read_config
from moonvit.encoder import Features, VisionEncoder
from moonvit.engines import Delta, GenerateRequest, Sampling, Usage, default_model, open_engine
from moonvit.engines.embedded import EmbeddedEngine
from moonvit.errors import (
    BudgetError,
    ConfigError,
    EngineError,
    ImageError,
    MoonvitError,
    NonFiniteError,
    OverloadedError,
    PromptError,
    RequestError,
    TooLargeError,
)
from moonvit.prompts import Prompt, chat_format
from moonvit.prompts.messages import ImagePart, Message, TextPart
from moonvit.sources import FetchPolicy
from tests import tiny


def noise(seed: int, size: tuple[int, int] = (60, 90)) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def ask(*parts: Any, thinking: bool | None = None, **sampling: Any) -> GenerateRequest:
    made = tuple(
        TextPart(part) if isinstance(part, str) else ImagePart(part, f"part {n}") for n, part in enumerate(parts)
    )
    return GenerateRequest((Message("user", made),), Sampling(**sampling), thinking=thinking)


async def collect(engine: EmbeddedEngine, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(request)]


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.reasoning + delta.content for delta in deltas)


def usage(deltas: Sequence[Delta]) -> Usage:
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    found = deltas[-1].usage
    assert found is not None
    return found


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("k25")
    tiny.write_k25(folder)
    return folder


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    tiny.write_vl(folder)
    return folder


def opened(folder: Path, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine.from_pretrained(folder, **{"dtype": "float32", **options})


@pytest.fixture(scope="module")
def engine(k25: Path) -> Iterator[EmbeddedEngine]:
    made = opened(k25)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def theirs(k25: Path) -> Any:
    """Transformers' own Kimi-K2.5, from the same files."""
    from transformers import AutoModelForImageTextToText

    model, report = AutoModelForImageTextToText.from_pretrained(k25, dtype="float32", output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


# ---- numbers --------------------------------------------------------------------------------------------------------


def rendered(engine: EmbeddedEngine, pictures: Sequence[Image.Image]) -> tuple[Prompt, list[torch.Tensor], list[Any]]:
    """A prompt with some pictures between words, their features, and their patches."""
    from moonvit.preprocess import patches_from

    patches = [patches_from(picture, engine.encoder.config.rule) for picture in pictures]
    parts: list[Any] = ["what is"]
    for picture in pictures:
        parts += [picture, " hello world"]
    prompt = engine.prompts.render(ask(*parts).messages, [one.grid.tokens for one in patches])
    features = [one.tensor for one in engine.encoder.encode(list(pictures))] if pictures else []
    return prompt, features, patches


def their_inputs(prompt: Prompt, patches: Sequence[Any]) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.tensor([prompt.ids])}
    if patches:
        packed = torch.cat([torch.from_numpy(one.patches_LC) for one in patches]).float()
        inputs["pixel_values"] = ((packed / 255 - 0.5) * 2).view(-1, 3, 14, 14)
        inputs["image_grid_thw"] = torch.tensor([tuple(one.grid) for one in patches])
    return inputs


def all_logits(engine: EmbeddedEngine, prompt: Prompt, features: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits (S, V) of the whole sequence in one pass, without a cache."""
    embeddings = engine._embed(prompt, features, 0, len(prompt.ids))
    with torch.inference_mode():
        logits: torch.Tensor = engine.decoder.model(inputs_embeds=embeddings[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("sizes", [[], [(60, 90)], [(28, 28), (200, 57), (90, 60)]], ids=["text", "one", "three"])
def test_logits_are_those_of_transformers(engine: EmbeddedEngine, theirs: Any, sizes: list[tuple[int, int]]) -> None:
    pictures = [noise(seed, size) for seed, size in enumerate(sizes)]
    prompt, features, patches = rendered(engine, pictures)
    with torch.inference_mode():
        expected = theirs(**their_inputs(prompt, patches)).logits[0]
    found = all_logits(engine, prompt, features)
    assert float(expected.abs().max()) > 1
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("prefill", [1, 3, 16, 10_000])
def test_chunks_of_the_prompt_and_single_tokens_give_the_logits_of_one_pass(
    engine: EmbeddedEngine, prefill: int
) -> None:
    prompt, features, _ = rendered(engine, [noise(0), noise(1, (150, 70))])
    expected = all_logits(engine, prompt, features)
    cache, length = engine.decoder.new_cache(), len(prompt.ids)
    for start in range(0, length, prefill):
        piece = engine._embed(prompt, features, start, min(start + prefill, length))
        found = engine.decoder.next_logits(piece, cache)
        assert float((found - expected[min(start + prefill, length) - 1]).abs().max()) < 1e-4, start
    assert cache.get_seq_length() == length


def test_greedy_answers_are_those_of_transformers(k25: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a chunked prompt: the picture is cut in two by the end of a chunk."""
    for prefill in (7, 512):
        engine = opened(k25, prefill=prefill)
        picked: list[int] = []
        parser = type(engine.prompts.parser())
        feed = parser.feed

        def watched(self: Any, token: int, feed: Any = feed, picked: list[int] = picked) -> Any:
            picked.append(token)
            return feed(self, token)

        monkeypatch.setattr(parser, "feed", watched)
        picture = noise(3)
        request = ask("what is", picture, " hello world", max_tokens=24)
        asyncio.run(collect(engine, request))
        monkeypatch.undo()
        prompt, _, patches = rendered(engine, [picture])
        with torch.inference_mode():
            whole = theirs.generate(
                **their_inputs(prompt, patches),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=sorted(engine.prompts.stop_ids),
                pad_token_id=0,
            )
        assert picked == whole[0, len(prompt.ids) :].tolist()
        assert len(set(picked)) > 3
        asyncio.run(engine.close())


def test_kimi_vl_is_the_same_arithmetic_under_other_names(vl: Path, tmp_path: Path) -> None:
    """Its weights under K2.5's names, run by transformers, give the logits of our Kimi-VL."""
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    engine = opened(vl)
    assert engine.info.family == "kimi-vl"
    names = {tiny.VL_PROJECTOR[part]: tiny.K25_PROJECTOR[part] for part in tiny.K25_PROJECTOR}
    tensors: tiny.Tensors = {}
    for file in vl.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            stem, _, end = name.rpartition(".")
            tensors[f"{names.get(stem, stem)}.{end}"] = tensor
    text_config = tiny.vl_config()["text_config"]
    tiny.write_json(tmp_path / "config.json", tiny.k25_config() | {"text_config": text_config})
    tiny.write_weights(tmp_path, tensors)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="float32").eval()
    prompt, features, patches = rendered(engine, [noise(0), noise(1, (28, 150))])
    with torch.inference_mode():
        expected = model(**their_inputs(prompt, patches)).logits[0]
    assert float((all_logits(engine, prompt, features) - expected).abs().max()) < 1e-4
    deltas = asyncio.run(collect(engine, ask("what is", noise(0), max_tokens=8)))
    assert usage(deltas).completion_tokens == 8
    asyncio.run(engine.close())


def test_packed_experts_answer_like_plain_ones(tmp_path: Path) -> None:
    plain = tiny.write_k25(tmp_path / "packed", int4=True, seed=5)
    tiny.write_k25(tmp_path / "plain", seed=5)
    tiny.write_weights(tmp_path / "plain", plain)
    answers = []
    for name in ("packed", "plain"):
        engine = opened(tmp_path / name)
        answers.append(text(asyncio.run(collect(engine, ask(noise(1), "hello", max_tokens=12)))))
        asyncio.run(engine.close())
    assert answers[0] == answers[1] != ""


def test_pictures_matter_and_so_does_their_order(engine: EmbeddedEngine) -> None:
    one, two = noise(1), noise(2)
    last = []
    for pictures in ([one, two], [two, one], [one, one]):
        prompt, features, _ = rendered(engine, pictures)
        last.append(all_logits(engine, prompt, features)[-1])
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in ((last[0], last[1]), (last[0], last[2])))


def test_a_placeholder_is_never_looked_up(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, features, _ = rendered(engine, [noise(0), noise(1)])
    expected = all_logits(engine, prompt, features)
    looked_up: list[int] = []
    embed = engine.decoder.embed
    monkeypatch.setattr(engine.decoder, "embed", lambda ids: (looked_up.extend(ids), embed(ids))[1])
    ids = list(prompt.ids)
    for wild, (start, length) in zip((engine.decoder.vocabulary, 2**31 - 1), prompt.spans, strict=True):
        ids[start : start + length] = [wild] * length
    wild_prompt = replace(prompt, ids=ids)
    assert torch.equal(all_logits(engine, wild_prompt, features), expected)
    assert len(looked_up) == len(ids) - sum(length for _, length in prompt.spans)
    # Nor is it ever generated: as the next input it would be looked up.
    assert engine.prompts.placeholder_id not in looked_up


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_float32(k25: Path, engine: EmbeddedEngine, dtype: str) -> None:
    half = opened(k25, dtype=dtype)
    assert half.info.details["dtype"] == dtype
    prompt, features, _ = rendered(engine, [noise(0)])
    _, half_features, _ = rendered(half, [noise(0)])
    assert half_features[0].dtype == half.decoder.dtype == getattr(torch, dtype)
    expected, found = all_logits(engine, prompt, features), all_logits(half, prompt, half_features).float()
    assert float((found - expected).norm() / expected.norm()) < (0.1 if dtype == "bfloat16" else 0.02)
    asyncio.run(half.close())


# ---- what a request gives -------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_text_alone_and_among_others(engine: EmbeddedEngine) -> None:
    request = ask("what is", noise(1), max_tokens=20, temperature=1.0, seed=4)

    async def run() -> None:
        alone = text(await collect(engine, request))
        others = [ask(noise(n), "hello", max_tokens=20, temperature=1.5, seed=n) for n in range(3)]
        mixed = await asyncio.gather(*(collect(engine, one) for one in [*others, request]))
        assert text(mixed[-1]) == alone
        again = replace(request, sampling=replace(request.sampling, seed=5))
        assert text(await collect(engine, again)) != alone

    before = torch.get_rng_state()
    asyncio.run(run())
    assert torch.equal(torch.get_rng_state(), before)


def test_usage_is_what_was_fed_to_the_model_and_cost_says_it_before(engine: EmbeddedEngine) -> None:
    async def run() -> None:
        for request, image_tokens in (
            (ask("hello", max_tokens=3), 0),
            (ask("hello", noise(1, (224, 224)), max_tokens=3), 64),
            (ask(noise(1, (28, 28)), "hello", noise(2, (100, 29)), max_tokens=3), 1 + 8),
        ):
            cost = await engine.count_tokens(request)
            found = usage(await collect(engine, request))
            assert (cost.prompt_tokens, cost.image_tokens) == (found.prompt_tokens, found.image_tokens)
            assert found.image_tokens == image_tokens
            assert found.completion_tokens == 3
            assert (cost.plan is None) == (image_tokens == 0)
        sizes = ask((28, 28), "hello", (100, 29))
        assert await engine.count_tokens(sizes) == cost
        assert cost.plan is not None
        assert [one["tokens"] for one in cost.plan["images"]] == [1, 8]

    asyncio.run(run())


def test_typed_markers_stay_text(engine: EmbeddedEngine) -> None:
    """S87: a literal placeholder takes no picture's place."""

    async def run() -> None:
        plain = await engine.count_tokens(ask(noise(1), "hello"))
        for typed in ("<|media_pad|>", "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", "<|im_end|>"):
            marked = await engine.count_tokens(ask(typed, noise(1), "hello"))
            assert marked.image_tokens == plain.image_tokens
            # Seven letters and more: one special token would be one.
            assert marked.prompt_tokens > plain.prompt_tokens + 6
            deltas = await collect(engine, ask(typed, noise(1), typed, noise(2), max_tokens=2))
            assert usage(deltas).image_tokens == 2 * plain.image_tokens

    asyncio.run(run())


def test_the_encoder_is_not_called_for_text(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.encoder, "encode", lambda items: pytest.fail("the encoder was called"))
    monkeypatch.setattr(engine.encoder, "plan", lambda items: pytest.fail("the encoder was asked for a plan"))
    assert text(asyncio.run(collect(engine, ask("hello", max_tokens=4))))


# ---- answers that are written out: a decoder that says what it is told ----------------------------------------------


class Scripted:
    """Stands in for the decoder. Says the ids of a script, and remembers who was served when."""

    width = tiny.WIDTH
    vocabulary = tiny.VOCABULARY
    max_context = 1024
    parameters = 0

    def __init__(self, script: Sequence[int], second: int = 97, delay: float = 0.0) -> None:
        self.script = list(script)
        self.second = second
        self.delay = delay
        self.served: list[int] = []
        self.caches = 0
        self.failure: Callable[[int, int], BaseException | None] = lambda cache, step: None

    def new_cache(self) -> list[int]:
        self.caches += 1
        return [self.caches - 1, -1]

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.zeros(len(ids), self.width)

    def extend(self, embeddings: torch.Tensor, cache: list[int]) -> None:
        time.sleep(self.delay)
        self.served.append(cache[0])

    def next_logits(self, embeddings: torch.Tensor, cache: list[int]) -> torch.Tensor:
        time.sleep(self.delay)
        self.served.append(cache[0])
        cache[1] += 1
        error = self.failure(cache[0], cache[1])
        if error is not None:
            raise error
        logits = torch.zeros(self.vocabulary)
        logits[self.second] = 1.0
        logits[self.script[cache[1] % len(self.script)]] = 2.0
        return logits


@pytest.fixture(scope="module")
def parts(k25: Path) -> tuple[VisionEncoder, Any]:
    return VisionEncoder.from_pretrained(k25, dtype="float32"), chat_format(read_config(k25)[1], k25)


@pytest.fixture
def scripted(parts: tuple[VisionEncoder, Any]) -> Iterator[Callable[..., EmbeddedEngine]]:
    made: list[EmbeddedEngine] = []

    def make(*script: str | bytes | int, **options: Any) -> EmbeddedEngine:
        ids: list[int] = []
        for piece in script:
            if isinstance(piece, int):
                ids.append(piece)
            elif isinstance(piece, bytes):
                ids += piece  # bytes are ids 0 to 255
            else:
                ids += parts[1].tokenizer.encode_text(piece)
        decoder = Scripted(ids, delay=options.pop("delay", 0.0))
        made.append(EmbeddedEngine(parts[0], decoder, parts[1], name="scripted", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.close())


THINK, THINK_END, END = tiny.special("<think>"), tiny.special("</think>"), tiny.special("<|im_end|>")
CALLS, CALLS_END = tiny.special("<|tool_calls_section_begin|>"), tiny.special("<|tool_calls_section_end|>")
CALL, ARGUMENTS, CALL_END = (
    tiny.special("<|tool_call_begin|>"),
    tiny.special("<|tool_call_argument_begin|>"),
    tiny.special("<|tool_call_end|>"),
)


def answer(engine: EmbeddedEngine, request: GenerateRequest) -> tuple[str, str, Delta]:
    deltas = asyncio.run(collect(engine, request))
    reasoning, content = ("".join(getattr(delta, name) for delta in deltas) for name in ("reasoning", "content"))
    return reasoning, content, deltas[-1]


def test_thinking_content_and_the_end(scripted: Any) -> None:
    engine = scripted("so it is red", THINK_END, "red", END)
    reasoning, content, last = answer(engine, ask("hello"))
    assert (reasoning, content, last.finish_reason) == ("so it is red", "red", "stop")
    spent = len(engine.decoder.script)
    assert last.usage is not None
    assert last.usage.completion_tokens == spent
    assert last.usage.reasoning_tokens == spent - len(engine.prompts.tokenizer.encode_text("red")) - 1


def test_an_instant_answer_has_no_thinking(scripted: Any) -> None:
    reasoning, content, last = answer(scripted("red", END), ask("hello", thinking=False))
    assert (reasoning, content, last.finish_reason) == ("", "red", "stop")
    assert last.usage is not None
    assert last.usage.reasoning_tokens == 0


def test_thinking_that_uses_up_the_budget_says_so(scripted: Any) -> None:
    """S35: the text is empty, and the usage says why."""
    reasoning, content, last = answer(scripted("hm "), ask("hello", max_tokens=512))
    assert content == ""
    assert reasoning
    assert last.finish_reason == "length"
    assert last.usage is not None
    assert last.usage.reasoning_tokens == last.usage.completion_tokens == 512


def test_tool_calls(scripted: Any) -> None:
    engine = scripted(
        "look", CALLS, CALL, "functions.see:3", ARGUMENTS, '{"x": 1}', CALL_END, CALL, "functions.go:4", ARGUMENTS, CALL_END,
        CALLS_END, END,
    )  # fmt: skip
    deltas = asyncio.run(collect(engine, ask("hello")))
    pieces = [call for delta in deltas for call in delta.tool_calls]
    found: dict[int, list[Any]] = {}
    for piece in pieces:
        entry = found.setdefault(piece.index, [None, None, ""])
        entry[0], entry[1] = entry[0] or piece.id, entry[1] or piece.name
        entry[2] += piece.arguments
    assert found == {0: ["functions.see:3", "see", '{"x": 1}'], 1: ["functions.go:4", "go", "{}"]}
    assert deltas[-1].finish_reason == "tool_calls"
    assert "".join(delta.reasoning for delta in deltas) == "look"
    assert not any(delta.content for delta in deltas)


def test_characters_come_whole(scripted: Any) -> None:
    engine = scripted(THINK_END, "é漢😀".encode(), END)
    deltas = asyncio.run(collect(engine, ask("hello")))
    assert [delta.content for delta in deltas if delta.content] == ["é", "漢", "😀"]
    cut, content, last = answer(scripted(THINK_END, "a😀".encode()[:4]), ask("hello", max_tokens=5))
    assert (cut, last.finish_reason) == ("", "length")
    assert content.rstrip("\ufffd") == "a"


def test_stop_strings_end_the_content_wherever_tokens_are_cut(scripted: Any) -> None:
    engine = scripted("a STOP in thinking", THINK_END, *(bytes([byte]) for byte in b"one STOP two"), END)
    deltas = asyncio.run(collect(engine, ask("hello", stop=(" STOP", "zzz"))))
    assert "".join(delta.reasoning for delta in deltas) == "a STOP in thinking"
    assert "".join(delta.content for delta in deltas) == "one"
    assert deltas[-1].finish_reason == "stop"
    assert usage(deltas).completion_tokens == len(engine.decoder.script) - len(b" two") - 1
    # What only looked like one is content in the end.
    _, content, last = answer(scripted("a ST", END), ask("hello", thinking=False, stop=(" STOP",)))
    assert (content, last.finish_reason) == ("a ST", "stop")
    _, content, last = answer(scripted("a STa ST"), ask("hello", thinking=False, stop=(" STOP",), max_tokens=4))
    assert (content, last.finish_reason) == ("a ST", "length")


def test_a_stop_string_before_a_tool_call_hides_the_call(scripted: Any) -> None:
    engine = scripted("now", CALLS, CALL, "functions.see:0", ARGUMENTS, "{}", CALL_END, CALLS_END, END)
    deltas = asyncio.run(collect(engine, ask("hello", thinking=False, stop=("ow",))))
    assert text(deltas) == "n"
    assert deltas[-1].finish_reason == "stop"
    assert not any(delta.tool_calls for delta in deltas)


def test_max_tokens_and_the_end_at_the_last_token(scripted: Any) -> None:
    for limit, reason in ((1, "length"), (3, "length"), (4, "stop"), (9, "stop")):
        deltas = asyncio.run(collect(scripted(b"abc", END), ask("hello", thinking=False, max_tokens=limit)))
        assert text(deltas) == "abc"[:limit]
        assert (deltas[-1].finish_reason, usage(deltas).completion_tokens) == (reason, min(limit, 4))


@pytest.mark.parametrize("source", ["generation_config.json", "config.json", "format"])
def test_every_end_token_that_a_file_names_ends_the_answer(source: str, k25: Path, scripted: Any) -> None:
    ids = {"generation_config.json": tiny.BASE + 1, "config.json": tiny.BASE + 1, "format": END}
    raw = json.loads((k25 / "config.json").read_text())
    assert raw["eos_token_id"] == tiny.BASE + 1
    deltas = asyncio.run(collect(scripted(b"ab", ids[source], b"cd"), ask("hello", thinking=False, max_tokens=9)))
    assert (text(deltas), deltas[-1].finish_reason) == ("ab", "stop")


def test_a_placeholder_is_never_generated(scripted: Any) -> None:
    engine = scripted(tiny.special("<|media_pad|>"))
    _, content, _ = answer(engine, ask("hello", thinking=False, max_tokens=3))
    assert content == "aaa"


def test_without_max_tokens_the_context_is_filled(scripted: Any) -> None:
    engine = scripted(b"a")
    deltas = asyncio.run(collect(engine, ask("hello", thinking=False)))
    found = usage(deltas)
    assert found.prompt_tokens + found.completion_tokens == engine.info.max_context
    assert deltas[-1].finish_reason == "length"


# ---- refusals, before any work --------------------------------------------------------------------------------------


def test_what_does_not_fit_the_context_is_refused_with_both_numbers(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted(b"a")
    monkeypatch.setattr(engine.encoder, "encode", lambda items: pytest.fail("work was done"))
    large = noise(1, (1024, 1024))  # 1369 tokens
    cost = asyncio.run(engine.count_tokens(ask(large)))
    with pytest.raises(TooLargeError, match=rf"{cost.prompt_tokens} tokens; the context of scripted is 1024"):
        asyncio.run(collect(engine, ask(large)))
    with pytest.raises(TooLargeError, match=r"the context of scripted is 1024"):
        asyncio.run(collect(engine, ask("z" * 5000)))
    prompt = asyncio.run(engine.count_tokens(ask("hello"))).prompt_tokens
    with pytest.raises(RequestError, match=rf"{prompt} tokens and max_tokens = 1024 make {prompt + 1024}.*1024"):
        asyncio.run(collect(engine, ask("hello", max_tokens=1024)))
    assert engine.decoder.served == []


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ask("hello", max_tokens=0), RequestError, "max_tokens = 0"),
        (ask("hello", top_p=2.0), RequestError, "top_p = 2.0"),
        (GenerateRequest(()), PromptError, "messages is empty"),
        (GenerateRequest((Message("user", (TextPart("a"),)), Message("user"))), PromptError, "messages[1]"),
        (ask(b"not a picture", "hello"), ImageError, "image 0"),
        (ask(noise(0), b"not a picture", "hello"), ImageError, "image 1"),
        (ask("/nowhere/at/all.png", (5, 5)), RequestError, "(5, 5) is the size of a picture"),
    ],
)
def test_bad_requests_are_refused_and_good_ones_still_work(
    engine: EmbeddedEngine, request_: GenerateRequest, error: type[MoonvitError], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        asyncio.run(collect(engine, request_))
    if error is ImageError:
        assert caught.value.param == f"part {message[-1]}"
    assert text(asyncio.run(collect(engine, ask("hello", max_tokens=3))))


def test_a_picture_over_the_budget_is_refused(k25: Path) -> None:
    small = opened(k25, budget="600KiB")
    assert text(asyncio.run(collect(small, ask(noise(0, (56, 56)), "hello", max_tokens=2))))
    with pytest.raises(BudgetError):
        asyncio.run(collect(small, ask(noise(0, (56, 56)), noise(0, (1100, 700)), "hello", max_tokens=2)))
    asyncio.run(small.close())


def test_addresses_are_refused_unless_allowed(engine: EmbeddedEngine) -> None:
    part = ImagePart("http://127.0.0.1:9/x.png", "here")
    with pytest.raises(ImageError) as caught:
        asyncio.run(collect(engine, GenerateRequest((Message("user", (part,)),))))
    assert (caught.value.status, caught.value.param) == (400, "here")


def test_an_address_is_asked_once(k25: Path) -> None:
    """Asked twice it could give two pictures, one to count and one to look at."""
    asked: list[str] = []
    out = io.BytesIO()
    noise(7).save(out, "PNG")

    class Host(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(out.tell()))
            self.end_headers()
            self.wfile.write(out.getvalue())

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    host = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    thread = threading.Thread(target=host.serve_forever, daemon=True)
    thread.start()
    made = opened(k25, fetch=FetchPolicy(("127.0.0.1",), allow_private=True))
    try:
        part = ImagePart(f"http://127.0.0.1:{host.server_port}/x.png")
        request = GenerateRequest((Message("user", (part,)),), Sampling(max_tokens=10))
        found = text(asyncio.run(collect(made, request)))
        assert asked == ["/x.png"]
        assert found == text(asyncio.run(collect(made, ask(out.getvalue(), max_tokens=10))))
    finally:
        asyncio.run(made.close())
        host.shutdown()
        host.server_close()
        thread.join()


def test_files_addresses_and_bytes_are_the_same_picture(engine: EmbeddedEngine, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    noise(7).save(file)
    content = file.read_bytes()
    data = "data:image/png;base64," + base64.b64encode(content).decode()
    sources: list[Any] = [file, content, data, noise(7)]
    made = [GenerateRequest((Message("user", (ImagePart(source),)),), Sampling(max_tokens=10)) for source in sources]
    answers = {text(asyncio.run(collect(engine, request))) for request in made}
    assert len(answers) == 1


# ---- requests beside each other -------------------------------------------------------------------------------------


def test_requests_take_turns_a_step_at_a_time(scripted: Any) -> None:
    """A long prompt delays the tokens of others by one chunk, never by all of them."""
    engine = scripted(b"a", prefill=16, delay=0.002)

    async def run() -> None:
        short = asyncio.create_task(collect(engine, ask("hello", max_tokens=60)))
        while len(engine.decoder.served) < 5:
            await asyncio.sleep(0.001)
        long = asyncio.create_task(collect(engine, ask("z" * 600, max_tokens=10)))
        await asyncio.gather(short, long)

    asyncio.run(run())
    served = engine.decoder.served
    both = served[served.index(1) : max(i for i, who in enumerate(served) if who == 1) + 1]
    assert both.count(1) >= 600 // 16 + 10
    assert all(one != two for one, two in pairwise(both)), both


def test_only_so_many_are_active_and_only_so_many_wait(scripted: Any) -> None:
    engine = scripted(b"a", max_active=2, max_waiting=2, delay=0.002)

    async def run() -> None:
        running = []
        for number in range(4):
            running.append(asyncio.create_task(collect(engine, ask("hello", max_tokens=30))))
            while number < 2 and engine.decoder.caches <= number:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert engine.decoder.caches == 2
        with pytest.raises(OverloadedError, match="2 requests wait already, allowed 2"):
            await collect(engine, ask("hello", max_tokens=30))
        assert all(len(text(one)) == 30 for one in await asyncio.gather(*running))
        # First come, first served.
        firsts = [engine.decoder.served.index(number) for number in range(4)]
        assert firsts == sorted(firsts)

    asyncio.run(run())


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_closing_the_iterator_ends_the_work_within_a_token(scripted: Any, pieces: int) -> None:
    engine = scripted(b"a", delay=0.01)

    async def run() -> None:
        async with aclosing(engine.generate(ask("hello", thinking=False))) as deltas:
            for _ in range(pieces):
                await anext(deltas)
        told = len(engine.decoder.served)
        await asyncio.sleep(0.1)
        assert len(engine.decoder.served) <= told + 1
        assert len(text(await collect(engine, ask("hello", thinking=False, max_tokens=5)))) == 5

    asyncio.run(run())


def test_a_cancelled_task_ends_the_work_and_a_waiting_one_never_begins(scripted: Any) -> None:
    engine = scripted(b"a", max_active=1, delay=0.005)

    async def run() -> None:
        first = asyncio.create_task(collect(engine, ask("hello", max_tokens=900)))
        waiting = asyncio.create_task(collect(engine, ask("hello", max_tokens=900)))
        while len(engine.decoder.served) < 3:
            await asyncio.sleep(0.001)
        for task in (waiting, first):
            task.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        assert len(text(await collect(engine, ask("hello", max_tokens=5)))) == 5
        assert engine.decoder.caches == 2

    asyncio.run(run())


def test_the_event_loop_is_free_while_the_model_works(scripted: Any) -> None:
    engine = scripted(b"a", delay=0.05)

    async def run() -> None:
        task = asyncio.create_task(collect(engine, ask("hello", max_tokens=10)))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.002)
            ticks += 1
        # A loop that waited for the model would come round about twice a token.
        assert ticks > 60
        assert len(text(await task)) == 10

    asyncio.run(run())


def test_an_error_in_one_answer_leaves_the_others_alone(scripted: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = scripted(b"a", delay=0.001)
    engine.decoder.failure = lambda cache, step: ValueError("secret detail") if (cache, step) == (1, 4) else None

    async def run() -> None:
        requests = [ask("hello", thinking=False, max_tokens=20) for _ in range(3)]
        results = await asyncio.gather(*(collect(engine, one) for one in requests), return_exceptions=True)
        failed = [one for one in results if isinstance(one, BaseException)]
        assert len(failed) == 1
        assert isinstance(failed[0], MoonvitError)
        assert failed[0].status == 500
        assert "secret" not in failed[0].message
        assert [text(one) for one in results if not isinstance(one, BaseException)] == ["a" * 20] * 2
        assert await engine.health()
        assert text(await collect(engine, requests[0])) == "a" * 20

    asyncio.run(run())
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")])
def test_no_memory_is_a_503_and_the_next_request_works(scripted: Any, error: Exception) -> None:
    engine = scripted(b"a")
    engine.decoder.failure = lambda cache, step: error if cache == 0 else None
    with pytest.raises(EngineError, match="not enough memory") as caught:
        asyncio.run(collect(engine, ask("hello", max_tokens=3)))
    assert caught.value.status == 503
    assert len(text(asyncio.run(collect(engine, ask("hello", max_tokens=3))))) == 3


class AcceleratorError(RuntimeError):
    """As torch's: the device is gone for this process."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [AcceleratorError("device-side assert"), SystemExit(1)])
def test_a_worker_that_cannot_go_on_says_so_to_everybody(scripted: Any, error: BaseException) -> None:
    engine = scripted(b"a", max_active=2, delay=0.002)
    engine.decoder.failure = lambda cache, step: error if step == 5 else None

    async def run() -> None:
        requests = [ask("hello", max_tokens=50) for _ in range(4)]
        results = await asyncio.gather(*(collect(engine, one) for one in requests), return_exceptions=True)
        assert all(isinstance(one, MoonvitError) and one.status >= 500 for one in results), results
        assert sum(isinstance(one, EngineError) for one in results) >= 3
        assert not await engine.health()
        with pytest.raises(EngineError, match="stopped"):
            await collect(engine, requests[0])

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["rows", "width", "nan"])
def test_an_encoder_that_gives_something_else_fails_that_request_alone(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """S54, S06: one row fewer than there is room for, or NaN."""
    engine = scripted(b"a")
    real = engine.encoder.encode_batch

    def wrong(*request: Any) -> list[Features]:
        found: list[Features] = real(*request)
        if fault == "nan":
            raise NonFiniteError("image 0: NaN", param="images[0]")
        cut = found[0].tensor[:-1] if fault == "rows" else found[0].tensor[:, :-1]
        return [replace(found[0], tensor=cut), *found[1:]]

    with monkeypatch.context() as patched:
        patched.setattr(engine.encoder, "encode_batch", wrong)
        with pytest.raises(MoonvitError) as caught:
            asyncio.run(collect(engine, ask("hello", noise(1), max_tokens=3)))
    assert caught.value.param == "part 1"
    assert caught.value.status == 500
    if fault == "rows":
        assert "(11, 64), the prompt has room for (12, 64)" in caught.value.message
    assert len(text(asyncio.run(collect(engine, ask("hello", noise(1), max_tokens=3))))) == 3


def test_nan_in_the_logits_is_an_error(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(b"a")
    monkeypatch.setattr(engine.decoder, "next_logits", lambda embeddings, cache: torch.full((10,), torch.nan))
    with pytest.raises(NonFiniteError):
        asyncio.run(collect(engine, ask("hello")))


def test_a_chunk_of_the_prompt_never_ends_inside_a_picture(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(b"a", prefill=8)
    spans: list[tuple[int, int]] = []
    chunks: list[tuple[int, int]] = []
    real = engine._embed

    def embed(prompt: Any, features: Any, start: int, stop: int) -> torch.Tensor:
        spans[:] = prompt.spans
        chunks.append((start, stop))
        found: torch.Tensor = real(prompt, features, start, stop)
        return found

    monkeypatch.setattr(engine, "_embed", embed)
    asyncio.run(collect(engine, ask(noise(1, (112, 84)), "hello", noise(2, (28, 28)), "hello hello hello")))
    assert [start for start, _ in chunks[1:]] == [stop for _, stop in chunks[:-1]]
    assert all(not first < stop < first + count for first, count in spans for _, stop in chunks)
    assert any(stop - start > 8 for start, stop in chunks)  # the first picture has 12 tokens
    assert len(chunks) > 3


def test_pictures_are_encoded_in_the_batches_of_the_plan(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S48: many pictures at once are never decoded or encoded at once."""
    sizes = [(56, 56), (56, 56), (112, 56), (28, 28), (112, 112), (56, 84)]
    request = ask(*(noise(n, size) for n, size in enumerate(sizes)), "hello", max_tokens=2)
    plan = engine.encoder.plan(sizes)
    seen: list[int] = []
    model = engine.encoder.model
    real = model.prepare
    monkeypatch.setattr(
        model, "prepare", lambda grids, *way, **more: (seen.append(len(grids)), real(grids, *way, **more))[1]
    )
    asyncio.run(collect(engine, request))
    assert seen == [len(batch.indices) for batch in plan.batches]
    assert len(seen) > 1


# ---- life ------------------------------------------------------------------------------------------------------------


def test_closing_the_engine_ends_what_runs_and_refuses_what_comes(k25: Path) -> None:
    made = opened(k25)

    async def run() -> None:
        assert await made.health()
        deltas: AsyncIterator[Delta] = made.generate(ask("hello", thinking=False))
        await anext(deltas)
        await made.close()
        with pytest.raises(EngineError, match="stopped"):
            async for _ in deltas:
                pass
        assert not await made.health()
        with pytest.raises(EngineError, match="stopped"):
            await collect(made, ask("hello"))
        await made.close()

    asyncio.run(run())
    assert {parameter.device.type for parameter in made.decoder.model.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in made.encoder.model.parameters()} == {"meta"}


def test_engines_are_opened_by_name(k25: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine 'vllm-like'; known: embedded"):
        open_engine("vllm-like", k25)
    with pytest.raises(ConfigError, match="engine 'embedded' has no option colour"):
        open_engine("embedded", k25, colour="red")
    for option in ("max_active", "max_waiting", "prefill"):
        with pytest.raises(ConfigError, match=f"{option} = 0, must be at least 1"):
            open_engine("embedded", "/not/even/looked/for", **{option: 0})
    made = open_engine("embedded", k25, dtype="bfloat16", name="tiny-kimi")
    assert (made.info.model, made.info.family, made.info.max_context) == ("tiny-kimi", "kimi-k2.5", 1024)
    assert made.info.vision is not None
    details = made.info.details
    assert details["parameters"] == sum(
        tensor.numel()
        for name, tensor in tiny.random_tensors(
            tiny.text_shapes(tiny.text_config()) | tiny.vision_shapes(tiny.K25_PROJECTOR), 0
        ).items()
        if not name.endswith("e_score_correction_bias")
    )
    asyncio.run(made.close())
    assert default_model().name == "demo"


def test_the_model_is_called_after_its_directory_and_samples_as_its_files_say(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [tiny.BASE + 9]}
    tiny.write_k25(tmp_path / "My-Kimi", generation=generation)
    made = opened(tmp_path / "My-Kimi")
    assert made.info.model == "My-Kimi"
    assert (made.info.details["temperature"], made.info.details["top_p"]) == (0.6, 0.95)
    assert {tiny.BASE + 1, tiny.BASE + 2, tiny.BASE + 9} <= made.prompts.stop_ids
    asyncio.run(made.close())


def test_files_that_do_not_fit_each_other_are_refused_at_the_start(tmp_path: Path) -> None:
    tiny.write_k25(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"text_config": {**config["text_config"], "model_type": "kimi_linear"}}, "kimi_linear"),
        ({"text_config": None}, "text_config"),
        ({"model_type": "kimi_k3"}, "kimi_k3"),
        ({"media_placeholder_token_id": 5, "image_token_id": 5}, "media_placeholder_token_id"),
    ):
        tiny.write_json(tmp_path / "config.json", config | change)
        with pytest.raises(ConfigError, match=message):
            opened(tmp_path)
    tiny.write_json(tmp_path / "config.json", config)
    (tmp_path / "tiktoken.model").unlink()
    with pytest.raises(ConfigError, match=r"tiktoken\.model"):
        opened(tmp_path)


def test_a_vocabulary_larger_than_the_language_model_is_refused(parts: tuple[VisionEncoder, Any]) -> None:
    decoder = Scripted([97])
    decoder.vocabulary = tiny.BASE + 2
    with pytest.raises(
        ConfigError, match=rf"uses id {tiny.BASE + 2}, the language model has ids up to {tiny.BASE + 1}"
    ):
        EmbeddedEngine(parts[0], decoder, parts[1], name="x")  # type: ignore[arg-type]
    decoder = Scripted([97])
    decoder.width = 65
    with pytest.raises(ConfigError, match="the projector gives 64 values a token, the language model takes 65"):
        EmbeddedEngine(parts[0], decoder, parts[1], name="x")  # type: ignore[arg-type]
