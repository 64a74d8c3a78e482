"""Ranks: which image goes where, what each rank takes, and what cannot be."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from moonvit.deploy import (
    MAX_RANKS,
    assign_images,
    deploy,
    even_shares,
    layout,
    least_load,
    longest_first,
    padded_bytes,
    received_bytes,
    reduced_bytes,
    resolve_mode,
    split_tensors,
)
from moonvit.errors import BudgetError, ConfigError, EmptyInputError, GridError
from moonvit.families import VisionConfig, family_config
from moonvit.grids import Grid
from moonvit.plan import Budget, Machine, image_flops, make_plan
from moonvit.preprocess import resize_plan

K25, K3, VL = (family_config(name) for name in ("kimi-k2.5", "kimi-k3", "kimi-vl"))
FIVE = [(4000, 3000), (1920, 1080), (640, 480), (2000, 1500), (1024, 768)]


def busiest(costs: list[int], given: tuple[tuple[int, ...], ...]) -> int:
    return max(sum(costs[index] for index in indices) for indices in given)


def best(costs: list[int], ranks: int) -> int:
    """The busiest rank of the best of all assignments, by trying them."""
    spreads = itertools.product(range(ranks), repeat=len(costs))
    return min(
        max(sum(c for c, r in zip(costs, s, strict=True) if r == rank) for rank in range(ranks)) for s in spreads
    )


@pytest.mark.parametrize("assign", [longest_first, even_shares])
def test_assignments_are_near_the_best_and_whole(assign: Callable[..., tuple[tuple[int, ...], ...]]) -> None:
    rng = random.Random(3)
    for _ in range(250):
        ranks, items = rng.randint(1, 4), rng.randint(1, 6)
        costs = [rng.choice((0, 1, 5, rng.randint(1, 30))) for _ in range(items)]
        given = assign(costs, ranks)
        assert len(given) == ranks
        assert sorted(itertools.chain(*given)) == list(range(items)), "every item exactly once"
        assert all(list(indices) == sorted(indices) for indices in given)
        assert given == assign(list(costs), ranks)
        assert busiest(costs, given) <= busiest(costs, longest_first(costs, ranks))
        optimum = best(costs, ranks)
        assert 3 * ranks * busiest(costs, given) <= (4 * ranks - 1) * optimum
        assert least_load(costs, ranks) <= optimum <= busiest(costs, given)


@pytest.mark.parametrize(
    ("costs", "ranks", "expected", "least"),
    [
        ([], 2, ((), ()), 0),
        ([7], 3, ((0,), (), ()), 7),
        ([1, 1, 1], 2, ((0, 2), (1,)), 2),
        ([5, 5, 4, 4, 3, 3, 3], 3, ((0, 4, 6), (1, 5), (2, 3)), 9),
        ([100, 10, 20, 5], 2, ((0,), (1, 2, 3)), 100),
        ([4, 4, 4], 2, ((0, 2), (1,)), 8),
    ],
)
def test_assignments_by_hand(costs: list[int], ranks: int, expected: tuple[tuple[int, ...], ...], least: int) -> None:
    assert longest_first(costs, ranks) == expected
    assert least_load(costs, ranks) == least


def test_an_uneven_assignment_is_evened() -> None:
    costs = [5, 5, 4, 4, 3, 3, 3]
    assert busiest(costs, longest_first(costs, 3)) == 11
    assert busiest(costs, even_shares(costs, 3)) == 9 == least_load(costs, 3)
    assert even_shares([100] * 2, 4) == ((0,), (1,), (), ())
    rng = random.Random(4)
    bettered = 0
    for _ in range(300):
        ranks, items = rng.randint(2, 8), rng.randint(1, 40)
        costs = [rng.randint(0, 50) for _ in range(items)]
        given = even_shares(costs, ranks)
        bettered += busiest(costs, given) < busiest(costs, longest_first(costs, ranks))
        assert sorted(itertools.chain(*given)) == list(range(items))
        full = [bool(indices) for indices in given]
        assert full == sorted(full, reverse=True), "idle ranks come last"
        heads = [max(costs[index] for index in indices) for indices in given if indices]
        if given != longest_first(costs, ranks):
            assert heads == sorted(heads, reverse=True)
    assert bettered > 30


@pytest.mark.parametrize(("items", "ranks", "seconds"), [(64, 8, 0.005), (500, 1024, 0.1), (4000, 1024, 5.0)])
def test_assigning_is_quick(items: int, ranks: int, seconds: float) -> None:
    rng = random.Random(5)
    grids = [resize_plan(K25.rule, rng.randint(28, 4000), rng.randint(28, 4000)).grid for _ in range(items)]
    costs = [image_flops(K25, grid) for grid in grids]
    times = []
    for _ in range(3):  # the quickest, since other work may share the machine
        start = time.perf_counter()
        even_shares(costs, ranks)
        times.append(time.perf_counter() - start)
    assert min(times) < seconds


def test_images_go_by_their_operations_and_nothing_else() -> None:
    # By patches alone the four small ones would weigh as much as the large one; attention makes it heavier.
    grids = [Grid(1, 64, 64), *[Grid(1, 32, 32)] * 4]
    assert assign_images(K25, grids, 2) == ((0,), (1, 2, 3, 4))
    assert assign_images(K25, [tuple(grid) for grid in grids], 2) == assign_images(K25, grids, 2)
    assert assign_images(K25, grids, 1) == ((0, 1, 2, 3, 4),)
    with pytest.raises(EmptyInputError):
        assign_images(K25, [], 2)
    with pytest.raises(GridError):
        assign_images(K25, [(3, 4)], 2)


def test_sixteen_ranks_of_k3() -> None:
    grids = [resize_plan(K3.rule, *size).grid for size in FIVE]
    made = deploy(K3, grids, dp=16, machine=Machine("cuda"))
    assert [share.images for share in made.shares] == [(0,), (3,), (1,), (4,), (2,), *[()] * 11]
    assert made.imbalance == 1.0 and made.least_load == image_flops(K3, grids[0])
    outputs = sum(grid.tokens for grid in grids) * 7168 * 2
    held = outputs + 17 * 16  # and 16 bytes that this rank says, and that all of them said
    for share in made.shares:
        if share.plan is None:
            assert share.peak_bytes == held and share.load == 0
            continue
        own = make_plan(K3, [grids[index] for index in share.images], machine=Machine("cuda"))
        assert share.received_bytes == outputs - own.output_bytes and share.reduced_bytes == 0
        assert share.plan == own and share.peak_bytes == max(own.peak_bytes, held)
    assert made.heaviest is made.shares[0] and len(made.rank_peaks) == 16
    document = json.loads(json.dumps(made.to_dict()))
    assert document["ranks"] == 16 and document["groups"][15]["images"] == []
    assert document["padded_bytes"] == 16 * grids[0].tokens * 7168 * 2
    assert document["over_mean"] == pytest.approx(16 * made.least_load / sum(share.load for share in made.shares))
    assert document["received_bytes"] == 15 * outputs
    assert sum(group["patches"] for group in document["groups"]) == sum(grid.patches for grid in grids)


@pytest.mark.parametrize(("config", "tp"), [(K25, 4), (K3, 2), (VL, 16)])
def test_tensor_parallel_ranks_take_their_part(config: VisionConfig, tp: int) -> None:
    grids = [Grid(1, 64, 64)]
    whole = make_plan(config, grids, dtype="float32", machine=Machine("cuda"))
    made = deploy(config, grids, tp=tp, dtype="float32", machine=Machine("cuda"))
    [share] = made.shares
    assert share.ranks == tuple(range(tp)) and share.plan is not None
    part = share.plan.stages
    for name in ("patches", "rope", "hidden", "positions", "merge", "projector", "outputs"):
        assert part[name] == whole.stages[name], name
    assert part["kv"] * tp == whole.stages["kv"]
    assert part["chunk"] < whole.stages["chunk"]
    linear = [image_flops(c, grids[0]) - image_flops(c, Grid(1, 64, 32)) for c in (config, split_tensors(config, tp))]
    assert linear[0] / tp < linear[1] < linear[0]
    assert share.load == image_flops(config, grids[0])


def test_bytes_moved() -> None:
    outputs, shares = [10, 20, 30], ((2,), (0, 1), ())
    assert received_bytes(outputs, shares) == (30, 30, 60)
    assert padded_bytes(outputs, shares) == 90
    assert received_bytes([7], ((0,),)) == (0,) and padded_bytes([7], ((0,),)) == 7
    # Two sums a layer, of which a rank of four receives 2 x 3/4.
    assert reduced_bytes(K3, 4096, 4) == 27 * 2 * 4096 * 1024 * 2 * 2 * 3 // 4
    assert reduced_bytes(K25, 100, 2, "float32") == 27 * 2 * 100 * 1152 * 4
    assert reduced_bytes(K25, 100, 1) == reduced_bytes(K25, 0, 4) == 0
    made = deploy(K3, [(64, 64), (32, 32)], tp=2, dp=2)
    first, second = made.shares
    assert first.plan and second.plan
    assert (first.received_bytes, second.received_bytes) == (second.plan.output_bytes, first.plan.output_bytes)
    assert made.received_bytes == 2 * (first.plan.output_bytes + second.plan.output_bytes)
    assert made.padded_bytes == 2 * first.plan.output_bytes
    assert first.reduced_bytes == reduced_bytes(K3, 4096, 2) == 4 * second.reduced_bytes


def test_modes() -> None:
    assert resolve_mode(K3, 16) == resolve_mode(K25, 16, "auto") == resolve_mode(K3, 4, "data") == "data"
    assert resolve_mode(K25, 16, "tensor") == resolve_mode(K3, 4, "tensor") == "tensor"
    with pytest.raises(ConfigError, match="12 heads and an MLP of 4096 divide over 1, 2, 4 ranks"):
        resolve_mode(K3, 16, "tensor")
    with pytest.raises(ConfigError, match="mode = 'both': known are auto, data, tensor"):
        resolve_mode(K3, 16, "both")
    with pytest.raises(ConfigError, match="ranks = 0"):
        resolve_mode(K3, 0)
    assert layout(ranks=16, mode="auto") == layout(ranks=16, mode="data") == layout(1, None, 16, "data") == (1, 16)
    assert layout(ranks=16, mode="tensor") == layout(16, 1, None, "tensor") == (16, 1)
    assert layout(tp=4, ranks=16, mode="auto") == (4, 4)
    for said, message in (
        ((2, None, None, "data"), "mode = data, but tp = 2, which it leaves at 1"),
        ((None, 2, 4, "tensor"), "mode = tensor, but dp = 2, which it leaves at 1"),
        ((4, None, 16, "tensor"), "ranks = 16, but tp 4 x dp 1 is 4"),
        ((None, None, None, "x" * 99), "mode = 'xxx"),
    ):
        with pytest.raises(ConfigError) as caught:
            layout(*said)
        assert caught.value.message.startswith(message) and len(caught.value.message) < 150


def test_groups_and_ranks_combine() -> None:
    made = deploy(K25, [(8, 8), (16, 16), (12, 12)], tp=2, dp=2)
    assert [share.ranks for share in made.shares] == [(0, 1), (2, 3)]
    assert [share.images for share in made.shares] == [(1,), (0, 2)]
    assert len(made.rank_peaks) == 4 and made.rank_peaks[0] == made.rank_peaks[1]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((None, None, None), (1, 1)),
        ((4, None, None), (4, 1)),
        ((None, 4, None), (1, 4)),
        ((2, 3, None), (2, 3)),
        ((None, None, 16), (1, 16)),
        ((4, None, 16), (4, 4)),
        ((None, 4, 16), (4, 4)),
        ((4, 4, 16), (4, 4)),
    ],
)
def test_layouts(said: tuple[Any, Any, Any], expected: tuple[int, int]) -> None:
    assert layout(*said) == expected


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ((4, 4, 8), "ranks = 8, but tp 4 x dp 4 is 16"),
        ((2, 2, 16), "ranks = 16, but tp 2 x dp 2 is 4"),
        ((4, None, 6), "ranks = 6, but tp 4 does not divide it"),
        ((None, 4, 6), "ranks = 6, but dp 4 does not divide it"),
        ((0, None, None), f"tp = 0, allowed are whole numbers of 1 to {MAX_RANKS}"),
        ((None, -1, None), f"dp = -1, allowed are whole numbers of 1 to {MAX_RANKS}"),
        ((None, None, 10**50), "ranks = 1000"),
        ((MAX_RANKS, 2, None), f"tp x dp = {2 * MAX_RANKS}"),
    ],
)
def test_layouts_that_disagree(said: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(*said)
    assert caught.value.message.startswith(message) and len(caught.value.message) < 150


def test_heads_that_do_not_divide_are_refused_with_the_divisors() -> None:
    with pytest.raises(ConfigError, match="tp = 8: 12 heads and an MLP of 4096 divide over 1, 2, 4 ranks"):
        deploy(K3, [(8, 8)], tp=8)
    with pytest.raises(ConfigError, match="tp = 32: 16 heads and an MLP of 4304 divide over 1, 2, 4, 8, 16 ranks"):
        split_tensors(K25, 32)


def test_what_does_not_fit_is_named_by_its_place_in_the_request() -> None:
    with pytest.raises(BudgetError, match="image 2 of 4096 patches"):
        deploy(K25, [(8, 8), (8, 8), (64, 64)], dp=3, budget=Budget("10MiB"))


@pytest.mark.parametrize("config", [K25, K3, VL])
@pytest.mark.parametrize("machine", [Machine(), Machine("cuda")])
def test_what_lives_at_the_peak_adds_up_to_it(config: VisionConfig, machine: Machine) -> None:
    rng = random.Random(9)
    for _ in range(20):
        grids = [Grid(1, 2 * rng.randint(1, 60), 2 * rng.randint(1, 60)) for _ in range(rng.randint(1, 6))]
        for share in (100, 70):
            free = make_plan(config, grids, machine=machine)
            try:
                plan = make_plan(config, grids, machine=machine, budget=Budget(free.workspace_bytes * share // 100))
            except BudgetError:
                continue
            assert sum(plan.at_peak.values()) == plan.peak_bytes, plan.moment
            assert set(plan.at_peak) <= set(plan.stages) and all(plan.at_peak.values())
