"""What a request takes, in integers, before it runs: micro-batches, rows of a chunk, bytes of every stage, FLOPs.

The executor works from the same numbers: ``Plan.batches`` are the passes it makes, ``Plan.rows`` and ``chunk_rows`` the
chunks it cuts them into. A pass has three parts, one after the other: embedding, blocks, projecting.

Micro-batches hold consecutive images and never take more patches or bytes than the heaviest image alone, so the
workspace is that of one image whatever else the request holds. A budget makes chunks smaller, then sends the heads of a
block through in groups, until every image fits.

``chunks.py`` says how things are cut, ``cost.py`` what that takes, ``budget.py`` what it may take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from moonvit.errors import BudgetError, ConfigError
from moonvit.families import VisionConfig
from moonvit.grids import Grid, as_grids
from moonvit.plan.budget import Budget, read_bytes
from moonvit.plan.chunks import (
    GRAPH_BUDGETS,
    GRAPH_PATCHES,
    NORM_VALUES,
    PACKED_VALUES,
    POSITION_BAND,
    ROWS,
    TOKEN_ROWS,
    chunk_rows,
    graph_budget,
    graph_sequences,
    graph_starts,
    heads_at_once,
    packed_rows,
)
from moonvit.plan.cost import (
    ALWAYS,
    ELEMENT_BYTES,
    MOMENTS,
    Cost,
    Load,
    Machine,
    graph_bytes,
    image_flops,
    workspace_of,
)

__all__ = [
    "ELEMENT_BYTES",
    "GRAPH_BUDGETS",
    "GRAPH_PATCHES",
    "MOMENTS",
    "NORM_VALUES",
    "PACKED_VALUES",
    "POSITION_BAND",
    "POSITION_CACHE",
    "ROWS",
    "TOKEN_ROWS",
    "Batch",
    "Budget",
    "Kept",
    "Machine",
    "Plan",
    "chunk_rows",
    "graph_budget",
    "graph_bytes",
    "graph_sequences",
    "graph_starts",
    "heads_at_once",
    "image_flops",
    "make_plan",
    "packed_rows",
    "read_bytes",
    "workspace_of",
]

POSITION_CACHE = 4 << 20
"""Bytes of position tables that an encoder keeps where nobody says: one of 36 x 36 at K2.5 width takes 3 MB."""
EMBEDDING = ("embedding", "positions")
"""Moments at which tables that leave the cache may still be there."""
PROJECTING = ("merging", "projecting")
"""Moments at which the features of the pass are there."""


@dataclass(frozen=True)
class Kept:
    """What the caches of an encoder hold before a request.

    Attributes:
        positions: Bytes of resampled position tables that may be kept.
        grids: (h, w) of the tables that are, least recently used first.
        features: Bytes of features that may be kept.
        features_held: Bytes of those that are.
        graphs: Bytes that CUDA graphs may have, counted whether they are recorded yet or not.
    """

    positions: int = POSITION_CACHE
    grids: tuple[tuple[int, int], ...] = ()
    features: int = 0
    features_held: int = 0
    graphs: int = 0


@dataclass(frozen=True)
class Batch:
    """One pass of the tower.

    Attributes:
        indices: Images of the request, consecutive.
        patches: Their patches (L).
    """

    indices: tuple[int, ...]
    patches: int


@dataclass(frozen=True)
class Plan:
    """What a request takes.

    Attributes:
        grids: The images, in request order.
        batches: The passes, in request order.
        rows: Rows of a chunk (R).
        groups: Parts that the heads of a block go through in.
        dtype: Dtype of workspace and features, and of weights that are not packed.
        packed: Layers whose weights are, in alphabetical order, as ``make_plan`` names them.
        budget_bytes: The budget; None is "auto".
        stages: Bytes by stage, the largest over the passes: ``patches`` the pixels, ``rope`` tables and gather indices,
            ``hidden`` the residual stream, ``kv`` keys and values of a group of heads, ``attended`` what attention gave
            where there are several, ``embed`` normalised pixels, ``positions`` the resampled table, ``attention`` and
            ``chunk`` what a chunk of rows takes there and in the MLP, ``merge`` and ``projector`` what a chunk of
            tokens takes; ``cached`` what caches hold; ``outputs`` are the whole request's; ``decoded`` is what a
            picture takes at most on the host, before its pass.
        workspace_bytes: Largest sum of what lives at once in a pass, inputs, outputs and caches apart.
        output_bytes: The features of all images.
        peak_bytes: Most that lives at once beyond the weights: pixels and workspace of a pass, the outputs until then,
            and what caches hold. Pictures are decoded one at a time, before their pass, and are not in it.
        moment: When that is, one of ``MOMENTS``.
        at_peak: Bytes by stage of what lives then; they add up to ``peak_bytes``.
        flops: Floating-point operations of the request, two for each multiply-add.
    """

    grids: tuple[Grid, ...]
    batches: tuple[Batch, ...]
    rows: int
    groups: int
    dtype: str
    packed: tuple[str, ...]
    budget_bytes: int | None
    stages: dict[str, int]
    workspace_bytes: int
    output_bytes: int
    peak_bytes: int
    moment: str
    at_peak: dict[str, int]
    flops: int

    @property
    def patches(self) -> int:
        """Patches of the request."""
        return sum(grid.patches for grid in self.grids)

    @property
    def tokens(self) -> int:
        """Language tokens of the request."""
        return sum(grid.tokens for grid in self.grids)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able values."""
        return {
            "images": [{"grid": list(grid), "patches": grid.patches, "tokens": grid.tokens} for grid in self.grids],
            "patches": self.patches,
            "tokens": self.tokens,
            "batches": [{"images": list(batch.indices), "patches": batch.patches} for batch in self.batches],
            "rows": self.rows,
            "groups": self.groups,
            "dtype": self.dtype,
            "packed": list(self.packed),
            "budget_bytes": self.budget_bytes,
            "stages": dict(self.stages),
            "workspace_bytes": self.workspace_bytes,
            "output_bytes": self.output_bytes,
            "peak_bytes": self.peak_bytes,
            "moment": self.moment,
            "at_peak": dict(self.at_peak),
            "flops": self.flops,
        }


