"""Bytes of every buffer of a pass, and operations of an image: one term for each tensor that the executor makes.

A change of ``model/``, ``attention.py`` or ``quantised.py`` that makes another tensor is a change here. What vendor
kernels allocate for themselves is counted too: it depends on the ``Machine``.

Letters in the formulas: l patches of a micro-batch, m its tokens, r rows of a chunk, d tower width, q qkv width, i MLP
width, k = 4d, e language width, s bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonvit.families import PATCH_VALUES, VisionConfig
from moonvit.grids import Grid
from moonvit.plan.chunks import (
    NORM_VALUES,
    POSITION_BAND,
    ROWS,
    TOKEN_ROWS,
    chunk_rows,
    graph_sequences,
    heads_at_once,
    packed_rows,
)

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element for each dtype a tower can have."""
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


@dataclass(frozen=True)
class Load:
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

    def plus(self, index: int, grid: Grid, rows: int) -> Load:
        """The micro-batch with one image more."""
        sides = (grid.h, grid.w)
        known = sides in self.grids
        tokens = chunk_rows(grid.tokens, min(rows, TOKEN_ROWS))
        return Load(
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


@dataclass(frozen=True)
class Cost:
    """Bytes of a pass: one term for each buffer that ``moonvit.model`` and ``attention.py`` make."""

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

    def workspace(self, load: Load) -> int:
        """Most that lives at once in a pass."""
        return workspace_of(self.stages(load))

    def stages(self, load: Load) -> dict[str, int]:
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

    def _prepared(self, load: Load) -> int:
        """What ``prepare`` made."""
        axes = load.sides * self.config.head_dim // 4 * 8
        indices = load.tokens * 16
        frames = load.frames * self.config.hidden_size * 4 if load.frames > 1 else 0
        return axes + indices + frames + 256 * self.size

    def _embed(self, r: int) -> int:
        """Indices into the table of pixel values, and the values."""
        values = r * PATCH_VALUES * self.size
        return values + max(r * PATCH_VALUES * 4, self._product(r, PATCH_VALUES))

    def _positions(self, load: Load) -> int:
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

    def _attention(self, load: Load, r: int) -> int:
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

    def _kernel(self, load: Load, r: int) -> int:
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

    def _merge(self, load: Load, m: int) -> int:
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


def graph_bytes(config: VisionConfig, dtype: str, budget: int, packed: frozenset[str] = frozenset()) -> int:
    """Bytes of a captured graph of the blocks.

    Args:
        config: The model.
        dtype: As for ``make_plan``.
        budget: Patches that the graph has room for.
        packed: As for ``make_plan``.

    Returns:
        Its static buffers, which are hidden rows, rotary factors and lengths of sequences, and what the blocks make as
        they run: keys, values and a chunk. What CUDA keeps for the graph itself is not in it, nor what its allocator
        rounds up.
    """
    cost = Cost(config, dtype, Machine("cuda"), ROWS[0], 1, packed)
    stages = cost.stages(Load(patches=budget, longest=budget))
    factors = budget * config.head_dim * 4
    chunks = -(-budget // chunk_rows(budget, ROWS[0]))
    lengths = (chunks + 1) * (graph_sequences(budget) + 1) * 4
    return stages["hidden"] + factors + lengths + stages["kv"] + max(stages["attention"], stages["chunk"])
