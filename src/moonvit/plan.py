"""What a request takes, in integers, before it runs: micro-batches, rows of a chunk, bytes of every stage, FLOPs.

The executor works from the same numbers: ``Plan.batches`` are the passes it makes, ``Plan.rows`` and ``chunk_rows`` the
chunks it cuts them into. A pass has three parts, one after the other: embedding, blocks, projecting. ``_Cost`` has a
term for each buffer of ``model.py``; a change there is a change here. What vendor kernels allocate for themselves is
counted too: it depends on the ``Machine``.

Micro-batches hold consecutive images and never take more patches or bytes than the heaviest image alone, so the
workspace is that of one image whatever else the request holds. A budget makes chunks smaller, then sends the heads of a
block through in groups, until every image fits.

Letters in the formulas: l patches of a micro-batch, m its tokens, r rows of a chunk, d tower width, q qkv width, i MLP
width, k = 4d, e language width, s bytes of an element.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from moonvit.errors import BudgetError, ConfigError
from moonvit.families import PATCH_VALUES, VisionConfig
from moonvit.grids import Grid, as_grids

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element for each dtype a tower can have."""
ROWS = (256, 192, 128, 96, 64, 48, 32, 16)
"""Chunk sizes, fastest first: the first one with which every image fits the budget is taken."""
TOKEN_ROWS = 96
"""Tokens that are merged and projected at a time."""
POSITION_BAND = 64
"""Channels of the position table that are resampled at a time."""
NORM_VALUES = 65_536
"""Values that RMSNorm takes at a time on a CPU."""
PACKED_VALUES = 262_144
"""Values of a packed weight that are unpacked at a time."""
HEADS_AT_ONCE = ((4096, 4), (16_384, 2), (None, 1))
"""Heads of one attention call, by the patches of the longest image, where the kernel copies keys and values."""
POSITION_CACHE = 4 << 20
"""Bytes of position tables that an encoder keeps where nobody says: one of 36 x 36 at K2.5 width takes 3 MB."""
ALWAYS = ("patches", "rope", "hidden")
"""Stages that live through a whole pass."""
MOMENTS = {
    "embedding": ("embed",),
    "positions": ("positions",),
    "attention": ("kv", "attended", "attention"),
    "MLP": ("kv", "attended", "chunk"),
    "merging": ("merge",),
    "projecting": ("projector",),
}
"""The parts of a pass, one after another, and the stages that live in each besides."""
EMBEDDING = ("embedding", "positions")
"""Moments at which tables that leave the cache may still be there."""
PROJECTING = ("merging", "projecting")
"""Moments at which the features of the pass are there."""
_STEP = 16
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}


