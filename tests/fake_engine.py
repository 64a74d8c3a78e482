"""A small deterministic engine: it reports what it was sent, word by word, and does what its knobs say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from moonvit.engines import Delta, EngineInfo, GenerateRequest, RequestCost, Usage
from moonvit.families import family_config
from moonvit.images import open_picture, picture_size
from moonvit.preprocess import resize_plan
from moonvit.prompts.messages import ImagePart, TextPart

COLOURS = {(255, 0, 0): "red", (0, 255, 0): "green", (0, 0, 255): "blue", (255, 255, 255): "white", (0, 0, 0): "black"}


class FakeEngine:
    """An ``Engine`` whose answer lists the parts of the last message in order.

    Attributes:
        delay: Seconds between two pieces of an answer.
        script: Pieces to send instead of the report.
        fail_at: Piece before which ``failure`` is raised.
        alive: What ``health`` says.
        seen: Requests, as received.
        running: Answers in progress now.
        peak: Most answers that were in progress at once.
        cancelled: Answers that were closed before their end.
    """

    def __init__(self, *, delay: float = 0.0, vision: bool = True) -> None:
        config = family_config("kimi-k2.5")
        self.info = EngineInfo(
            model="fake-vl",
            family="kimi-k2.5",
            max_context=4096,
            details={"parameters": 12345, "dtype": "float32", "device": "cpu"},
            vision=config if vision else None,
        )
        self.delay = delay
        self.script: list[Delta] | None = None
        self.fail_at: int | None = None
        self.failure: BaseException = RuntimeError("a secret inside")
        self.alive = True
        self.closed = False
        self.seen: list[GenerateRequest] = []
        self.running = 0
        self.peak = 0
        self.cancelled = 0

    def _describe(self, request: GenerateRequest) -> list[str]:
        words = []
        index = sum(len(message.images) for message in request.messages[:-1])
        for part in request.messages[-1].parts:
            if isinstance(part, TextPart):
                words.extend(part.text.split())
            else:
                picture = open_picture(part.source, index=index, allow_paths=False)
                index += 1
                colour = COLOURS.get(picture.image.convert("RGB").getpixel((0, 0)), "other")  # type: ignore[arg-type]
                words.append(f"[{colour} {picture.size[0]}x{picture.size[1]}]")
        return words or ["nothing"]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.seen.append(request)
        self.running += 1
        self.peak = max(self.peak, self.running)
        finished = False
        try:
            pieces = self.script
            cost = await self.count_tokens(request)
            if pieces is None:
                words = await asyncio.to_thread(self._describe, request)
                limit = request.sampling.max_tokens or len(words)
                pieces = [Delta(content=word if not i else f" {word}") for i, word in enumerate(words[:limit])]
                pieces.append(
                    Delta(
                        finish_reason="length" if limit < len(words) else "stop",
                        usage=Usage(cost.prompt_tokens, min(limit, len(words)), cost.image_tokens),
                    )
                )
            for index, piece in enumerate(pieces):
                if index == self.fail_at:
                    raise self.failure
                if self.delay:
                    await asyncio.sleep(self.delay)
                yield piece
            finished = True
        finally:
            self.running -= 1
            if not finished:
                self.cancelled += 1

    async def count_tokens(self, request: GenerateRequest) -> RequestCost:
        words = image_tokens = 0
        grids = []
        for message in request.messages:
            for part in message.parts:
                if isinstance(part, ImagePart):
                    size = part.source if isinstance(part.source, tuple) else picture_size(part.source)
                    assert self.info.vision is not None
                    grid = resize_plan(self.info.vision.rule, *size).grid
                    grids.append(list(grid))
                    image_tokens += grid.tokens
                else:
                    words += len(part.text.split())
        plan = {"grids": grids, "peak_bytes": 1000 * image_tokens} if grids else None
        return RequestCost(words + image_tokens, image_tokens, plan)

    async def health(self) -> bool:
        return self.alive

    async def close(self) -> None:
        self.closed = True


def renamed(engine: FakeEngine, model: str) -> FakeEngine:
    """The engine under another model name."""
    engine.info = replace(engine.info, model=model)
    return engine
