"""Pictures of a request: brought, taken out of their wrapping and checked, all of it off the event loop.

What leaves this room is the encoded picture as bytes, so a waiting request holds no decoded pixels, and the engine
never sees an address. Addresses are fetched before a request waits for its turn: a slow host holds up other
fetches at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from moonvit.engines import GenerateRequest
from moonvit.errors import MoonvitError
from moonvit.images import picture_size
from moonvit.prompts.messages import ImagePart
from moonvit.server.queue import PendingBytes
from moonvit.server.settings import Settings
from moonvit.sources import FetchPolicy, Limits, data_url_bytes, fetch_bytes, is_data_url

_READERS = 2


class Media:
    """Brings and checks the pictures of requests.

    Args:
        settings: Hosts, limits and workers.
        pending: Account of the bytes that requests hold; what is fetched counts like what is sent.
    """

    def __init__(self, settings: Settings, pending: PendingBytes) -> None:
        self._pending = pending
        self._limits = replace(Limits(), fetch_seconds=settings.media_timeout)
        self._policy = None
        if settings.media_hosts:
            self._policy = FetchPolicy(settings.media_hosts, allow_private=settings.media_private)
        self._fetchers = ThreadPoolExecutor(settings.media_workers, "moonvit-fetch")
        self._readers = ThreadPoolExecutor(_READERS, "moonvit-read")

    @asynccontextmanager
    async def gathered(self, request: GenerateRequest) -> AsyncIterator[GenerateRequest]:
        """Replace every address by the encoded picture it stands for, for as long as the request is worked on.

        Args:
            request: Pictures are addresses.

        Yields:
            The request; pictures are bytes whose header was read and is within the limits.

        Raises:
            MoonvitError: A picture cannot be had; ``param`` is its part.
            OverloadedError: Pictures that were fetched, and bodies, would take more than the account allows.
        """
        with self._account() as held:
            found = await self._all(request, held)
            yield _with_sources(request, [content for content, _ in found])

    async def measure(self, request: GenerateRequest) -> tuple[GenerateRequest, list[tuple[int, int]]]:
        """Replace every picture by its size.

        Args:
            request: Pictures are addresses or ``(width, height)``.

        Returns:
            The request and the sizes, upright, in order.

        Raises:
            MoonvitError: A picture cannot be had; ``param`` is its part.
            OverloadedError: As for ``gathered``.
        """
        with self._account() as held:
            sizes = [size for _, size in await self._all(request, held)]
        return _with_sources(request, sizes), sizes

    def close(self) -> None:
        """Stop the workers; what they are at is finished and dropped."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _account(self) -> Iterator[list[int]]:
        held: list[int] = []
        try:
            yield held
        finally:
            self._pending.give_back(sum(held))

    async def _all(self, request: GenerateRequest, held: list[int]) -> list[tuple[bytes, tuple[int, int]]]:
        pictures = [part for message in request.messages for part in message.images]
        work = [asyncio.ensure_future(self._one(part, index, held)) for index, part in enumerate(pictures)]
        try:
            return list(await asyncio.gather(*work))
        finally:
            # gather leaves the others running when one fails, and their errors unread.
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _one(self, part: ImagePart, index: int, held: list[int]) -> tuple[bytes, tuple[int, int]]:
        if isinstance(part.source, tuple):
            return b"", part.source
        address: str = part.source
        loop = asyncio.get_running_loop()
        try:
            if is_data_url(address):
                return await loop.run_in_executor(self._readers, self._unwrap, address, index)
            content = await loop.run_in_executor(
                self._fetchers, fetch_bytes, address, self._policy, self._limits, index
            )
            self._pending.take(len(content))
            held.append(len(content))
            return content, await loop.run_in_executor(self._readers, picture_size, content, self._limits, index)
        except MoonvitError as error:
            error.param = part.param
            raise

    def _unwrap(self, address: str, index: int) -> tuple[bytes, tuple[int, int]]:
        content = data_url_bytes(address, self._limits, index)
        return content, picture_size(content, self._limits, index)


def _with_sources(request: GenerateRequest, sources: Sequence[Any]) -> GenerateRequest:
    """The same request with other pictures in the places of its pictures."""
    rest = iter(sources)
    messages = []
    for message in request.messages:
        parts = tuple(
            replace(part, source=next(rest)) if isinstance(part, ImagePart) else part for part in message.parts
        )
        messages.append(replace(message, parts=parts))
    return replace(request, messages=tuple(messages))
