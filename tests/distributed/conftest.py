"""Teams of ranks, each started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.team import Team


@pytest.fixture(scope="session")
def team() -> Iterator[Callable[[int], Team]]:
    """A team of so many ranks."""
    teams: dict[int, Team] = {}

    def of(size: int) -> Team:
        if size not in teams:
            teams[size] = Team(size)
        return teams[size]

    yield of
    for one in teams.values():
        one.stop()
