"""``ByteLRU``: never over its bytes, least recently used first, right under threads."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from moonvit.cache import ByteLRU


def test_what_was_used_last_stays() -> None:
    cache: ByteLRU[str, int] = ByteLRU(100)
    assert cache.put("a", 1, 40) and cache.put("b", 2, 40)
    assert cache.get("a") == 1
    assert cache.put("c", 3, 40)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert (cache.bytes, len(cache)) == (80, 2)


def test_one_large_value_drops_as_many_as_it_takes() -> None:
    cache: ByteLRU[int, int] = ByteLRU(100)
    for key in range(10):
        cache.put(key, key, 10)
    assert cache.put(99, 99, 55)
    assert [key for key in range(10) if cache.get(key) is not None] == [6, 7, 8, 9]
    assert cache.bytes == 95


def test_replacing_counts_once() -> None:
    cache: ByteLRU[str, str] = ByteLRU(100)
    cache.put("a", "old", 60)
    cache.put("a", "new", 90)
    assert (cache.get("a"), cache.bytes, len(cache)) == ("new", 90, 1)


def test_too_large_is_not_kept_and_drops_nothing_else() -> None:
    cache: ByteLRU[str, int] = ByteLRU(100)
    cache.put("a", 1, 60)
    cache.put("b", 2, 20)
    assert not cache.put("c", 3, 101)
    assert not cache.put("b", 4, 101)  # the old value of the key is stale, so it goes
    assert (cache.get("a"), cache.get("b"), cache.get("c"), cache.bytes) == (1, None, None, 60)


def test_zero_keeps_nothing_but_what_takes_nothing() -> None:
    cache: ByteLRU[str, int] = ByteLRU(0)
    assert not cache.put("a", 1, 1)
    assert cache.put("b", 2, 0)
    assert (len(cache), cache.bytes) == (1, 0)


def test_clear() -> None:
    cache: ByteLRU[str, int] = ByteLRU(10)
    cache.put("a", 1, 10)
    cache.clear()
    assert (cache.get("a"), len(cache), cache.bytes) == (None, 0, 0)


@pytest.mark.parametrize("bad", [lambda: ByteLRU(-1), lambda: ByteLRU(1).put("a", 1, -1)])
def test_negative_bytes(bad: Any) -> None:
    with pytest.raises(ValueError, match="= -1"):
        bad()


def test_none_is_no_value() -> None:
    with pytest.raises(ValueError, match="None"):
        ByteLRU(10).put("a", None, 1)


def test_random_use_never_goes_over_and_agrees_with_a_plain_model() -> None:
    rng = random.Random(0)
    cache: ByteLRU[int, int] = ByteLRU(50)
    model: list[tuple[int, int, int]] = []  # least recently used first
    for step in range(5000):
        key = rng.randrange(12)
        if rng.random() < 0.5:
            found = next((item for item in model if item[0] == key), None)
            assert cache.get(key) == (found[1] if found else None)
            if found:
                model.remove(found)
                model.append(found)
        else:
            size = rng.randrange(60)
            model = [item for item in model if item[0] != key]
            if size <= 50:
                while sum(item[2] for item in model) + size > 50:
                    model.pop(0)
                model.append((key, step, size))
            assert cache.put(key, step, size) == (size <= 50)
        assert cache.bytes == sum(item[2] for item in model) <= 50
        assert len(cache) == len(model)


def test_threads_never_see_another_keys_value() -> None:
    cache: ByteLRU[int, tuple[int, int]] = ByteLRU(2)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for step in range(2000):
            key = rng.randrange(10)
            value = cache.get(key)
            if value is None:
                cache.put(key, (key, step), 1)
            elif value[0] != key:
                wrong.append((key, value))
            if cache.bytes > 2:
                wrong.append(cache.bytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.bytes == len(cache) <= 2