def chunk_rows(total: int, rows: int) -> int:
    """Rows of the chunks that ``total`` rows are cut into: at most ``rows``, as equal as multiples of 16 allow.

    Args:
        total: Rows there are, at least 1.
        rows: Rows of a chunk at most.

    Returns:
        Rows of every chunk but the last, which has what remains.
    """
    chunks = -(-total // rows)
    even = -(-total // chunks)
    return min(total, rows, -(-even // _STEP) * _STEP)


def packed_rows(rows: int, columns: int) -> int:
    """Rows of a packed matrix that are unpacked at a time.

    Args:
        rows: Rows that are multiplied, at least 1.
        columns: Their length.

    Returns:
        At least 1, of ``PACKED_VALUES`` together where that allows it.
    """
    return chunk_rows(rows, max(1, PACKED_VALUES // columns))


def heads_at_once(longest: int, packs: bool) -> int | None:
    """Heads of one attention call.

    Args:
        longest: Patches of the longest image.
        packs: The kernel copies keys and values of all its heads.

    Returns:
        Their number; None is all.
    """
    if not packs:
        return None
    return next(heads for limit, heads in HEADS_AT_ONCE if limit is None or longest <= limit)


@dataclass(frozen=True)
class Machine:
    """What the memory that vendor kernels take depends on.

    Attributes:
        device: Type of the device.
        threads: Threads of the CPU.
        bfloat16: The CPU has instructions for bfloat16.
    """

    device: str = "cpu"
    threads: int = 1
    bfloat16: bool = True


@dataclass(frozen=True, init=False)
class Budget:
    """Bytes an encode may use beyond weights, inputs and outputs.

    Attributes:
        bytes: The number; None is "auto": whatever the request's largest image needs.
    """

    bytes: int | None

    def __init__(self, bytes: int | str = "auto") -> None:
        """Read a budget.

        Args:
            bytes: Bytes, text such as ``"256MiB"`` or ``"1.5GB"``, or ``"auto"``.

        Raises:
            ConfigError: It is none of these, or not at least one byte.
        """
        object.__setattr__(self, "bytes", None if _is_auto(bytes) else read_bytes(bytes, "budget", 1, ", or 'auto'"))

    def __str__(self) -> str:
        return "auto" if self.bytes is None else f"{self.bytes} bytes"


def _is_auto(value: int | str) -> bool:
    return isinstance(value, str) and value.strip().lower() == "auto"


def read_bytes(value: int | str, name: str, least: int = 0, also: str = "") -> int:
    """Read a number of bytes as people write it.

    Args:
        value: A whole number, or text such as ``"256MiB"`` or ``"1.5GB"``.
        name: What it is, for the message.
        least: The smallest legal number.
        also: What else is legal there, for the message.

    Returns:
        Bytes.

    Raises:
        ConfigError: It is neither, or under ``least``.
    """
    number: int | None = None
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)", value.strip().lower())
        if match and match[2] in _UNITS:
            number = int(Fraction(match[1]) * _UNITS[match[2]])
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None or number < least:
        raise ConfigError(
            f"{name} = {str(value)[:40]!r}: give a number of bytes of at least {least}, text such as '256MiB'{also}",
            param=name,
        )
    return number


@dataclass(frozen=True)
class Kept:
    """What the caches of an encoder hold before a request.

    Attributes:
        positions: Bytes of resampled position tables that may be kept.
        grids: (h, w) of the tables that are, least recently used first.
        features: Bytes of features that may be kept.
        features_held: Bytes of those that are.
    """

    positions: int = POSITION_CACHE
    grids: tuple[tuple[int, int], ...] = ()
    features: int = 0
    features_held: int = 0


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
    kept: Kept, cost: _Cost, grids: tuple[Grid, ...], batches: list[_Load], outputs: list[int]
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
        caches.append((most + features, sum(held.values()) + features))
    return caches


def image_flops(config: VisionConfig, grid: Grid) -> int:
    """Floating-point operations of one image through tower and projector.

    Args:
        config: The model.
        grid: The image.

    Returns:
        Linear layers, attention over all its frames, and projector; two for each multiply-add.
    """
    d, q, i = config.hidden_size, config.qkv_size, config.intermediate_size
    k, e = config.merged_size, config.text_hidden_size
    linear = grid.patches * (PATCH_VALUES * d + config.num_layers * (4 * d * q + 2 * d * i))
    attention = config.num_layers * 2 * grid.patches * grid.patches * q
    return 2 * (linear + attention + grid.tokens * (k * k + k * e))


# ---- micro-batches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """A micro-batch, as far as its bytes depend on it."""

    indices: tuple[int, ...] = ()
    patches: int = 0
    tokens: int = 0
    frames: int = 1
    longest: int = 0
    token_rows: int = 0
    frame_token_rows: int = 0
    grids: frozenset[tuple[int, int]] = frozenset()
    sides: int = 0

    def plus(self, index: int, grid: Grid, rows: int) -> _Load:
        """The micro-batch with one image more."""
        sides = (grid.h, grid.w)
        known = sides in self.grids
        tokens = chunk_rows(grid.tokens, min(rows, TOKEN_ROWS))
        return _Load(
            indices=(*self.indices, index),
            patches=self.patches + grid.patches,
            tokens=self.tokens + grid.tokens,
            frames=max(self.frames, grid.t),
            longest=max(self.longest, grid.patches),
            token_rows=max(self.token_rows, tokens),
            frame_token_rows=max(self.frame_token_rows, tokens) if grid.t > 1 else self.frame_token_rows,
            grids=self.grids if known else self.grids | {sides},
            sides=self.sides if known else self.sides + grid.h + grid.w,
        )


def _batches(grids: tuple[Grid, ...], cost: _Cost) -> list[_Load]:
    """Consecutive images, as many as take neither more patches nor more bytes than the heaviest image alone."""
    most = max(grid.patches for grid in grids)
    heaviest = max(cost.workspace(_Load().plus(0, grid, cost.rows)) for grid in set(grids))
    batches: list[_Load] = []
    held = _Load()
    for index, grid in enumerate(grids):
        more = held.plus(index, grid, cost.rows)
        if held.indices and (more.patches > most or cost.workspace(more) > heaviest):
            batches.append(held)
            more = _Load().plus(index, grid, cost.rows)
        held = more
    return [*batches, held]


def _choices(config: VisionConfig, dtype: str, machine: Machine, packed: frozenset[str]) -> list[_Cost]:
    """Every way to run a pass, fastest first: larger chunks before smaller ones, few groups of heads before many."""
    # Two groups take as much as one: attended rows of all heads weigh what half the keys and values do.
    groups = [number for number in range(1, config.num_heads + 1) if config.num_heads % number == 0 and number != 2]
    scratch = machine.device == "cpu" and machine.bfloat16 and dtype != "float32"
    # Products of over 96 rows make oneDNN copy whole weights in half precision.
    sizes = [rows for rows in ROWS if rows <= 96 or not scratch]
    return [_Cost(config, dtype, machine, rows, number, packed) for number in groups for rows in sizes]


def _within(choices: list[_Cost], grids: tuple[Grid, ...], limit: int | None) -> _Cost:
    """The fastest way in which every image, on its own, fits the budget."""
    if limit is None:
        return choices[0]
    first_of = {grid: index for index, grid in reversed(list(enumerate(grids)))}
    needs = []
    for cost in choices:
        most = max((cost.workspace(_Load().plus(index, grid, cost.rows)), index) for grid, index in first_of.items())
        if most[0] <= limit:
            return cost
        needs.append((*most, cost))
    needed, image, cost = min(needs, key=lambda need: need[0])
    raise BudgetError(
        f"image {image} of {grids[image].patches} patches needs {needed} bytes of workspace in chunks of {cost.rows} "
        f"rows and {cost.groups} groups of heads, the budget allows {limit}",
        param=f"images[{image}]",
    )


# ---- bytes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
    """Bytes of a pass: one term for each buffer that ``model.py`` and ``attention.py`` make."""

    config: VisionConfig
    dtype: str
    machine: Machine
    rows: int
    groups: int
    packed: frozenset[str]

    @property
    def size(self) -> int:
        """Bytes of an element (s)."""
        return ELEMENT_BYTES[self.dtype]

    def workspace(self, load: _Load) -> int:
        """Most that lives at once in a pass."""
        return workspace_of(self.stages(load))

    def stages(self, load: _Load) -> dict[str, int]:
        """Bytes of each stage of a pass."""
        c, s = self.config, self.size
        r = chunk_rows(load.patches, self.rows)
        m = load.token_rows
        return {
            "patches": load.patches * PATCH_VALUES,
            "rope": self._prepared(load),
            "hidden": load.patches * c.hidden_size * s,
            "kv": load.patches * 2 * c.qkv_size // self.groups * s,
            "attended": load.patches * c.qkv_size * s if self.groups > 1 else 0,
            "embed": self._embed(r),
            "positions": self._positions(load),
            "attention": self._attention(load, r),
            "chunk": self._chunk(r),
            "merge": self._merge(load, m),
            "projector": self._projector(m),
        }

    def table(self, h: int, w: int) -> int:
        """Bytes of a position table that is kept."""
        return h * w * self.config.hidden_size * self.size

    @property
    def _half(self) -> bool:
        return self.size < 4

    @property
    def _on_cpu(self) -> bool:
        return self.machine.device == "cpu"

    def _prepared(self, load: _Load) -> int:
        """What ``prepare`` made."""
        axes = load.sides * self.config.head_dim // 4 * 8
        indices = load.tokens * 16
        frames = load.frames * self.config.hidden_size * 4 if load.frames > 1 else 0
        return axes + indices + frames + 256 * self.size

    def _embed(self, r: int) -> int:
        """Indices into the table of pixel values, and the values."""
        values = r * PATCH_VALUES * self.size
        return values + max(r * PATCH_VALUES * 4, self._product(r, PATCH_VALUES))

    def _positions(self, load: _Load) -> int:
        """A band of the table in float32, where it must be copied; what it is resampled to; rounded; and the sum."""
        c, s = self.config, self.size
        channels = min(c.hidden_size, POSITION_BAND)
        bilinear = c.pos_emb_mode == "bilinear"
        copied = self._half or (bilinear and c.hidden_size > POSITION_BAND)
        table = c.pos_emb_height * c.pos_emb_width * channels * 4 if copied else 0
        most = 0
        for h, w in load.grids:
            made = h * w * channels
            # A sum with frame numbers is in float32; in half precision both operands are copied to it first.
            summed = made * (4 if not self._half else 12) if load.frames > 1 else 0
            if (h, w) == (c.pos_emb_height, c.pos_emb_width):
                most = max(most, summed)
                continue
            resampling = table + (2 * made * 4 if bilinear else made * 4 + (h + w) * 48)
            rounding = made * (4 + s) if self._half else 0
            most = max(most, resampling, rounding, made * s + summed)
        return most

    def _attention(self, load: _Load, r: int) -> int:
        """Queries of a group with normalised rows, turned, and attending; then what all heads gave and its product."""
        c, s = self.config, self.size
        q = r * c.qkv_size // self.groups * s
        factors = r * c.head_dim * 4
        turned = max(2 * factors, factors + (r * c.qkv_size // self.groups * 4 if self._half else 0))
        product = self._product(r, c.hidden_size)
        unpacking = r * c.hidden_size * s + product + self._unpacked("wqkv", c.qkv_size // self.groups, c.hidden_size)
        normed = max(self._norm(r, c.hidden_size) + product, unpacking)
        attended = q if self.groups == 1 else 0
        given = attended + r * c.hidden_size * s + self._product(r, c.qkv_size)
        given += self._unpacked("wo", c.hidden_size, c.qkv_size)
        return max(q + normed, q + turned, q + self._kernel(load, r), given)

    def _kernel(self, load: _Load, r: int) -> int:
        """One attention call, and the rows it is copied to where it is one of several."""
        c, s = self.config, self.size
        heads = c.num_heads // self.groups
        packs = self._on_cpu and self.machine.bfloat16 and self.dtype == "bfloat16"
        at_once = min(heads, heads_at_once(load.longest, packs) or heads)
        several = at_once < heads or len(load.indices) > 1
        out = r * heads * c.head_dim * s if several else 0
        call = r * at_once * (c.head_dim * s + 4)
        return out + call + (self._scores(load.longest, r, at_once, packs) if self._on_cpu else 0)

    def _scores(self, longest: int, r: int, heads: int, packs: bool) -> int:
        """Blocks of scores of torch's CPU kernel, float32, for each thread; they do not grow with the image."""
        threads, h = self.machine.threads, self.config.head_dim
        queries = min(r, 256 if r >= 768 else 64 if r >= 192 else 32)
        keys = min(512, longest)
        blocks = threads * 4 * (queries * keys + 2 * queries + queries * h)
        if self._half:
            blocks += threads * queries * keys * 2
        if packs and r >= 64 and longest >= 64:
            blocks += 2 * heads * longest * h * 2 + threads * keys * h * 2
        return blocks

    def _chunk(self, r: int) -> int:
        """Normalised, inner and outer rows of the MLP."""
        c, s = self.config, self.size
        d, i = c.hidden_size, c.intermediate_size
        products = self._product(r, d), self._product(r, i)
        first = r * (d + i) * s + products[0] + self._unpacked("fc0", i, d)
        second = r * (2 * d + i) * s + products[1] + self._unpacked("fc1", d, i)
        return max(first, second, self._norm(r, d))

    def _norm(self, rows: int, width: int) -> int:
        """Normalised rows, and what making them takes."""
        if self.config.norm == "layernorm":
            return rows * width * self.size + rows * 2 * self.size
        return rows * width * self.size + self._rms(rows, width)

    def _rms(self, rows: int, width: int) -> int:
        """RMSNorm on a CPU is put together from float32 operations on some rows."""
        if not self._on_cpu:
            return 0
        rows = min(rows, max(1, NORM_VALUES // width))
        return rows * 4 * (width * (3 if self._half else 2) + 1) + (width * 4 if self._half else 0)

    def _product(self, rows: int, width: int) -> int:
        """Scratch of oneDNN for ``rows`` rows of ``width`` values: an envelope of what was measured."""
        if not (self._half and self._on_cpu and self.machine.bfloat16):
            return 0
        if self.dtype == "float16":
            return self.machine.threads * 2_200_000
        return self.machine.threads * (
            64 * (-(-width // 64) * 64) + 128 * rows + 7168 + (16_384 if width > 2304 else 0)
        )

    def _unpacked(self, layer: str, rows: int, columns: int) -> int:
        """A block of a packed weight in float32, and in the dtype of the activations where that is another."""
        if layer not in self.packed:
            return 0
        # The last 64 FP8 values of a block are widened by way of a copy.
        return packed_rows(rows, columns) * columns * (4 + (self.size if self._half else 0)) + 128

    def _merge(self, load: _Load, m: int) -> int:
        """Gathered rows and their norm; over several frames also their sum, in float32."""

        def normed(tokens: int) -> int:
            return tokens * self.config.merged_size * self.size + self._norm(4 * tokens, self.config.hidden_size)

        values = load.frame_token_rows * self.config.merged_size
        adding = normed(load.frame_token_rows)
        if self._half and values:
            adding = max(adding, values * (self.size + 4))
        return max(normed(m), values * 4 + adding)

    def _projector(self, m: int) -> int:
        """Merged rows; normalised and inner ones, or inner ones and a norm within the output."""
        k, e = self.config.merged_size, self.config.text_hidden_size
        merged, product = m * k * self.size, self._product(m, k)
        first, last = self._unpacked("first", k, k), self._unpacked("last", e, k)
        if self.config.projector == "pre_norm":
            return max(3 * merged + product + first, 2 * merged + product + last)
        return 2 * merged + max(product + max(first, last), self._rms(m, e))


def workspace_of(stages: dict[str, int]) -> int:
    """Most that lives at once in a pass.

    Args:
        stages: Bytes by stage, as in ``Plan.stages``.

    Returns:
        Bytes beyond weights, pixels, outputs and caches.
    """
    return max(sum(stages[part] for part in (*ALWAYS[1:], *parts)) for parts in MOMENTS.values())
