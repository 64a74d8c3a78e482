"""What a request takes, in integers, before it runs: micro-batches, rows of a chunk, bytes of every stage, FLOPs.

The executor works from the same numbers: ``Plan.batches`` are the passes it makes and ``Plan.rows`` the chunks it cuts
them into. Letters in the formulas: L patches of a micro-batch, R rows of a chunk, D tower width, Q qkv width, I MLP
width, K = 4D, E language width, s bytes of an element.

Micro-batches hold consecutive images and never more patches than the largest image has, so the workspace follows that
image whatever else the request holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moonvit.errors import BudgetError, ConfigError
from moonvit.families import PATCH_VALUES, VisionConfig
from moonvit.grids import Grid, as_grids

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element for each dtype a tower can have."""
ROWS = (256, 192, 128, 96, 64, 48, 32, 16)
"""Chunk sizes, fastest first: the first one whose workspace fits the budget is taken."""
POSITION_BAND = 64
"""Channels of the position table that are resampled at a time."""
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True, init=False)
class Budget:
    """Bytes an encode may use beyond weights, inputs and outputs.

    Attributes:
        bytes: The number; None is "auto": whatever the request's largest image needs.
    """

    bytes: int | None

    def __init__(self, value: int | str = "auto") -> None:
        """Read a budget.

        Args:
            value: Bytes, text such as ``"256MiB"`` or ``"1.5GB"``, or ``"auto"``.

        Raises:
            ConfigError: It is none of these, or not at least one byte.
        """
        object.__setattr__(self, "bytes", _read_bytes(value))

    def __str__(self) -> str:
        return "auto" if self.bytes is None else f"{self.bytes} bytes"


def _read_bytes(value: int | str) -> int | None:
    number: int | None = None
    if isinstance(value, str):
        if value.strip().lower() == "auto":
            return None
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match and match[2] in _UNITS:
            number = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None or number < 1:
        raise ConfigError(
            f"budget = {value!r}: give a number of bytes of at least 1, text such as '256MiB', or 'auto'",
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
        dtype: Dtype of weights, workspace and features.
        budget_bytes: The budget; None is "auto".
        stages: Bytes by stage. ``patches``, ``rope``, ``hidden``, ``kv``, ``positions``, ``embed``, ``chunk``,
            ``merge`` and ``projector`` are the largest over the passes; ``outputs`` is the whole request's.
        workspace_bytes: Largest sum of what lives at once in a pass, inputs and outputs apart.
        output_bytes: The features of all images.
        peak_bytes: Workspace, the patches of the largest pass, and all outputs.
        flops: Floating-point operations of the request, two for each multiply-add.
    """

    grids: tuple[Grid, ...]
    batches: tuple[Batch, ...]
    rows: int
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
            "dtype": self.dtype,
            "budget_bytes": self.budget_bytes,
            "stages": dict(self.stages),
            "workspace_bytes": self.workspace_bytes,
            "output_bytes": self.output_bytes,
            "peak_bytes": self.peak_bytes,
            "flops": self.flops,
        }


def make_plan(
    config: VisionConfig, grids: Iterable[Any], *, dtype: str = "bfloat16", budget: Budget | None = None
) -> Plan:
    """Plan a request.

    Args:
        config: The model.
        grids: One for each image or video chunk, as ``as_grids`` reads them.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        budget: Bound on the workspace; None is "auto".

    Returns:
        The plan.

    Raises:
        EmptyInputError: There are no grids.
        GridError: A grid is not legal.
        BudgetError: The largest image needs more than the budget even in the smallest chunks.
        ConfigError: The dtype is unknown.
    """
    pack = as_grids(grids)
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype = {dtype!r}: known are {', '.join(ELEMENT_BYTES)}", param="dtype")
    size = ELEMENT_BYTES[dtype]
    limit = (budget or Budget()).bytes
    for rows in ROWS:
        batches = _batches(pack)
        passes = [_pass_stages(config, [pack[i] for i in batch.indices], rows, size) for batch in batches]
        workspace = max(_workspace(stages) for stages in passes)
        if limit is None or workspace <= limit:
            break
    else:
        heaviest = max(range(len(passes)), key=lambda number: _workspace(passes[number]))
        image = max(batches[heaviest].indices, key=lambda index: pack[index].patches)
        raise BudgetError(
            f"image {image} of {pack[image].patches} patches needs {workspace} bytes of workspace, the budget allows "
            f"{limit}",
            param=f"images[{image}]",
        )
    stages = {name: max(each[name] for each in passes) for name in passes[0]}
    outputs = sum(grid.tokens for grid in pack) * config.text_hidden_size * size
    return Plan(
        grids=pack,
        batches=batches,
        rows=rows,
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
    d, q, i, k, e = (
        config.hidden_size,
        config.qkv_size,
        config.intermediate_size,
        config.merged_size,
        config.text_hidden_size,
    )
    linear = grid.patches * (PATCH_VALUES * d + config.num_layers * (4 * d * q + 2 * d * i))
    attention = config.num_layers * 2 * grid.patches * grid.patches * q
    return 2 * (linear + attention + grid.tokens * (k * k + k * e))


def _batches(grids: tuple[Grid, ...]) -> tuple[Batch, ...]:
    most = max(grid.patches for grid in grids)
    batches: list[Batch] = []
    held: list[int] = []
    patches = 0
    for index, grid in enumerate(grids):
        if held and patches + grid.patches > most:
            batches.append(Batch(tuple(held), patches))
            held, patches = [], 0
        held.append(index)
        patches += grid.patches
    return (*batches, Batch(tuple(held), patches))


def _pass_stages(config: VisionConfig, grids: list[Grid], rows: int, size: int) -> dict[str, int]:
    """Bytes of each stage of one pass."""
    patches = sum(grid.patches for grid in grids)
    tokens = sum(grid.tokens for grid in grids)
    d, q, i, k = config.hidden_size, config.qkv_size, config.intermediate_size, config.merged_size
    r = min(rows, patches)
    m = min(rows, max(grid.tokens for grid in grids))
    distinct = {(grid.h, grid.w) for grid in grids}
    turning = r * q * 4 + r * config.head_dim * 8  # float32 pairs of a chunk, and their factors twice
    embed = r * PATCH_VALUES * (4 + size)
    attention = r * (d + 2 * q) * size + turning
    mlp = r * (2 * d + i) * size
    last = 0 if config.projector == "pre_norm" else 2 * m * config.text_hidden_size * size
    return {
        "patches": patches * PATCH_VALUES,
        "rope": sum(h + w for h, w in distinct) * config.head_dim // 4 * 8 + patches * 8 + tokens * 16,
        "hidden": patches * d * size,
        "kv": patches * 2 * q * size,
        "positions": max(h * w for h, w in distinct) * min(d, POSITION_BAND) * 4 * 2,
        "embed": embed,
        "chunk": max(attention, mlp),
        "merge": 2 * m * k * size,
        "projector": m * k * size + last,
    }


def _workspace(stages: dict[str, int]) -> int:
    """Most that lives at once: the three parts of a pass follow one another."""
    embedding = max(stages["embed"], stages["positions"])
    blocks = stages["kv"] + stages["chunk"]
    projecting = stages["merge"] + stages["projector"]
    return stages["rope"] + stages["hidden"] + max(embedding, blocks, projecting)
