"""A request over several ranks: which images go where, and what each rank then takes. Integers only.

Data parallel gives whole images to ranks, the costliest first; tensor parallel divides heads and MLP. Both are pure
functions of the request, the same in every process.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from moonvit.errors import ConfigError
from moonvit.families import VisionConfig
from moonvit.grids import as_grids
from moonvit.plan import Budget, Machine, Plan, image_flops, make_plan

MAX_RANKS = 4096
"""Ranks of one deployment."""


def longest_first(costs: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Give whole items to ranks: the costliest first, each to the rank with the least so far.

    The busiest rank gets at most 4/3 of what it would in the best of all assignments (Graham, 1969). Of equal items the
    earlier, of equal ranks the lower comes first, so every process finds the same.

    Args:
        costs: Cost of each item, 0 or more.
        ranks: Their number, at least 1.

    Returns:
        For each rank the indices of its items, in ascending order.
    """
    given: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = loads[0]
        given[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    return tuple(tuple(sorted(indices)) for indices in given)


def least_load(costs: Sequence[int], ranks: int) -> int:
    """What the busiest rank gets at least, however whole items are given to ranks.

    Args:
        costs: Cost of each item, 0 or more.
        ranks: Their number, at least 1.

    Returns:
        The largest of: the mean, rounded up; the largest item; and what must meet on one rank, since of any
        k * ranks + 1 items some k + 1 are together: the k + 1 smallest of the k * ranks + 1 largest items.
    """
    falling = sorted(costs, reverse=True)
    met = [sum(falling[k * ranks - k : k * ranks + 1]) for k in range(1, (len(falling) - 1) // ranks + 1)]
    return max([-(-sum(falling) // ranks), *falling[:1], *met])


def assign_images(config: VisionConfig, grids: Iterable[Any], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Assign the images of a request to data-parallel ranks by their floating-point operations.

    Args:
        config: The model.
        grids: The images, as ``as_grids`` reads them.
        ranks: How many ranks there are.

    Returns:
        For each rank the indices of its images, in request order; a function of the grids alone. With fewer images
        than ranks some are empty.

    Raises:
        EmptyInputError: There are no grids.
        GridError: A grid is not legal.
        ConfigError: The number of ranks is not 1 to ``MAX_RANKS``.
    """
    pack = as_grids(grids)
    _check_ranks("ranks", ranks)
    return longest_first([image_flops(config, grid) for grid in pack], ranks)


def split_tensors(config: VisionConfig, tp: int) -> VisionConfig:
    """What one rank of a tensor-parallel group has of the model.

    Heads (so queries, keys, values) and the width of the MLP are divided; patch embedding, norms, the residual stream,
    merging and the projector are whole on every rank. Nothing is counted for the sums over the group: they are taken
    as made in place.

    Args:
        config: The whole model.
        tp: Ranks of the group.

    Returns:
        A model of the same width with the heads and the MLP of one rank.

    Raises:
        ConfigError: Heads or MLP do not divide by it.
    """
    _check_ranks("tp", tp)
    heads, inner = config.num_heads, config.intermediate_size
    if heads % tp or inner % tp:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0 and inner % n == 0]
        raise ConfigError(
            f"tp = {tp}: {heads} heads and an MLP of {inner} divide over {', '.join(map(str, divisors))} ranks",
            param="tp",
        )
    return replace(config, num_heads=heads // tp, qkv_size=config.qkv_size // tp, intermediate_size=inner // tp)


def layout(tp: int | None = None, dp: int | None = None, ranks: int | None = None) -> tuple[int, int]:
    """Tensor-parallel and data-parallel size from what was said of them; ranks = tp x dp.

    Args:
        tp: Ranks that share heads and MLP; None follows from the others, or is 1.
        dp: Groups that images are assigned to; None follows from the others, or is 1.
        ranks: All ranks; None is their product.

    Returns:
        ``(tp, dp)``. Ranks alone are data parallel, as encoders do best.

    Raises:
        ConfigError: A number is not 1 to ``MAX_RANKS``, or they disagree.
    """
    for name, value in (("tp", tp), ("dp", dp), ("ranks", ranks)):
        if value is not None:
            _check_ranks(name, value)
    if ranks is None:
        tp, dp = tp or 1, dp or 1
        _check_ranks("tp x dp", tp * dp)
        return tp, dp
    known = (tp or 1) * (dp or 1)
    if ranks % known or (tp and dp and ranks != known):
        said = " x ".join(f"{name} {value}" for name, value in (("tp", tp), ("dp", dp)) if value)
        raise ConfigError(
            f"ranks = {ranks}, but {said} {f'is {known}' if tp and dp else 'does not divide it'}", param="ranks"
        )
    return (ranks // dp, dp) if dp and not tp else (tp or 1, ranks // (tp or 1))


def _check_ranks(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise ConfigError(f"{name} = {str(value)[:40]}, allowed are whole numbers of 1 to {MAX_RANKS}", param=name)


@dataclass(frozen=True)
class Share:
    """What a tensor-parallel group does of a request; each of its ranks takes the same bytes.

    Attributes:
        ranks: Its ranks.
        images: Its images, in request order.
        load: Floating-point operations of its images, over the whole group.
        plan: What one of its ranks takes to encode them; None without images.
        peak_bytes: The most a rank holds: while it encodes, or then with the features of the whole request.
    """

    ranks: tuple[int, ...]
    images: tuple[int, ...]
    load: int
    plan: Plan | None
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The share as JSON-able values."""
        made = self.plan
        return {
            "ranks": list(self.ranks),
            "images": list(self.images),
            "patches": made.patches if made else 0,
            "tokens": made.tokens if made else 0,
            "load_flops": self.load,
            "rank_flops": made.flops if made else 0,
            "stages": dict(made.stages) if made else {},
            "workspace_bytes": made.workspace_bytes if made else 0,
            "output_bytes": made.output_bytes if made else 0,
            "peak_bytes": self.peak_bytes,
        }


@dataclass(frozen=True)
class Deployment:
    """A request over several ranks.

    Attributes:
        tp: Ranks of a group, which share heads and MLP.
        dp: Groups, which images are assigned to.
        shares: One for each group.
        least_load: What the busiest group must get at least, in floating-point operations.
        whole: What one rank takes of a group that has the whole request.
    """

    tp: int
    dp: int
    shares: tuple[Share, ...]
    least_load: int
    whole: Plan

    @property
    def heaviest(self) -> Share:
        """The group whose ranks take the most bytes."""
        return max(self.shares, key=lambda share: share.peak_bytes)

    @property
    def imbalance(self) -> float:
        """Load of the busiest group over ``least_load``: 1.0 cannot be bettered."""
        return max(share.load for share in self.shares) / self.least_load

    @property
    def rank_peaks(self) -> tuple[int, ...]:
        """Peak of each rank."""
        return tuple(share.peak_bytes for share in self.shares for _ in share.ranks)

    def to_dict(self) -> dict[str, Any]:
        """The deployment as JSON-able values."""
        return {
            "tp": self.tp,
            "dp": self.dp,
            "ranks": self.tp * self.dp,
            "groups": [share.to_dict() for share in self.shares],
            "least_load_flops": self.least_load,
            "imbalance": self.imbalance,
            "peak_bytes": self.heaviest.peak_bytes,
        }


def deploy(
    config: VisionConfig,
    grids: Iterable[Any],
    *,
    tp: int = 1,
    dp: int = 1,
    dtype: str = "bfloat16",
    budget: Budget | None = None,
    machine: Machine | None = None,
    packed: Set[str] = frozenset(),
) -> Deployment:
    """Plan a request over ``tp * dp`` ranks.

    Each group of ``tp`` ranks encodes and projects its own images; then every rank has the features of all of them,
    moved at their exact sizes.

    Args:
        config: The model.
        grids: One for each image or video chunk, as ``as_grids`` reads them.
        tp: Ranks that share heads and MLP, as ``split_tensors`` counts them.
        dp: Groups that images are assigned to, as ``assign_images`` does.
        dtype: Dtype of workspace and features, and of weights that are not packed.
        budget: Bound on the workspace of each rank; None is "auto".
        machine: What each rank is; None is one thread of a CPU.
        packed: As in ``make_plan``.

    Returns:
        The deployment, the same in every process.

    Raises:
        EmptyInputError: There are no grids.
        GridError: A grid is not legal.
        BudgetError: An image needs more than the budget even in the smallest chunks.
        ConfigError: A number of ranks or the dtype cannot be.
    """
    pack = as_grids(grids)
    part = split_tensors(config, tp)
    _check_ranks("tp x dp", tp * dp)
    # The whole request first: what does not fit is named by its place in the request, not by that within a rank.
    options: dict[str, Any] = {"dtype": dtype, "budget": budget, "machine": machine, "packed": packed}
    whole = make_plan(part, pack, **options)
    costs = [image_flops(config, grid) for grid in pack]
    shares = []
    for group, images in enumerate(assign_images(config, pack, dp)):
        own = [pack[index] for index in images]
        made = make_plan(part, own, **options) if own else None
        shares.append(
            Share(
                ranks=tuple(range(group * tp, group * tp + tp)),
                images=images,
                load=sum(costs[index] for index in images),
                plan=made,
                peak_bytes=max(made.peak_bytes if made else 0, whole.output_bytes),
            )
        )
    return Deployment(tp, dp, tuple(shares), least_load(costs, dp), whole)
