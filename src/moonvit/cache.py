"""A cache that is bounded by bytes, not by entries: for positions, features and fetched media."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

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
            if nbytes > self.max_bytes:
                return False
            while self._bytes + nbytes > self.max_bytes:
                self._bytes -= self._items.popitem(last=False)[1][1]
            self._items[key] = (value, nbytes)
            self._bytes += nbytes
            return True

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._items.clear()
            self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes of all values that are held."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._items)
