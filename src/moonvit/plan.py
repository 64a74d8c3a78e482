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
from collections.abc import Iterable
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
HEADS_AT_ONCE = ((4096, 4), (16_384, 2), (None, 1))
"""Heads of one attention call, by the patches of the longest image, where the kernel copies keys and values."""
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
        object.__setattr__(self, "bytes", _read_bytes(bytes))

    def __str__(self) -> str:
        return "auto" if self.bytes is None else f"{self.bytes} bytes"


def _read_bytes(value: int | str) -> int | None:
    number: int | None = None
    if isinstance(value, str):
        text = value.strip().lower()
        if text == "auto":
            return None
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)", text)
        if match and match[2] in _UNITS:
            number = int(Fraction(match[1]) * _UNITS[match[2]])
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None or number < 1:
        raise ConfigError(
            f"budget = {str(value)[:40]!r}: give a number of bytes of at least 1, text such as '256MiB', or 'auto'",
            param="budget",
        )
    return number


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
        dtype: Dtype of weights, workspace and features.
        budget_bytes: The budget; None is "auto".
        stages: Bytes by stage, the largest over the passes: ``patches`` the pixels, ``rope`` tables and gather indices,
            ``hidden`` the residual stream, ``kv`` keys and values of a group of heads, ``attended`` what attention gave
            where there are several, ``embed`` normalised pixels, ``positions`` the resampled table, ``attention`` and
            ``chunk`` what a chunk of rows takes there and in the MLP, ``merge`` and ``projector`` what a chunk of
            tokens takes; ``outputs`` are the whole request's.
        workspace_bytes: Largest sum of what lives at once in a pass, inputs and outputs apart.
        output_bytes: The features of all images.
        peak_bytes: Workspace, the patches of the largest pass, and all outputs.
        flops: Floating-point operations of the request, two for each multiply-add.
    """

    grids: tuple[Grid, ...]
    batches: tuple[Batch, ...]
    rows: int
    groups: int
    dtype: str
    budget_bytes: int | None
    stages: dict[str, int]
    workspace_bytes: int
    output_bytes: int
    peak_bytes: int
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
            "budget_bytes": self.budget_bytes,
            "stages": dict(self.stages),
            "workspace_bytes": self.workspace_bytes,
            "output_bytes": self.output_bytes,
            "peak_bytes": self.peak_bytes,
            "flops": self.flops,
        }


def make_plan(
    config: VisionConfig,
    grids: Iterable[Any],
    *,
    dtype: str = "bfloat16",
    budget: Budget | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Plan a request.

    Args:
        config: The model.
        grids: One for each image or video chunk, as ``as_grids`` reads them.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        budget: Bound on the workspace; None is "auto".
        machine: Where it runs; None is one thread of a CPU.

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
    cost = _within(_choices(config, dtype, machine or Machine()), pack, limit)
    batches = _batches(pack, cost)
    passes = [cost.stages(load) for load in batches]
    stages = {name: max(each[name] for each in passes) for name in passes[0]}
    workspace = max(workspace_of(each) for each in passes)
    outputs = sum(grid.tokens for grid in pack) * config.text_hidden_size * cost.size
    return Plan(
        grids=pack,
        batches=tuple(Batch(load.indices, load.patches) for load in batches),
        rows=cost.rows,
        groups=cost.groups,
        dtype=dtype,
        budget_bytes=limit,
        stages={**stages, "outputs": outputs},
        workspace_bytes=workspace,
        output_bytes=outputs,
        peak_bytes=workspace + stages["patches"] + outputs,
        flops=sum(image_flops(config, grid) for grid in pack),
    )


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


def _choices(config: VisionConfig, dtype: str, machine: Machine) -> list[_Cost]:
    """Every way to run a pass, fastest first: larger chunks before smaller ones, few groups of heads before many."""
    # Two groups take as much as one: attended rows of all heads weigh what half the keys and values do.
    groups = [number for number in range(1, config.num_heads + 1) if config.num_heads % number == 0 and number != 2]
    scratch = machine.device == "cpu" and machine.bfloat16 and dtype != "float32"
    # Products of over 96 rows make oneDNN copy whole weights in half precision.
    sizes = [rows for rows in ROWS if rows <= 96 or not scratch]
    return [_Cost(config, dtype, machine, rows, number) for number in groups for rows in sizes]


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
        """A band of the table in float32, where it must be copied; what it is resampled to; and the sum."""
        c = self.config
        band = min(c.hidden_size, POSITION_BAND) * 4
        bilinear = c.pos_emb_mode == "bilinear"
        copied = self._half or (bilinear and c.hidden_size > POSITION_BAND)
        table = c.pos_emb_height * c.pos_emb_width * band if copied else 0
        most = 0
        for h, w in load.grids:
            made = h * w * band
            added = made * ((3 if self._half else 1) + (load.frames > 1))
            if (h, w) == (c.pos_emb_height, c.pos_emb_width):
                most = max(most, added if self._half else added - made)
                continue
            most = max(most, table + (2 * made if bilinear else made + (h + w) * 48), added)
        return most

    def _attention(self, load: _Load, r: int) -> int:
        """Queries of a group with normalised rows, turned, and attending; then what all heads gave and its product."""
        c, s = self.config, self.size
        q = r * c.qkv_size // self.groups * s
        factors = r * c.head_dim * 4
        turned = max(2 * factors, factors + (r * c.qkv_size // self.groups * 4 if self._half else 0))
        normed = self._norm(r, c.hidden_size) + self._product(r, c.hidden_size)
        attended = q if self.groups == 1 else 0
        given = attended + r * c.hidden_size * s + self._product(r, c.qkv_size)
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
        products = max(self._product(r, c.hidden_size), self._product(r, c.intermediate_size))
        return max(r * (2 * c.hidden_size + c.intermediate_size) * s + products, self._norm(r, c.hidden_size))

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
        merged = m * self.config.merged_size * self.size
        product = self._product(m, self.config.merged_size)
        if self.config.projector == "pre_norm":
            return 3 * merged + product
        return 2 * merged + max(product, self._rms(m, self.config.text_hidden_size))


def workspace_of(stages: dict[str, int]) -> int:
    """Most that lives at once: rotary tables and hidden rows always, the three parts of a pass one after another.

    Args:
        stages: Bytes by stage, as in ``Plan.stages``.

    Returns:
        Bytes beyond weights, pixels and outputs.
    """
    embedding = max(stages["embed"], stages["positions"])
    blocks = stages["kv"] + stages["attended"] + max(stages["attention"], stages["chunk"])
    projecting = max(stages["merge"], stages["projector"])
    return stages["rope"] + stages["hidden"] + max(embedding, blocks, projecting)
