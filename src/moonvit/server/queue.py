"""Admission: how many requests are inside, whose turn it is, and how many bytes their bodies hold.

Everything here is integers on one event loop; a request that does not fit is refused at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from moonvit.errors import OverloadedError


class Admission:
    """A bounded queue in order of arrival.

    Args:
        max_running: Requests that run at once.
        max_waiting: Requests that may be inside beside those.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.inside = 0
        self.running = 0
        self._max_running = max_running
        self._max_inside = max_running + max_waiting
        self._turns = asyncio.Semaphore(max_running)
        self._seconds = 1.0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Be inside, from before the body is read to the end of the answer.

        Yields:
            Nothing.

        Raises:
            OverloadedError: As many requests are inside as may be.
        """
        if self.inside >= self._max_inside:
            raise OverloadedError(
                f"{self.inside} requests are at work or waiting, allowed {self._max_inside}; try again later"
            )
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, first come first served, and hold it.

        Yields:
            Nothing.
        """
        async with self._turns:
            self.running += 1
            start = time.monotonic()
            try:
                yield
            finally:
                self.running -= 1
                self._seconds = 0.8 * self._seconds + 0.2 * (time.monotonic() - start)

    @property
    def retry_after(self) -> int:
        """Seconds after which a place is likely free, 1 to 60."""
        rounds = max(1, self.inside // self._max_running)
        return int(min(60.0, max(1.0, rounds * self._seconds)))


class PendingBytes:
    """Bytes of request bodies and fetched pictures held in memory, all requests together.

    Args:
        limit: Bytes at most.
    """

    def __init__(self, limit: int) -> None:
        self.held = 0
        self._limit = limit

    def take(self, size: int) -> None:
        """Take bytes before they are read.

        Args:
            size: Bytes.

        Raises:
            OverloadedError: The limit would be passed.
        """
        if self.held + size > self._limit:
            raise OverloadedError(
                f"requests hold {self.held} bytes and this one needs {size} more, allowed {self._limit}; "
                "try again later"
            )
        self.held += size

    def give_back(self, size: int) -> None:
        """Return bytes that were taken.

        Args:
            size: Bytes.
        """
        self.held -= size
