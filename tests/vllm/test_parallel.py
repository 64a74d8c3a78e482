"""Two tensor-parallel ranks: in either mode of the encoder they answer as one rank of plain vLLM does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live import solid
from tests.vllm.checkpoints import random_k25
from tests.vllm.serving import Server, sample, serving

# float32 needs the attention that is not latent; logarithms of probabilities can then be held tightly.
EXACT = {"VLLM_MLA_DISABLE": "1"}
MESSAGES: list[tuple[Any, ...]] = [
    ("hello world",),
    (sample("stop"), "What does it say?"),
    (sample("chart"), sample("number"), solid("red", (60, 200)), "and now?"),
    (*(solid(colour, (56 + 28 * n, 84)) for n, colour in enumerate(("red", "blue", "lime", "gray", "tan"))), "five"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_k25(tmp_path_factory.mktemp("random"))


def options(checkpoint: Path) -> tuple[str, ...]:
    return "--model", str(checkpoint), "--dtype", "float32"


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    log = tmp_path_factory.mktemp("reference") / "log"
    with serving(log, *options(checkpoint), MOONVIT_VLLM="off", **EXACT) as server:
        return [server.chances(*message) for message in MESSAGES]


@pytest.fixture(scope="module", params=["data", "weights"])
def ours(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp(request.param) / "log"
    flags = ("--mm-encoder-tp-mode", request.param)
    with serving(log, *options(checkpoint), flags=flags, ranks=2, **EXACT) as server:
        yield server


def test_probabilities_are_those_of_one_rank(ours: Server, reference: list[Any]) -> None:
    for message, wanted in zip(MESSAGES, reference, strict=True):
        for here, there in zip(ours.chances(*message), wanted, strict=True):
            assert here == pytest.approx(there, rel=1e-5)  # the float32 gate


def test_pictures_reach_the_answer(ours: Server) -> None:
    one, other = (ours.chances(sample(name), "What does it say?")[0] for name in ("stop", "number"))
    assert one != pytest.approx(other, rel=1e-2)