def make_plan(
    config: VisionConfig,
    grids: Iterable[Any],
    *,
    dtype: str = "bfloat16",
    budget: Budget | None = None,
    machine: Machine | None = None,
    kept: Kept | None = None,
    decoded: int = 0,
    packed: Set[str] = frozenset(),
) -> Plan:
    """Plan a request.

    Args:
        config: The model.
        grids: One for each image or video chunk, as ``as_grids`` reads them.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        budget: Bound on the workspace; None is "auto".
        machine: Where it runs; None is one thread of a CPU.
        kept: What caches hold already; None is a new encoder.
        decoded: Bytes that the largest picture takes on the host until it is patches.
        packed: Layers whose weights are FP8 or int8, as ``VisionModel.packed`` names them: of ``"wqkv"``, ``"wo"``,
            ``"fc0"``, ``"fc1"``, and ``"first"`` and ``"last"`` of the projector.

    Returns:
        The plan.

    Raises:
        EmptyInputError: There are no grids.
        GridError: A grid is not legal.
        BudgetError: An image needs more than the budget even in the smallest chunks.
        ConfigError: The dtype is unknown.
    """
    pack = as_grids(grids)
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype = {dtype!r}: known are {', '.join(ELEMENT_BYTES)}", param="dtype")
    limit = (budget or Budget()).bytes
    cost = _within(_choices(config, dtype, machine or Machine(), frozenset(packed)), pack, limit)
    batches = _batches(pack, cost)
    passes = [cost.stages(load) for load in batches]
    stages = {name: max(each[name] for each in passes) for name in passes[0]}
    outputs = [grid.tokens * config.text_hidden_size * cost.size for grid in pack]
    caches = _cached(kept or Kept(), cost, pack, batches, outputs)
    before, peak, moment, at_peak = 0, 0, "", stages
    for load, each, cached in zip(batches, passes, caches, strict=True):
        after = before + sum(outputs[index] for index in load.indices)
        for name, parts in MOMENTS.items():
            live = {part: each[part] for part in (*ALWAYS, *parts)}
            live["cached"] = cached[0] if name in EMBEDDING else cached[1]
            live["outputs"] = after if name in PROJECTING else before
            if sum(live.values()) > peak:
                peak, moment, at_peak = sum(live.values()), name, live
        before = after
    return Plan(
        grids=pack,
        batches=tuple(Batch(load.indices, load.patches) for load in batches),
        rows=cost.rows,
        groups=cost.groups,
        dtype=dtype,
        packed=tuple(sorted(packed)),
        budget_bytes=limit,
        stages={**stages, "cached": max(map(max, caches)), "outputs": before, "decoded": decoded},
        workspace_bytes=max(workspace_of(each) for each in passes),
        output_bytes=before,
        peak_bytes=peak,
        moment=moment,
        at_peak={part: count for part, count in at_peak.items() if count},
        flops=sum(image_flops(config, grid) for grid in pack),
    )


