"""The plan: budgets, micro-batches, bytes held against the allocator, FLOPs held against the published ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
import torch

from moonvit.attention import this_machine
from moonvit.bench.measure import peak
from moonvit.encoder import VisionEncoder
from moonvit.errors import BudgetError, ConfigError, EmptyInputError, GridError
from moonvit.families import FAMILIES, VisionConfig, family_config
from moonvit.grids import Grid
from moonvit.model import VisionModel
from moonvit.plan import (
    MOMENTS,
    ROWS,
    Budget,
    Machine,
    chunk_rows,
    heads_at_once,
    image_flops,
    make_plan,
    workspace_of,
)
from moonvit.reference import max_relative_error
from tests.allocator import NARROW, REQUESTS, TINY, assert_held
from tests.parity.cases import GATE
from tests.pictures import noise

K25, K3, VL = (family_config(name) for name in ("kimi-k2.5", "kimi-k3", "kimi-vl"))
STAGES = [
    "patches",
    "rope",
    "hidden",
    "kv",
    "attended",
    "embed",
    "positions",
    "attention",
    "chunk",
    "merge",
    "projector",
    "cached",
    "outputs",
    "decoded",
]

# ---- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", None),
        (" AUTO ", None),
        (1, 1),
        (268435456, 268435456),
        ("1", 1),
        ("123456", 123456),
        ("256MiB", 256 << 20),
        ("256 mib", 256 << 20),
        ("1.5GiB", 3 << 29),
        ("1.5GB", 1_500_000_000),
        ("0.5kb", 500),
        ("7B", 7),
        ("2TiB", 2 << 40),
        ("0.1GiB", (1 << 30) // 10),
    ],
)
def test_budgets(value: Any, expected: int | None) -> None:
    assert Budget(value).bytes == expected
    assert Budget(bytes=value) == Budget(value)


@pytest.mark.parametrize(
    "value",
    [
        *("", "0", "-1", "0.0000001", "MiB", "1.5.5GiB", "1,5GiB", "1e9", "nan", "inf", "256MiBs", "1 0", "auto1", "٣"),
        *("9" * 5000, 0, -1, 1.5, True, None, b"1", [1]),
    ],
)
def test_budgets_that_cannot_be(value: Any) -> None:
    with pytest.raises(ConfigError, match="budget = ") as caught:
        Budget(value)
    assert len(caught.value.message) < 200


def test_a_budget_is_a_value() -> None:
    assert Budget() == Budget("auto") != Budget(1)
    assert (str(Budget()), str(Budget("1KiB"))) == ("auto", "1024 bytes")
    assert hash(Budget(5)) == hash(Budget("5"))
    with pytest.raises(FrozenInstanceError):
        Budget(5).bytes = 6  # type: ignore[misc]


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "side", "tera", "attention"),
    [
        (K25, 32, "1.00", None),
        (K25, 64, "5.57", "2.09"),
        (K25, 128, "47.3", "33.4"),
        (K3, 32, "1.01", None),
        (K3, 64, "6.13", None),
        (K3, 128, "57.9", None),
        (K3, 256, "766", "712"),
    ],
)
def test_flops_are_the_published_ones(config: VisionConfig, side: int, tera: str, attention: str | None) -> None:
    digits = len(tera.partition(".")[2])
    flops = image_flops(config, Grid(1, side, side))
    assert f"{flops / 1e12:.{digits}f}" == tera
    if attention is not None:
        halves = [image_flops(config, Grid(1, side, side // 2)) for _ in range(2)]  # everything else is linear
        quadratic = 2 * (flops - sum(halves))
        assert f"{quadratic / 1e12:.{digits}f}" == attention


def test_flops_of_frames_and_requests() -> None:
    chunk, image = Grid(4, 8, 8), Grid(1, 8, 8)
    c = K25
    projector = 2 * image.tokens * (c.merged_size**2 + c.merged_size * c.text_hidden_size)
    attention = 4 * c.num_layers * image.patches**2 * c.qkv_size
    # four frames: four times the rows, sixteen times the scores, and one projection of their mean
    assert image_flops(c, chunk) == 4 * (image_flops(c, image) - projector - attention) + 16 * attention + projector
    assert make_plan(c, [chunk, image, image]).flops == image_flops(c, chunk) + 2 * image_flops(c, image)


# ---- chunks and micro-batches ---------------------------------------------------------------------------------------


def test_chunks_are_even_and_never_too_large() -> None:
    for total in (1, 4, 15, 16, 17, 100, 255, 256, 257, 300, 1296, 4096, 65536):
        for rows in ROWS:
            size = chunk_rows(total, rows)
            assert 1 <= size <= min(rows, total)
            assert -(-total // size) == -(-total // rows)
            assert size == total or size % 16 == 0
    assert (chunk_rows(1296, 256), chunk_rows(300, 256), chunk_rows(256, 256)) == (224, 160, 256)


def random_grids(rng: random.Random, count: int) -> list[Grid]:
    return [Grid(1, 2 * rng.randint(1, 30), 2 * rng.randint(1, 30)) for _ in range(count)]


@pytest.mark.parametrize("tight", [False, True])
def test_batches_are_consecutive_and_no_larger_than_the_largest_image(tight: bool) -> None:
    rng = random.Random(0)
    for _ in range(100):
        grids = random_grids(rng, rng.randint(1, 30))
        plan = make_plan(K25, grids, dtype="float32", machine=Machine("cuda"))
        if tight:
            needed = plan.workspace_bytes
            plan = make_plan(K25, grids, dtype="float32", machine=Machine("cuda"), budget=Budget(needed - needed // 50))
            assert (plan.groups, -plan.rows) > (1, -ROWS[0]) and plan.workspace_bytes <= needed - needed // 50
        assert [index for batch in plan.batches for index in batch.indices] == list(range(len(grids)))
        most = max(grid.patches for grid in grids)
        for batch in plan.batches:
            assert batch.patches == sum(grids[index].patches for index in batch.indices) <= most
        assert plan.patches == sum(grid.patches for grid in grids)
        assert plan.tokens == sum(grid.tokens for grid in grids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_workspace_follows_the_largest_image(name: str, dtype: str) -> None:
    config = family_config(name)
    largest = Grid(1, 64, 64)
    alone = make_plan(config, [largest], dtype=dtype)
    for others in ([largest] * 50, [Grid(1, 16, 16)] * 200, random_grids(random.Random(1), 100)):
        plan = make_plan(config, [*others, largest], dtype=dtype)
        assert plan.workspace_bytes == alone.workspace_bytes
        assert plan.stages["patches"] == alone.stages["patches"]


@pytest.mark.parametrize(
    ("dtype", "machine"),
    [("float32", Machine()), ("bfloat16", Machine("cuda")), ("bfloat16", Machine(threads=2, bfloat16=False))],
)
@pytest.mark.parametrize("config", [K25, K3, VL])
def test_workspace_grows_by_what_the_design_says(config: VisionConfig, dtype: str, machine: Machine) -> None:
    """A patch takes s * (D + 2Q) bytes, and the index that merges it."""
    size = 4 if dtype == "float32" else 2
    small, large = (make_plan(config, [Grid(1, 128, side)], dtype=dtype, machine=machine) for side in (128, 256))
    patches = large.patches - small.patches
    rope = 128 * config.head_dim // 4 * 8 + patches * 4
    grown = large.workspace_bytes - small.workspace_bytes
    assert grown == patches * size * (config.hidden_size + 2 * config.qkv_size) + rope


def test_heads_in_groups_need_less() -> None:
    """With G groups a patch takes s * (D + Q + 2Q / G) bytes."""
    grids = [Grid(1, 128, 128)]
    free = make_plan(K3, grids, dtype="float32")
    assert free.groups == 1 and free.stages["attended"] == 0
    tight = make_plan(K3, grids, dtype="float32", budget=Budget(free.workspace_bytes * 7 // 10))
    assert tight.groups >= 3 and K3.num_heads % tight.groups == 0
    assert tight.stages["kv"] == free.stages["kv"] // tight.groups
    assert tight.stages["attended"] == free.stages["kv"] // 2
    assert tight.workspace_bytes <= free.workspace_bytes * 7 // 10
    assert (tight.tokens, tight.flops) == (free.tokens, free.flops)


def test_copies_of_keys_stay_bounded() -> None:
    """Where the kernel of a CPU copies keys and values, it is given fewer heads the longer the image is."""
    assert [heads_at_once(longest, True) for longest in (4, 4096, 4097, 16384, 16385, 70000)] == [4, 4, 2, 2, 1, 1]
    assert heads_at_once(70000, False) is None


def test_a_budget_makes_chunks_and_batches_smaller() -> None:
    grids = [Grid(1, 20, 20), Grid(1, 40, 40), Grid(1, 10, 10), Grid(1, 12, 12), Grid(1, 40, 40)]
    free = make_plan(K25, grids, dtype="float32")
    assert (free.rows, free.groups, free.budget_bytes) == (256, 1, None)
    assert make_plan(K25, grids, dtype="float32", budget=Budget(free.workspace_bytes)).rows == 256
    seen = [(1, -256)]
    for budget in range(free.workspace_bytes, 0, -200_000):
        try:
            plan = make_plan(K25, grids, dtype="float32", budget=Budget(budget))
        except BudgetError:
            break
        assert plan.workspace_bytes <= budget == plan.budget_bytes
        assert plan.output_bytes == free.output_bytes and plan.flops == free.flops
        assert (plan.groups, -plan.rows) >= seen[-1]
        seen.append((plan.groups, -plan.rows))
    assert {1, K25.num_heads} <= {groups for groups, _ in seen} and len(set(seen)) > 8


def test_as_few_passes_as_the_order_allows() -> None:
    grids = [Grid(1, 8, 8), Grid(1, 8, 8), Grid(1, 40, 40), Grid(1, 8, 8), Grid(1, 20, 20), Grid(1, 20, 20)]
    assert [batch.indices for batch in make_plan(K25, grids).batches] == [(0, 1), (2,), (3, 4, 5)]
    assert [batch.indices for batch in make_plan(K25, grids[:2]).batches] == [(0,), (1,)]


def test_many_sizes_together_are_split_where_their_tables_do_not_fit() -> None:
    grids = [Grid(1, 40, 40), *(Grid(1, 2, 2 * side) for side in range(1, 40))]
    alone = make_plan(K25, grids[:1], dtype="float32")
    plan = make_plan(K25, grids, dtype="float32", budget=Budget(alone.workspace_bytes))
    assert plan.workspace_bytes <= alone.workspace_bytes
    assert plan.rows == 256


def test_too_small_a_budget_names_image_and_both_numbers() -> None:
    grids = [Grid(1, 10, 10), Grid(1, 64, 64), Grid(1, 20, 20), Grid(1, 64, 64)]
    with pytest.raises(BudgetError) as caught:
        make_plan(K25, grids, budget=Budget("10MiB"))
    needed = int(caught.value.message.split("needs ")[1].split()[0])
    assert caught.value.message == (
        f"image 1 of 4096 patches needs {needed} bytes of workspace in chunks of 16 rows and 16 groups of heads, "
        "the budget allows 10485760"
    )
    assert caught.value.param == "images[1]"
    assert make_plan(K25, grids, budget=Budget(needed)).workspace_bytes == needed
    with pytest.raises(BudgetError):
        make_plan(K25, grids, budget=Budget(needed - 1))


def test_large_requests_are_planned_at_once() -> None:
    grids = [Grid(1, 2, 2 * (number % 256 + 1)) for number in range(5000)]
    plan = make_plan(K25, [*grids, Grid(1, 128, 128)], budget=Budget("1GiB"))
    assert len(plan.batches) < 300


# ---- refusals and the document --------------------------------------------------------------------------------------


def test_nothing_and_bad_grids_and_dtypes() -> None:
    with pytest.raises(EmptyInputError):
        make_plan(K25, [])
    with pytest.raises(GridError, match="grid 1: w = 5"):
        make_plan(K25, [(2, 2), (4, 5)])
    with pytest.raises(ConfigError, match="dtype = 'int8': known are float32, bfloat16, float16"):
        make_plan(K25, [(2, 2)], dtype="int8")


def test_the_document_is_json_and_says_it_all() -> None:
    plan = make_plan(K25, [(4, 6), (2, 8, 8)], budget=Budget("1GiB"))
    document = json.loads(json.dumps(plan.to_dict()))
    assert document["images"] == [
        {"grid": [1, 4, 6], "patches": 24, "tokens": 6},
        {"grid": [2, 8, 8], "patches": 128, "tokens": 16},
    ]
    assert document["batches"] == [{"images": [0], "patches": 24}, {"images": [1], "patches": 128}]
    assert list(document["stages"]) == STAGES
    assert (document["tokens"], document["patches"], document["dtype"]) == (22, 152, "bfloat16")
    assert document["budget_bytes"] == 1 << 30
    for name in ("rows", "workspace_bytes", "output_bytes", "peak_bytes", "flops"):
        assert document[name] == getattr(plan, name) > 0


def test_sums() -> None:
    plan = make_plan(K3, [(20, 30), (8, 8)], dtype="float32")
    assert plan.output_bytes == plan.tokens * 7168 * 4 == plan.stages["outputs"]
    assert plan.stages["patches"] == 600 * 588
    assert plan.workspace_bytes == workspace_of(plan.stages)
    assert plan.stages["cached"] == (600 + 64) * 1024 * 4
    assert plan.peak_bytes == sum(plan.at_peak.values())
    assert plan.moment in MOMENTS and {*MOMENTS[plan.moment]} <= {*plan.at_peak, "attended"}
    assert all(isinstance(value, int) for value in plan.stages.values())


# ---- the allocator --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "request_"), [(n, k) for n in TINY for k in REQUESTS if n != "kimi-vl" or "frames" not in k]
)
@torch.no_grad()
def test_the_plan_is_what_the_allocator_gives(
    name: str, request_: str, dtype: str, threads: Callable[[int], None]
) -> None:
    config = family_config(name, **NARROW, **TINY[name])
    model = VisionModel.empty(config, getattr(torch, dtype)).init_weights_(0)
    for number, share in ((2, 100), (1, 80), (2, 60)):
        threads(number)
        free = make_plan(config, REQUESTS[request_], dtype=dtype, machine=this_machine())
        budget = Budget(max(1, free.workspace_bytes * share // 100))
        try:
            plan = make_plan(config, REQUESTS[request_], dtype=dtype, machine=this_machine(), budget=budget)
        except BudgetError:
            assert share < 100
            continue
        assert_held(model, plan)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_random_requests_and_budgets_are_held() -> None:
    rng = random.Random(5)
    config = family_config("kimi-k3", **NARROW, **TINY["kimi-k3"])
    model = VisionModel.empty(config).init_weights_(0)
    groups = set()
    for _ in range(40):
        grids = random_grids(rng, rng.randint(1, 4))
        free = make_plan(config, grids, dtype="float32", machine=this_machine())
        budget = Budget(int(free.workspace_bytes * rng.uniform(0.6, 1.2)))
        try:
            plan = make_plan(config, grids, dtype="float32", machine=this_machine(), budget=budget)
        except BudgetError:
            continue
        groups.add(plan.groups)
        assert_held(model, plan)
    assert len(groups) > 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "seed"), [("kimi-vl", 1), ("kimi-k2.5", 2), ("kimi-k3", 3)])
@torch.no_grad()
def test_whole_requests_stay_within_their_plan(name: str, seed: int) -> None:
    """200 requests in all, of random pictures and budgets, through caches that do not hold all their tables."""
    rng = random.Random(seed)
    widths = {**NARROW, **TINY[name]}
    enc = VisionEncoder.from_config(name, **widths, position_cache=rng.randint(0, 300_000))
    reference = VisionEncoder.from_config(name, **widths, position_cache=0)
    refused = 0
    for _ in range(67):
        sizes = [(rng.randint(28, 420), rng.randint(28, 420)) for _ in range(rng.randint(1, 4))]
        pictures = [noise(*size, seed=rng.randint(0, 99)) for size in sizes]
        enc.budget = Budget()
        free = enc.plan(sizes)
        enc.budget = Budget(int(free.workspace_bytes * rng.uniform(0.55, 1.2)))
        # The profiler does not see tables go that were there when it began.
        enc.clear_caches()
        try:
            plan = enc.plan(pictures)
        except BudgetError:
            refused += 1
            continue
        found = peak(partial(enc.encode, pictures)).peak
        assert found <= plan.peak_bytes <= found * 1.01
        assert plan.workspace_bytes <= (enc.budget.bytes or 0)
        assert enc._positions.bytes <= plan.stages["cached"] <= enc._positions.max_bytes
        for ours, theirs in zip(enc.encode(pictures), reference.encode(pictures), strict=True):
            assert max_relative_error(ours.tensor, theirs.tensor) <= GATE
    assert refused < 20
