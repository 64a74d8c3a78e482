"""Caches that are bounded by bytes, not by entries: for positions, features and fetched media."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLRU(Generic[K, V]):
    """Keeps what was used last, up to a number of bytes. Safe to use from several threads.

    A key must say everything the value depends on: the content, the settings it was made with, and the model.

    Args:
        max_bytes: Bytes of all values together; 0 keeps nothing.

    Raises:
        ValueError: ``max_bytes`` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes = {max_bytes}, must not be negative")
        self.max_bytes = max_bytes
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Look a value up and mark it as used.

        Args:
            key: What it was stored under.

        Returns:
            The value, or None where it is not there (any more).
        """
        with self._lock:
            item = self._items.get(key)
            if item is None:
                return None
            self._items.move_to_end(key)
            return item[0]

    def put(self, key: K, value: V, nbytes: int) -> bool:
        """Store a value in place of what the key held, dropping the least recently used ones until it fits.

        Args:
            key: What to store it under.
            value: Anything but None.
            nbytes: Bytes it takes.

        Returns:
            Whether it was kept; a value larger than the whole cache is not, and drops nothing else.

        Raises:
            ValueError: ``nbytes`` is negative, or the value is None.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes = {nbytes}, must not be negative")
        if value is None:
            raise ValueError("None cannot be stored: it is what get() says of a missing key")
        with self._lock:
            old = self._items.pop(key, None)
            if old is not None:
                self._bytes -= old[1]
            if not self._fits(nbytes):
                return False
            self._items[key] = (value, nbytes)
            self._bytes += nbytes
            return True

    def make_room(self, nbytes: int) -> bool:
        """Drop the least recently used values until one more fits, before it is made.

        Args:
            nbytes: Bytes it will take.

        Returns:
            Whether it can be kept; where it cannot, nothing is dropped.
        """
        with self._lock:
            return self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        if nbytes > self.max_bytes:
            return False
        while self._bytes + nbytes > self.max_bytes:
            self._bytes -= self._items.popitem(last=False)[1][1]
        return True

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._items.clear()
            self._bytes = 0

    def keys(self) -> list[K]:
        """Keys of what is held, least recently used first."""
        with self._lock:
            return list(self._items)

    @property
    def bytes(self) -> int:
        """Bytes of all values that are held."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._items)


class WeightCache(ByteLRU[K, V]):
    """Keeps what weights made, and forgets all of it when one of them changes."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._seen: list[tuple[Any, ...]] = []
        self._moves = 0

    def watch(self, weights: Iterable[Any], moves: int = 0) -> None:
        """Drop everything if a weight is not what it was the last time: another tensor, or changed in place.

        Args:
            weights: Parameters, on any device. What is written through ``.data`` goes past torch's version counters and
                is not seen: call ``clear`` then.
            moves: How often the weights went to another device or dtype.
        """
        now = [(weight, weight.data_ptr(), -1 if weight.is_inference() else weight._version) for weight in weights]
        with self._lock:
            same = moves == self._moves and len(now) == len(self._seen)
            for (weight, *state), (seen, *before) in zip(now, self._seen, strict=False):
                # Tensors that were made in inference mode have no version: whether they changed cannot be known.
                same = same and seen() is weight and state == before and state[1] >= 0
            if same:
                return
            self._items.clear()
            self._bytes = 0
            self._moves = moves
            self._seen = [(weakref.ref(weight), *state) for weight, *state in now]
