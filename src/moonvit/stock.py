"""What the stock towers of vLLM and SGLang take for a request: computed from formulas, never measured here.

Sources: the tensor shapes of the Kimi towers in vLLM 0.32 and SGLang 0.5.23, on CUDA with their fused kernels; the
rotary and projector figures published with the change "bound Kimi vision memory" (local-inference-lab/vllm, 459) agree.
What both do, and moonvit does not: all images of a step go through the tower as one pack, whole activations exist for
all of its rows, the rotary table covers 512 x 512 patches whatever comes, the projector runs on all tokens at once, and
under data parallelism every rank gathers padded rows and projects every image.

Where it is open whether two tensors live at once, only one is counted; scratch of kernels, CUDA graphs, encoder caches
and feature copies are left out. So a figure here is a lower estimate of the stock tower.

Letters: p patches of a pack, n its tokens, d tower width, q qkv width, i MLP width, k = 4d, e language width, h head
dimension, s bytes of an element, g = 512 * 512.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moonvit.deploy import longest_first
from moonvit.errors import ConfigError
from moonvit.families import PATCH_VALUES, Family, VisionConfig
from moonvit.grids import MAX_SIDE, Grid, as_grids
from moonvit.plan import ELEMENT_BYTES

ENGINES = {"vllm": "vLLM 0.32", "sglang": "SGLang 0.5.23"}
"""Engines whose stock towers are known, with the release the formulas were read from."""


@dataclass(frozen=True)
class _Habits:
    """How the tower of a family differs from engine to engine.

    Attributes:
        pixel_bytes: Bytes of a pixel value on the device; None is that of the activations.
        owned: Under data parallelism a rank holds only the pixels of its own images.
        embedded: Rows of width d at once while positions are added.
        copies: Rows of width q that rotating makes beyond the fused projection.
        turning: Bytes a patch and a value of a head take for rotary factors, and bytes a patch takes besides.
        divided: What tensor parallelism divides; where that is nothing, images are assigned to ranks instead.
        exact: Under data parallelism one image is sent as it is, not padded; gathered rows are put in order once more.
    """

    pixel_bytes: int | None
    owned: bool
    embedded: int
    copies: int
    turning: tuple[int, int]
    divided: frozenset[str]
    exact: bool


_BOTH = frozenset({"attention", "mlp"})
_HABITS: dict[tuple[str, Family], _Habits] = {
    ("vllm", "kimi-vl"): _Habits(None, False, 3, 0, (4, 0), _BOTH, False),
    ("vllm", "kimi-k2.5"): _Habits(1, False, 3, 0, (4, 0), _BOTH, False),
    ("vllm", "kimi-k3"): _Habits(1, False, 3, 0, (4, 0), _BOTH, False),
    ("sglang", "kimi-vl"): _Habits(None, False, 4, 0, (4, 0), _BOTH, True),
    ("sglang", "kimi-k2.5"): _Habits(None, True, 4, 3, (8, 8), frozenset({"attention"}), True),
    ("sglang", "kimi-k3"): _Habits(None, True, 4, 2, (4, 0), frozenset(), True),
}


@dataclass(frozen=True)
class StockRank:
    """What one rank of a stock tower takes.

    Attributes:
        images: Images it encodes.
        moments: Bytes that live at once, by part of the work; pixels and tables included.
    """

    images: tuple[int, ...]
    moments: dict[str, int]

    @property
    def moment(self) -> str:
        """When the most lives."""
        return max(self.moments, key=self.moments.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """The most that lives at once."""
        return self.moments[self.moment]


@dataclass(frozen=True)
class Stock:
    """What a stock tower takes for a request.

    Attributes:
        engine: Its engine and release.
        mode: How the work is spread over ranks.
        ranks: One for each rank.
    """

    engine: str
    mode: str
    ranks: tuple[StockRank, ...]

    @property
    def heaviest(self) -> StockRank:
        """The rank that takes the most."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)


