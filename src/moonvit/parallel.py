"""TEMPORARY stand-in of the ranks of a launch, for ``jobs`` alone: its whole file is replaced by the real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from moonvit.errors import EngineError


class Ranks:
    """The processes that were launched together.

    Args:
        rank: This one.
        size: Their number.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def gather(self, value: bytes) -> list[bytes]:
        """What every rank gave, in rank order; every rank calls it.

        Raises:
            EngineError: A rank is gone.
        """
        values: list[Any] = [value] * self.size
        if self.size > 1:
            try:
                dist.all_gather_object(values, value)
            except RuntimeError as error:
                raise EngineError(f"a rank is lost: {str(error)[:100]}") from None
        return values

    def check(self) -> None:
        """Cheap, no collective: refuse to go on where a rank is known to be lost."""


@contextmanager
def launched() -> Iterator[Ranks]:
    """The ranks torchrun started, or this process alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
