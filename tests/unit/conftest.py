"""Fixtures of several unit test files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from PIL import Image

from moonvit import images
from moonvit.headers import READABLE


@pytest.fixture
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test where a decoder is so much as made."""

    def fail(*args: Any) -> Any:
        raise AssertionError("a decoder saw the file")

    monkeypatch.setattr(images, "_PLUGINS", dict.fromkeys(READABLE, fail))
    monkeypatch.setattr(Image, "open", fail)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