def rope_construction(head_dim: int, patches: int) -> int:
    """Peak while the table of all 512 x 512 positions is built and rows are gathered from it, for the first time.

    Positions and angles of both axes in float32, their complex forms, and the table of h / 2 complex64 for each
    position: g * (10h + 12) bytes; two vectors of frequencies; and the gathered rows twice, in pieces and together.

    Args:
        head_dim: Width h of a head.
        patches: Patches of the pack.

    Returns:
        Bytes; 340,018,176 for h = 128 and 36 x 36 patches, as published.
    """
    return MAX_SIDE * MAX_SIDE * (10 * head_dim + 12) + 1024 + 2 * patches * 4 * head_dim


def rope_requested(head_dim: int, patches: int) -> int:
    """Peak where only the positions of the request are built, as the published change does.

    Args:
        head_dim: Width h of a head.
        patches: Patches of the pack.

    Returns:
        Bytes: three times the gathered rows; 1,990,656 for h = 128 and 36 x 36 patches, as published.
    """
    return 3 * patches * 4 * head_dim


def rope_table(head_dim: int) -> int:
    """The table that stays for the life of the process: h / 2 complex64 for each of 512 x 512 positions.

    Args:
        head_dim: Width h of a head.

    Returns:
        Bytes.
    """
    return MAX_SIDE * MAX_SIDE * 4 * head_dim


