"""A request over several ranks: which images go where, what each rank takes and what it moves. Integers only.

Data parallel gives whole images to ranks, the costliest first; tensor parallel divides heads and MLP. Both are pure
functions of the request, the same in every process.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from moonvit.errors import ConfigError
from moonvit.families import VisionConfig
from moonvit.grids import as_grids
from moonvit.plan import ELEMENT_BYTES, Budget, Machine, Plan, image_flops, make_plan

MAX_RANKS = 4096
"""Ranks of one deployment."""
MODES = ("auto", "data", "tensor")
"""How a request may be spread over ranks."""
AGREED_BYTES = 16
"""What a rank tells the others before and after its work."""
HALVINGS = 10
"""Capacities that are tried while items are packed tighter: a thousandth of the way to the bound is near enough."""
COMPARISONS = 8192
"""Pairs of ranks that are compared for an exchange, then an assignment is left as it is."""


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
    busy = min(ranks, len(costs))  # the others stay empty
    given: list[list[int]] = [[] for _ in range(busy)]
    loads = [(0, rank) for rank in range(busy)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = loads[0]
        given[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    return (*(tuple(sorted(indices)) for indices in given), *[()] * (ranks - busy))


def even_shares(costs: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Give whole items to ranks, more evenly than ``longest_first`` where that is over a hundredth off the bound.

    Then items are also packed as tightly as they go into ranks of one capacity, halving the way between bound and what
    was reached (Coffman, Garey and Johnson, 1978), and the busiest rank exchanges single items with others while that
    helps. The best of both is kept, so the busiest rank never gets more than ``longest_first`` gives it.

    Args:
        costs: Cost of each item, 0 or more.
        ranks: Their number, at least 1.

    Returns:
        For each rank the indices of its items, in ascending order; ranks by their costliest item, those without last.
    """
    first = longest_first(costs, ranks)
    least, most = least_load(costs, ranks), _busiest(costs, first)
    enough = least + least // 100
    if most <= enough:
        return first
    tight = _packed(costs, ranks, least, most)
    evened = [_exchanged(costs, given, enough) for given in (first, tight) if given]
    best = min(evened, key=lambda given: _busiest(costs, given))
    # Exchanges mix the ranks up; idle ones come last as they do in longest_first.
    best = sorted(best, key=lambda indices: min(((-costs[index], index) for index in indices), default=(1, 0)))
    return tuple(tuple(sorted(indices)) for indices in best)


def _busiest(costs: Sequence[int], given: Iterable[Sequence[int]]) -> int:
    return max((sum(costs[index] for index in indices) for indices in given if indices), default=0)


def _packed(costs: Sequence[int], ranks: int, least: int, most: int) -> list[list[int]]:
    """Items in ranks of the smallest capacity under ``most`` that is found, the largest first, each where it fits best.

    Nothing where there is none.
    """
    falling = sorted(range(len(costs)), key=lambda index: -costs[index])
    found: list[list[int]] = []
    for _ in range(HALVINGS):
        if least >= most:
            break
        capacity = (least + most) // 2
        rooms = [(capacity, rank) for rank in range(ranks)]
        given: list[list[int]] = [[] for _ in range(ranks)]
        for index in falling:
            place = bisect_left(rooms, (costs[index], -1))
            if place == ranks:
                least = capacity + 1
                break
            room, rank = rooms.pop(place)
            given[rank].append(index)
            insort(rooms, (room - costs[index], rank))
        else:
            found, most = given, _busiest(costs, given)
    return found


