"""``ByteLRU`` and ``WeightCache``: never over their bytes, least recently used first, nothing of weights that were."""

from __future__ import annotations

import random
import threading
import weakref
from typing import Any

import pytest
import torch

from moonvit.cache import ByteLRU, WeightCache


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


def test_room_is_made_before_a_value_is() -> None:
    cache: ByteLRU[str, int] = ByteLRU(100)
    cache.put("a", 1, 60)
    cache.put("b", 2, 30)
    assert cache.make_room(10) and cache.keys() == ["a", "b"]
    assert cache.make_room(40) and cache.keys() == ["b"]
    assert not cache.make_room(101) and cache.keys() == ["b"]
    assert cache.bytes == 30


def _changes() -> dict[str, Any]:
    def in_place(layer: torch.nn.Linear) -> None:
        with torch.no_grad():
            layer.weight[0, 0] += 1

    def loaded(layer: torch.nn.Linear) -> None:
        layer.load_state_dict({name: value + 1 for name, value in layer.state_dict().items()})

    def assigned(layer: torch.nn.Linear) -> None:
        layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)

    def another(layer: torch.nn.Linear) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())

    def dtype(layer: torch.nn.Linear) -> None:
        layer.to(torch.float32 if layer.weight.dtype == torch.float16 else torch.float16)

    return {f.__name__: f for f in (in_place, loaded, assigned, another, dtype)}


@pytest.mark.parametrize("change", _changes())
def test_what_weights_made_goes_when_they_change(change: str) -> None:
    layer = torch.nn.Linear(3, 3)
    cache: WeightCache[str, int] = WeightCache(10)
    for _ in range(3):
        cache.watch(layer.parameters())
        cache.put("made", 1, 5)
        cache.watch(layer.parameters())
        assert cache.get("made") == 1
        _changes()[change](layer)
        cache.watch(layer.parameters())
        assert (cache.get("made"), cache.bytes) == (None, 0)


def test_weights_that_moved_there_and_back_are_others() -> None:
    layer = torch.nn.Linear(3, 3)
    cache: WeightCache[str, int] = WeightCache(10)
    cache.watch(layer.parameters(), 0)
    cache.put("made", 1, 5)
    cache.watch(layer.parameters(), 2)
    assert cache.get("made") is None


def test_weights_without_a_version_keep_nothing() -> None:
    with torch.inference_mode():
        weight = torch.zeros(3)
    cache: WeightCache[str, int] = WeightCache(10)
    cache.watch([weight])
    cache.put("made", 1, 5)
    cache.watch([weight])
    assert cache.get("made") is None


def test_a_cache_does_not_hold_weights() -> None:
    cache: WeightCache[str, int] = WeightCache(10)
    weight = torch.zeros(3)
    cache.watch([weight])
    gone = weakref.ref(weight)
    del weight
    assert gone() is None