def _cached(
    kept: Kept, cost: Cost, grids: tuple[Grid, ...], batches: list[Load], outputs: list[int]
) -> list[tuple[int, int]]:
    """Most that the caches hold during each pass, while it embeds and later: tables come and go, features come."""
    c = cost.config
    held = OrderedDict((sides, cost.table(*sides)) for sides in kept.grids)
    features = kept.features_held
    caches = []
    for load in batches:
        most = sum(held.values())
        for sides in dict.fromkeys((grids[index].h, grids[index].w) for index in load.indices):
            nbytes = cost.table(*sides)
            if nbytes > kept.positions or sides == (c.pos_emb_height, c.pos_emb_width):
                continue
            held.pop(sides, None)
            while sum(held.values()) + nbytes > kept.positions:
                held.popitem(last=False)
            held[sides] = nbytes
            most = max(most, sum(held.values()))
        features = min(kept.features, features + sum(outputs[index] for index in load.indices))
        caches.append((most + features + kept.graphs, sum(held.values()) + features + kept.graphs))
    return caches


def _batches(grids: tuple[Grid, ...], cost: Cost) -> list[Load]:
    """Consecutive images, as many as take neither more patches nor more bytes than the heaviest image alone."""
    most = max(grid.patches for grid in grids)
    heaviest = max(cost.workspace(Load().plus(0, grid, cost.rows)) for grid in set(grids))
    batches: list[Load] = []
    held = Load()
    for index, grid in enumerate(grids):
        more = held.plus(index, grid, cost.rows)
        if held.indices and (more.patches > most or cost.workspace(more) > heaviest):
            batches.append(held)
            more = Load().plus(index, grid, cost.rows)
        held = more
    return [*batches, held]


def _choices(config: VisionConfig, dtype: str, machine: Machine, packed: frozenset[str]) -> list[Cost]:
    """Every way to run a pass, fastest first: larger chunks before smaller ones, few groups of heads before many."""
    # Two groups take as much as one: attended rows of all heads weigh what half the keys and values do.
    groups = [number for number in range(1, config.num_heads + 1) if config.num_heads % number == 0 and number != 2]
    scratch = machine.device == "cpu" and machine.bfloat16 and dtype != "float32"
    # Products of over 96 rows make oneDNN copy whole weights in half precision.
    sizes = [rows for rows in ROWS if rows <= 96 or not scratch]
    return [Cost(config, dtype, machine, rows, number, packed) for number in groups for rows in sizes]


def _within(choices: list[Cost], grids: tuple[Grid, ...], limit: int | None) -> Cost:
    """The fastest way in which every image, on its own, fits the budget."""
    if limit is None:
        return choices[0]
    first_of = {grid: index for index, grid in reversed(list(enumerate(grids)))}
    needs = []
    for cost in choices:
        most = max((cost.workspace(Load().plus(index, grid, cost.rows)), index) for grid, index in first_of.items())
        if most[0] <= limit:
            return cost
        needs.append((*most, cost))
    needed, image, cost = min(needs, key=lambda need: need[0])
    raise BudgetError(
        f"image {image} of {grids[image].patches} patches needs {needed} bytes of workspace in chunks of {cost.rows} "
        f"rows and {cost.groups} groups of heads, the budget allows {limit}",
        param=f"images[{image}]",
    )