def _exchanged(costs: Sequence[int], given: Iterable[Sequence[int]], enough: int) -> list[list[int]]:
    """An assignment after the busiest rank gave single items away, or exchanged them for smaller ones."""
    # Nothing (cost 0, index -1) is the first item of every rank: exchanged for it, an item is given away.
    held = [[(0, -1), *sorted((costs[index], index) for index in indices)] for indices in given]
    loads = [sum(cost for cost, _ in items) for items in held]
    for _ in range(COMPARISONS // len(held)):
        top = max(range(len(loads)), key=loads.__getitem__)
        if loads[top] <= enough:
            break
        choices = []
        for other, items in enumerate(held):
            gap = loads[top] - loads[other]
            for item in held[top][1:]:
                # The nearer to half the gap the difference, the more even both become.
                place = bisect_left(items, (item[0] - gap // 2, -1))
                for back in items[max(place - 1, 0) : place + 1]:
                    if 0 < item[0] - back[0] < gap:
                        after = max(loads[top] - item[0] + back[0], loads[other] + item[0] - back[0])
                        choices.append((after, other, item, back))
        if not choices:
            break
        _, other, item, back = min(choices)
        held[top].remove(item)
        insort(held[other], item)
        if back[1] >= 0:
            held[other].remove(back)
            insort(held[top], back)
        loads[top] -= item[0] - back[0]
        loads[other] += item[0] - back[0]
    return [[index for _, index in items[1:]] for items in held]


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
    return even_shares([image_flops(config, grid) for grid in pack], ranks)


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


def resolve_mode(config: VisionConfig, ranks: int, mode: str = "auto") -> Literal["data", "tensor"]:
    """How a group of ranks encodes.

    ``"auto"`` is data parallel whatever the model: it needs no head to divide, moves a request's features once where
    tensor parallelism sums every layer twice, and every rank has the weights either way, which are small beside a
    language model's. One picture alone then keeps one rank busy; who wants that shared asks for ``"tensor"``.

    Args:
        config: The model.
        ranks: Of the group.
        mode: One of ``MODES``.

    Returns:
        ``"data"`` or ``"tensor"``.

    Raises:
        ConfigError: The mode is unknown, the number is not 1 to ``MAX_RANKS``, or heads or MLP do not divide by it for
            ``"tensor"``; the message has the numbers they divide over.
    """
    _check_mode(mode)
    _check_ranks("ranks", ranks)
    if mode != "tensor":
        return "data"
    split_tensors(config, ranks)
    return "tensor"


def layout(
    tp: int | None = None, dp: int | None = None, ranks: int | None = None, mode: str = "auto"
) -> tuple[int, int]:
    """Tensor-parallel and data-parallel size from what was said of them; ranks = tp x dp.

    Args:
        tp: Ranks that share heads and MLP; None follows from the others, or is 1.
        dp: Groups that images are assigned to; None follows from the others, or is 1.
        ranks: All ranks; None is their product.
        mode: One of ``MODES``: ``"data"`` is tp 1, ``"tensor"`` is dp 1, ``"auto"`` says nothing further.

    Returns:
        ``(tp, dp)``. Ranks alone are data parallel, as encoders do best.

    Raises:
        ConfigError: The mode is unknown, a number is not 1 to ``MAX_RANKS``, or they disagree.
    """
    _check_mode(mode)
    for name, value in (("tp", tp), ("dp", dp), ("ranks", ranks)):
        if value is not None:
            _check_ranks(name, value)
    for word, name, value in (("data", "tp", tp), ("tensor", "dp", dp)):
        if mode == word and (value or 1) > 1:
            raise ConfigError(f"mode = {mode}, but {name} = {value}, which it leaves at 1", param="mode")
    tp, dp = 1 if mode == "data" else tp, 1 if mode == "tensor" else dp
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


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ConfigError(f"mode = {str(mode)[:40]!r}: known are {', '.join(MODES)}", param="mode")


def _check_ranks(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise ConfigError(f"{name} = {str(value)[:40]}, allowed are whole numbers of 1 to {MAX_RANKS}", param=name)


def received_bytes(outputs: Sequence[int], shares: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """What each rank of each group receives until it has every feature: those that its group did not make.

    Ranks of a tensor-parallel group all have the features of their group, since projectors are whole on each.

    Args:
        outputs: Bytes of the features of each image.
        shares: Images of each group.

    Returns:
        Bytes for each group, which every one of its ranks receives.
    """
    every = sum(outputs)
    return tuple(every - sum(outputs[index] for index in indices) if indices else every for indices in shares)


def padded_bytes(outputs: Sequence[int], shares: Sequence[Sequence[int]]) -> int:
    """What every rank holds after an all-gather of equal parts, as peers do it: each padded to the fullest.

    Args:
        outputs: Bytes of the features of each image.
        shares: Images of each group.

    Returns:
        Bytes: groups times the most that one has. All but one part of them come from others.
    """
    return len(shares) * _busiest(outputs, shares)


def reduced_bytes(config: VisionConfig, patches: int, tp: int, dtype: str = "bfloat16") -> int:
    """What each rank of a tensor-parallel group receives, and sends, while layers are summed over it.

    Attention and MLP of each layer end in a sum of patches x width. A ring passes tp - 1 parts of tp to scatter the
    sums and as many to gather them: 2 (tp - 1) / tp of their bytes, the least there is.

    Args:
        config: The whole model.
        patches: Patches that the group encodes.
        tp: Its ranks.
        dtype: Of the activations.

    Returns:
        Bytes of all layers; 0 for one rank.
    """
    part = -(-patches * config.hidden_size * ELEMENT_BYTES[dtype] // tp)
    return config.num_layers * 2 * 2 * (tp - 1) * part


@dataclass(frozen=True)
class Share:
    """What a tensor-parallel group does of a request; each of its ranks takes the same bytes.

    Attributes:
        ranks: Its ranks.
        images: Its images, in request order.
        load: Floating-point operations of its images, over the whole group.
        plan: What one of its ranks takes to encode them; None without images.
        peak_bytes: The most a rank holds: while it encodes, or then with the features of the whole request.
        received_bytes: Features that a rank receives: those of the images of other groups.
        reduced_bytes: What a rank receives while layers are summed over its group.
    """

    ranks: tuple[int, ...]
    images: tuple[int, ...]
    load: int
    plan: Plan | None
    peak_bytes: int
    received_bytes: int
    reduced_bytes: int

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
            "received_bytes": self.received_bytes,
            "reduced_bytes": self.reduced_bytes,
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
        padded_bytes: What every rank would hold after an all-gather padded to the fullest group, for comparison.
    """

    tp: int
    dp: int
    shares: tuple[Share, ...]
    least_load: int
    whole: Plan
    padded_bytes: int

    @property
    def heaviest(self) -> Share:
        """The group whose ranks take the most bytes."""
        return max(self.shares, key=lambda share: share.peak_bytes)

    @property
    def imbalance(self) -> float:
        """Load of the busiest group over ``least_load``: 1.0 cannot be bettered."""
        return max(share.load for share in self.shares) / self.least_load

    @property
    def over_mean(self) -> float:
        """Load of the busiest group over the mean: the number of groups where one image is the whole request."""
        loads = [share.load for share in self.shares]
        return max(loads) * self.dp / sum(loads)

    @property
    def received_bytes(self) -> int:
        """Features that all ranks together receive."""
        return sum(share.received_bytes * self.tp for share in self.shares)

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
            "over_mean": self.over_mean,
            "peak_bytes": self.heaviest.peak_bytes,
            "received_bytes": self.received_bytes,
            "padded_bytes": self.padded_bytes,
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
    # What ranks tell each other once they have room for all features: one buffer for what is said, one for all answers.
    words = AGREED_BYTES * (1 + dp) if dp > 1 else 0
    # The whole request first: what does not fit is named by its place in the request, not by that within a rank.
    options: dict[str, Any] = {"dtype": dtype, "budget": budget, "machine": machine, "packed": packed}
    whole = make_plan(part, pack, **options)
    costs = [image_flops(config, grid) for grid in pack]
    outputs = [grid.tokens * config.text_hidden_size * ELEMENT_BYTES[dtype] for grid in pack]
    given = assign_images(config, pack, dp)
    shares = []
    for group, (images, received) in enumerate(zip(given, received_bytes(outputs, given), strict=True)):
        own = [pack[index] for index in images]
        made = make_plan(part, own, **options) if own else None
        shares.append(
            Share(
                ranks=tuple(range(group * tp, group * tp + tp)),
                images=images,
                load=sum(costs[index] for index in images),
                plan=made,
                peak_bytes=max(made.peak_bytes if made else 0, whole.output_bytes + words),
                received_bytes=received,
                reduced_bytes=reduced_bytes(config, sum(grid.patches for grid in own), tp, dtype),
            )
        )
    return Deployment(tp, dp, tuple(shares), least_load(costs, dp), whole, padded_bytes(outputs, given))