def attention_bytes(config: VisionConfig, patches: int, size: int, parts: int = 1, copies: int = 0) -> int:
    """A layer at its attention: residual, norm and output of width d; q, k, v, what attention gave, and copies.

    Args:
        config: The model.
        patches: Patches of the pack.
        size: Bytes of an element.
        parts: Ranks that heads are divided over.
        copies: Further rows of width q.

    Returns:
        Bytes: s * p * (3d + (4 + copies) * q / parts).
    """
    return size * patches * (3 * config.hidden_size + (4 + copies) * config.qkv_size // parts)


def mlp_bytes(config: VisionConfig, patches: int, size: int, parts: int = 1) -> int:
    """A layer at its MLP: residual and norm of width d, inner rows before and after the activation.

    Args:
        config: The model.
        patches: Patches of the pack.
        size: Bytes of an element.
        parts: Ranks that the MLP is divided over.

    Returns:
        Bytes: s * p * (2d + 2i / parts); 1.38 GB for the largest image of K3.
    """
    return size * patches * (2 * config.hidden_size + 2 * config.intermediate_size // parts)


def projector_bytes(
    config: VisionConfig, tokens: Sequence[int], size: int, parts: int = 1, concatenated: bool = True
) -> int:
    """The projector beyond the merged rows it is given.

    Args:
        config: The model.
        tokens: Tokens of each image.
        size: Bytes of an element.
        parts: Ranks that the inner rows are divided over, as the published figure has them; releases keep them whole.
        concatenated: All images at once, as stock towers do; if not, image by image into the features.

    Returns:
        Bytes: the concatenation, inner rows and features; inner rows twice, where those are wider. For three images of
        1,332 tokens of K3 over 16 ranks it falls by 34,099,200 bytes image by image, as published (104,388,608 and
        70,289,408, both 12,320,768 more than the tensors counted here).
    """
    inner = config.merged_size * size
    rows = sum(tokens) if concatenated else max(tokens, default=0)
    normed = rows * inner if config.projector == "pre_norm" else rows * inner // parts
    features = sum(tokens) * config.text_hidden_size * size
    joined = rows * inner if concatenated else 0
    return joined + rows * inner // parts + max(normed, features)


def stock(
    engine: str, config: VisionConfig, grids: Iterable[Any], *, dtype: str = "bfloat16", tp: int = 1, dp: int = 1
) -> Stock:
    """Compute what a stock tower takes for a request that comes as one step of the engine.

    Engines know a tower that is divided or images that are assigned, not both: with ``dp`` over 1, and where a tower is
    never divided, all ``tp * dp`` ranks are data parallel, by patches alone.

    Args:
        engine: A key of ``ENGINES``.
        config: The model.
        grids: One for each image or video chunk, as ``as_grids`` reads them.
        dtype: Dtype of the activations.
        tp: Ranks that share heads and MLP; heads must divide by it.
        dp: Groups that images are assigned to.

    Returns:
        Its ranks with their bytes, computed.

    Raises:
        EmptyInputError: There are no grids.
        GridError: A grid is not legal.
        ConfigError: The engine or the dtype is unknown.
    """
    pack = as_grids(grids)
    for name, value, known in (("engine", engine, list(ENGINES)), ("dtype", dtype, list(ELEMENT_BYTES))):
        if value not in known:
            raise ConfigError(f"{name} = {value!r}: known are {', '.join(known)}", param=name)
    habits, size = _HABITS[engine, config.family], ELEMENT_BYTES[dtype]
    count = tp * dp
    everything = tuple(range(len(pack)))
    pixels = PATCH_VALUES * (habits.pixel_bytes or size)
    if count == 1 or (dp == 1 and habits.divided):
        moments = _tower(config, pack, size, habits, tp)
        tokens = [grid.tokens for grid in pack]
        merged = sum(tokens) * config.merged_size * size
        moments["projecting"] = rope_table(config.head_dim) + merged + projector_bytes(config, tokens, size)
        given = sum(grid.patches for grid in pack) * pixels
        rank = StockRank(everything, {name: given + taken for name, taken in moments.items()})
        return Stock(ENGINES[engine], "one rank" if count == 1 else f"tensor parallel over {tp}", (rank,) * count)
    shares = longest_first([grid.patches for grid in pack], count)
    gathered = _gathered(config, pack, shares, size, habits)
    ranks = []
    for images in shares:
        own = tuple(pack[index] for index in images)
        patches = sum(grid.patches for grid in own)
        held = (patches if habits.owned else patches + sum(grid.patches for grid in pack)) * pixels
        table = rope_table(config.head_dim) if own else 0
        rows = sum(grid.tokens for grid in own) * config.merged_size * size
        after = {name: table + taken + (rows if name == "gathering" else 0) for name, taken in gathered.items()}
        moments = {**(_tower(config, own, size, habits, 1) if own else {}), **after}
        ranks.append(StockRank(images, {name: held + taken for name, taken in moments.items()}))
    return Stock(ENGINES[engine], f"data parallel over {count}", tuple(ranks))


def _tower(config: VisionConfig, pack: Sequence[Grid], size: int, habits: _Habits, tp: int) -> dict[str, int]:
    """What lives at once in the tower, pixels apart. The table is built at the first request and stays."""
    patches, tokens = sum(grid.patches for grid in pack), sum(grid.tokens for grid in pack)
    longest = max(grid.h * grid.w for grid in pack)
    rows = patches * config.hidden_size * size
    attention, mlp = (tp if part in habits.divided else 1 for part in ("attention", "mlp"))
    factors = patches * (habits.turning[0] * config.head_dim + habits.turning[1])
    table = rope_table(config.head_dim)
    return {
        "rotary table": rows + rope_construction(config.head_dim, patches),
        "embedding": table + habits.embedded * rows,
        "attention": table + factors + attention_bytes(config, patches, size, attention, habits.copies),
        "MLP": table + factors + mlp_bytes(config, patches, size, mlp),
        "merging": table + rows + (4 * tokens + longest) * config.hidden_size * size,
    }


def _gathered(
    config: VisionConfig, pack: Sequence[Grid], shares: Sequence[tuple[int, ...]], size: int, habits: _Habits
) -> dict[str, int]:
    """What data parallelism adds on every rank: padded rows of all ranks, and every image projected."""
    row = config.merged_size * size
    tokens = [grid.tokens for grid in pack]
    most = max(sum(tokens[index] for index in images) for images in shares)
    everyone = len(shares) * most * row
    sent = most * row
    if habits.exact and len(pack) == 1:
        everyone, sent = sum(tokens) * row, 0
    ordered = sum(tokens) * row if habits.exact else 0
    return {
        "gathering": sent + everyone,
        "projecting": (ordered or everyone) + projector_bytes(config, tokens, size),
    }
