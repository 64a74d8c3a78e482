"""The demo model in Kimi-VL's schema, for which vLLM itself has no processor without the checkpoint's code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.checkpoints import renamed_demo
from tests.vllm.serving import Server, sample, serving
from tests.vllm.test_server import QUESTIONS


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kimi-vl")
    with serving(folder / "log", "--model", str(renamed_demo(folder / "demo"))) as server:
        yield server


def test_answers_are_right(renamed: Server) -> None:
    said = [renamed.text(*map(sample, names), question) for names, question, _ in QUESTIONS]
    assert said == [expected for _, _, expected in QUESTIONS]


def test_it_says_that_the_plugin_is_active(renamed: Server) -> None:
    assert any("moonvit" in line and "kimi-vl" in line for line in renamed.log.read_text().splitlines())
