"""Threads that stand for the ranks of a launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from moonvit import parallel
from moonvit.errors import EngineError


class Launch:
    """What the ranks of a launch gave in each round, and which of them are gone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds: list[dict[int, bytes]] = []
        self.gone: set[int] = set()
        self.changed = threading.Condition()


class Ranks(parallel.Ranks):
    """A thread that stands for a rank."""

    def __init__(self, launch: Launch, rank: int) -> None:
        super().__init__()
        self.launch, self.rank, self.size, self.round = launch, rank, launch.size, 0

    def _agree(self, word: bytes) -> list[bytes]:
        return self.gather(word)

    def _leave(self, error: BaseException) -> None:
        pass  # that it is gone is seen when its thread ends

    def gather(self, value: bytes) -> list[bytes]:
        launch = self.launch
        with launch.changed:
            if self.round == len(launch.rounds):
                launch.rounds.append({})
            given = launch.rounds[self.round]
            self.round += 1
            given[self.rank] = value
            launch.changed.notify_all()
            assert launch.changed.wait_for(lambda: len(given) == self.size or launch.gone - given.keys(), timeout=60)
            lost = launch.gone - given.keys()
            if lost:
                raise EngineError(f"rank {min(lost)} is lost")
            return [given[rank] for rank in range(self.size)]

    def check(self) -> None:
        if self.launch.gone:
            raise EngineError(f"rank {min(self.launch.gone)} is lost")


def every(size: int, step: Callable[[Any], Any]) -> list[Any]:
    """What a step gives, or raises, on each rank."""
    launch = Launch(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = step(Ranks(launch, rank))
        except BaseException as error:
            results[rank] = error
        with launch.changed:
            launch.gone.add(rank)
            launch.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
