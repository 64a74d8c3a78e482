"""Measure the demo model on fresh pictures through the real engine, one request at a time.

    python -m train.evaluate --pictures 1400

The words shown were never in training, every picture is new, and sides are drawn evenly on a logarithmic scale from 56
to 900 pixels. An answer counts only when it is exact. The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections import Counter
from pathlib import Path

from moonvit.engines import Delta, GenerateRequest, Sampling, default_model, open_engine
from moonvit.prompts.messages import ImagePart, Message, TextPart
from train.draw import HELD_OUT_WORDS, KINDS, Sample, Turn, make_sample

SORTS = {
    "read": ("read", "texts", "mixed"),
    "colour": ("read", "shapes", "mixed"),
    "shape": ("shapes", "mixed"),
    "count": ("shapes", "chart", "mixed"),
    "place": ("read", "texts", "shapes"),
    "chart": ("chart",),
    "multi": ("multi",),
}
"""Scenes in which a kind of question is asked."""
SIDES = (224, 448, 900)
"""Accuracy is also told by the longest side of the pictures: at most so many pixels."""
BLIND = 5
"""Every fifth question is also asked without its pictures, which shows what guessing is worth."""


def questions(seed: int, count: int, smallest: int = 56, largest: int = 900) -> list[tuple[Sample, Turn]]:
    """Draw questions, as many of every kind.

    Args:
        seed: Another seed gives other pictures.
        count: Questions in all.
        smallest: Shortest side in pixels.
        largest: Longest side in pixels.

    Returns:
        Samples and the one question asked about each.
    """
    rng = random.Random(f"evaluate/{seed}")

    def size(_: int) -> tuple[int, int]:
        low, high = math.log(smallest), math.log(largest + 1)
        return int(math.exp(rng.uniform(low, high))), int(math.exp(rng.uniform(low, high)))

    drawn: list[tuple[Sample, Turn]] = []
    while len(drawn) < count:
        kind = KINDS[len(drawn) % len(KINDS)]
        sample = make_sample(rng, size, words=HELD_OUT_WORDS, sort=rng.choice(SORTS[kind]), most_turns=20)
        turns = [turn for turn in sample.turns if turn.kind == kind]
        if turns:
            drawn.append((sample, rng.choice(turns)))
    return drawn


async def answer(engine: object, sample: Sample, turn: Turn, images: bool = True) -> str:
    """Ask the engine one question.

    Args:
        engine: An ``Engine``.
        sample: The pictures.
        turn: The question.
        images: Send the pictures; without them the answer must fall to chance.

    Returns:
        The whole text.
    """
    parts = [ImagePart(image) for image in sample.images] if images else []
    message = Message("user", (*parts, TextPart(turn.question)))
    request = GenerateRequest((message,), Sampling(max_tokens=24, temperature=0.0), thinking=False)
    text = ""
    delta: Delta
    async for delta in engine.generate(request):  # type: ignore[attr-defined]
        text += delta.content
    return text


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Ask everything and count."""
    engine = open_engine("embedded", options.model)
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    drawn = questions(options.seed, options.pictures)
    sized: Counter[tuple[int, bool]] = Counter()
    several: Counter[tuple[int, bool]] = Counter()
    blind = []
    for number, (sample, turn) in enumerate(drawn):
        said = await answer(engine, sample, turn)
        asked[turn.kind] += 1
        right[turn.kind] += said == turn.answer
        if turn.kind == "multi":
            several[len(sample.images), said == turn.answer] += 1
        longest = max(side for image in sample.images for side in image.size)
        sized[next(most for most in SIDES if longest <= most), said == turn.answer] += 1
        if number % BLIND == 0:
            blind.append(await answer(engine, sample, turn, images=False) == turn.answer)
        if options.wrong and said != turn.answer:
            sizes = ", ".join(f"{image.width}x{image.height}" for image in sample.images)
            print(f"{turn.kind}: {turn.question} [{sizes}] -> {said!r}, not {turn.answer!r}", file=sys.stderr)
        if number % 100 == 99:
            print(f"{number + 1} asked, {sum(right.values())} right", file=sys.stderr)
    await engine.close()
    pictures = sum(len(sample.images) for sample, _ in drawn)
    return {
        "questions": sum(asked.values()),
        "pictures": pictures,
        "seed": options.seed,
        "accuracy": round(sum(right.values()) / sum(asked.values()), 4),
        "kinds": {kind: round(right[kind] / asked[kind], 4) for kind in KINDS if asked[kind]},
        "multi_of": {str(n): _share(several[n, True], several[n, False]) for n in sorted({n for n, _ in several})},
        "sides": {str(most): _share(sized[most, True], sized[most, False]) for most in SIDES},
        "without_pictures": _share(sum(blind), len(blind) - sum(blind)),
    }


def _share(right: int, wrong: int) -> float:
    return round(right / max(1, right + wrong), 4)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="checkpoint directory; the shipped demo by default")
    parser.add_argument("--pictures", type=int, default=1400, help="questions to ask, each about fresh pictures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong", action="store_true", help="show every wrong answer on stderr")
    parser.add_argument("--write", action="store_true", help="keep the result beside the model, as demo.json")
    options = parser.parse_args()
    result = asyncio.run(run(options))
    if options.write:
        summary = f"{result['accuracy']:.1%} of {result['questions']} held-out questions answered exactly"
        file = (options.model or default_model()) / "demo.json"
        file.write_text(json.dumps({"summary": summary, **result}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
