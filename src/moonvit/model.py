"""MoonViT: patches in, language-model features out. One streaming tower for Kimi-VL, K2.5 and K3.

``prepare`` turns grids into everything a pass needs that is not a weight: row chunks, RoPE tables, the index of the
merge. It works on host integers and does all transfers. ``forward`` then never asks the device anything, and works in
place:

    patches_LC -> hidden_LD -> blocks -> merged_MK -> features_ME

Of a micro-batch only three things exist for all its rows: ``hidden`` (L, D), the keys and the values of the layer at
hand (L, 2Q). Everything else lives for one chunk of R rows: normalised rows, queries, attention output, MLP, merged
rows, projector. Workspace is therefore ``s * L * (D + 2Q)`` bytes and a constant that R sets. Where even that is too
much, a block goes through its heads in G groups: keys and values of one group, and attended rows of all, take
``s * L * (2Q / G + Q)``.

Names in the state dict are those of the official checkpoints. There are no buffers. Linear layers may hold packed
weights (``quantised.py``), so a dtype to compute in is taken from norms and the position table, never from a linear.

Shape suffixes: L packed patches, R rows of a chunk, C = 588 values of a patch, D tower width, Q qkv width, N heads,
H head dimension, M merged tokens, K = 4D, E language width, T frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from moonvit.attention import (
    Backend,
    Rotary,
    Spans,
    attend,
    choose_backend,
    make_rotary,
    make_spans,
    packs_keys,
    rotate_,
    row_ranges,
)
from moonvit.cache import WeightCache
from moonvit.errors import ConfigError, GridError, InvalidInputError
from moonvit.families import PATCH, PATCH_VALUES, PREFIXES, VisionConfig
from moonvit.grids import Grid, as_grids
from moonvit.plan import NORM_VALUES, POSITION_BAND, TOKEN_ROWS, heads_at_once
from moonvit.preprocess import NORMALISE
from moonvit.quantised import Linear, PackedLinear, as_kind, linear_into

ROWS = 256
"""Rows of a chunk where the caller does not choose."""
Positions = WeightCache[tuple[int, int], torch.Tensor]
"""Position tables (h, w, D) in the model's dtype, by (h, w)."""
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes a tower can have."""


# ---- what prepare makes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Rows ``start:stop`` of the pack, and the images they belong to."""

    start: int
    stop: int
    spans: Spans


@dataclass(frozen=True)
class Metadata:
    """Everything ``forward`` needs beside weights and patches, already on the model's device.

    Attributes:
        grids: The images, in pack order.
        starts: First row of each image, and the end of the last (images + 1).
        rows: Rows of a chunk at most.
        groups: Parts that the heads of a block are cut into.
        heads_at_once: Heads of one attention call; None is all.
        backend: Attention backend the spans were made for.
        chunks: The pack cut into chunks.
        same_grid: For each distinct (h, w), the images that have it.
        rotary: RoPE of the pack.
        merge_index_M4: Rows of the pack that become a token, first frame, in the order (0,0) (0,1) (1,0) (1,1), int32.
        frame_TD: Temporal table, float32 (T, D); None where every image has one frame.
        pixel_table: Normalised value of each uint8, in the model's dtype (256).
        positions: Where resampled position tables are kept; None keeps none.
    """

    grids: tuple[Grid, ...]
    starts: tuple[int, ...]
    rows: int
    groups: int
    heads_at_once: int | None
    backend: Backend
    chunks: tuple[Chunk, ...]
    same_grid: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    rotary: Rotary
    merge_index_M4: torch.Tensor
    frame_TD: torch.Tensor | None
    pixel_table: torch.Tensor
    positions: Positions | None = None

    @property
    def patches(self) -> int:
        """Rows of the pack (L)."""
        return self.starts[-1]


def frame_table(frames: int, width: int) -> torch.Tensor:
    """The fixed temporal table: sines, then cosines, of the frame number.

    Args:
        frames: Rows T.
        width: Tower width D.

    Returns:
        float32 (T, D). Row 0 is not zero (its cosines are 1), so it must not be added to single images.
    """
    omega = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width / 2))
    angles = torch.outer(torch.arange(frames, dtype=torch.float64), omega)
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


# ---- layers, with official names ------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """torch's, some rows at a time on the CPU: there it is put together from operations on float32 copies."""

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise rows, (R, D) to (R, D).

        Args:
            x: The rows.
            out: Where the result goes, in any floating dtype; may be ``x`` itself. None makes room.

        Returns:
            ``out``, or (R, D) in the dtype of ``x``.
        """
        if x.device.type != "cpu":
            normed: torch.Tensor = super().forward(x)
            return normed if out is None else out.copy_(normed)
        out = torch.empty_like(x) if out is None else out
        rows = max(1, NORM_VALUES // x.shape[-1])
        for start in range(0, x.shape[0], rows):
            out[start : start + rows] = super().forward(x[start : start + rows])
        return out


def _norm(config: VisionConfig) -> nn.Module:
    kind = RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


def _linear(x: torch.Tensor, layer: Linear, out: torch.Tensor, first: int = 0) -> torch.Tensor:
    """As many outputs of a linear layer as ``out`` has room for, from ``first`` on."""
    last = first + out.shape[1]
    if isinstance(layer, PackedLinear):
        return layer.into(x, out, first, last)
    return linear_into(x, layer.weight[first:last], None if layer.bias is None else layer.bias[first:last], out)


class PositionTable(nn.Module):
    """The learned position table, resampled to the grid of each image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.mode = config.pos_emb_mode
        self.weight = nn.Parameter(torch.zeros(config.pos_emb_height, config.pos_emb_width, config.hidden_size))

    def resample(self, h: int, w: int, first: int, last: int) -> torch.Tensor:
        """Channels ``first:last`` of the table on an (h, w) grid.

        Args:
            h: Patch rows.
            w: Patch columns.
            first: First channel.
            last: Channel after the last.

        Returns:
            (h, w, last - first) in the table's dtype, resampled in float32 and rounded once. Bicubic has a = -0.75 and,
            like bilinear, does not antialias.
        """
        band = self.weight[:, :, first:last]
        if band.shape[:2] == (h, w):
            return band
        made = F.interpolate(band.float().permute(2, 0, 1)[None], size=(h, w), mode=self.mode)
        return made[0].permute(1, 2, 0).to(band.dtype)

    def add_to_(self, hidden_LD: torch.Tensor, meta: Metadata) -> None:
        """Add positions, and frame numbers where there are several.

        Args:
            hidden_LD: Embedded patches, changed in place.
            meta: What ``prepare`` made.
        """
        width = hidden_LD.shape[1]
        for (h, w), images in meta.same_grid:
            kept_HWD = self._kept(h, w, meta.positions)
            # A band of channels at a time: a float32 table of the whole image would outweigh the image.
            for first in range(0, width, POSITION_BAND):
                last = min(first + POSITION_BAND, width)
                band_HWB = self.resample(h, w, first, last) if kept_HWD is None else kept_HWD[:, :, first:last]
                for image in images:
                    frames = meta.grids[image].t
                    for frame in range(frames):
                        start = meta.starts[image] + frame * h * w
                        rows_HWB = torch.unflatten(hidden_LD[start : start + h * w, first:last], 0, (h, w))
                        if frames > 1 and meta.frame_TD is not None:
                            rows_HWB.add_(band_HWB + meta.frame_TD[frame, first:last])
                        else:
                            rows_HWB.add_(band_HWB)
                del band_HWB, rows_HWB  # before the next band is made

    def _kept(self, h: int, w: int, cache: Positions | None) -> torch.Tensor | None:
        """The table on an (h, w) grid out of the cache, or into it; None where it is not to be kept."""
        if cache is None or self.weight.shape[:2] == (h, w):
            return None
        kept_HWD = cache.get((h, w))
        nbytes = h * w * self.weight[0, 0].nbytes
        if kept_HWD is None and cache.make_room(nbytes):
            kept_HWD = self.weight.new_empty(h, w, self.weight.shape[2])
            for first in range(0, kept_HWD.shape[2], POSITION_BAND):
                last = min(first + POSITION_BAND, kept_HWD.shape[2])
                kept_HWD[:, :, first:last] = self.resample(h, w, first, last)
            cache.put((h, w), kept_HWD, nbytes)
        return kept_HWD


class PatchEmbed(nn.Module):
    """Pixels to the tower's width: normalise, project, add positions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, kernel_size=PATCH, stride=PATCH, bias=config.patch_bias)
        self.pos_emb = PositionTable(config)

    def forward(self, patches_LC: torch.Tensor, meta: Metadata) -> torch.Tensor:
        """Embed the patches of a pack.

        Args:
            patches_LC: uint8, or normalised floats of any floating dtype.
            meta: What ``prepare`` made.

        Returns:
            hidden_LD in the model's dtype.
        """
        weight_DC = self.proj.weight.flatten(1)
        hidden_LD = weight_DC.new_empty(patches_LC.shape[0], weight_DC.shape[0])
        for chunk in meta.chunks:
            rows_RC = patches_LC[chunk.start : chunk.stop]
            if rows_RC.dtype == torch.uint8:
                rows_RC = meta.pixel_table.index_select(0, rows_RC.flatten().int()).view(rows_RC.shape)
            # A product of strided rows rounds differently; patches give the same bits however they lie.
            rows_RC = rows_RC.to(weight_DC.dtype).contiguous()
            linear_into(rows_RC, weight_DC, self.proj.bias, hidden_LD[chunk.start : chunk.stop])
            del rows_RC
        self.pos_emb.add_to_(hidden_LD, meta)
        return hidden_LD


class MLP(nn.Module):
    """Two linears with the tanh flavour of GELU between them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0: Linear = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.linear_bias)
        self.fc1: Linear = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.linear_bias)

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        """One chunk, (R, D) to (R, D)."""
        inner = self.fc0(x_RD)
        torch.ops.aten.gelu_(inner, approximate="tanh")
        out_RD: torch.Tensor = self.fc1(inner)
        return out_RD


class Scratch(NamedTuple):
    """What the blocks of a pass share.

    Attributes:
        keys_LQ: Keys of one group of heads, (L, Q / groups).
        values_LQ: Its values, likewise.
        attended_LQ: Attention output of all heads (L, Q), where there are several groups.
    """

    keys_LQ: torch.Tensor
    values_LQ: torch.Tensor
    attended_LQ: torch.Tensor | None


class Block(nn.Module):
    """One pre-norm transformer block, in place on ``hidden``."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.norm0 = _norm(config)
        self.norm1 = _norm(config)
        self.wqkv: Linear = nn.Linear(config.hidden_size, 3 * config.qkv_size, bias=config.attn_bias)
        self.wo: Linear = nn.Linear(config.qkv_size, config.hidden_size, bias=config.attn_bias)
        self.mlp = MLP(config)

    def forward(self, hidden_LD: torch.Tensor, scratch: Scratch, meta: Metadata) -> None:
        """Run the block.

        Args:
            hidden_LD: The residual stream, changed in place.
            scratch: Memory for keys and values.
            meta: What ``prepare`` made.
        """
        for group in range(meta.groups):
            self._fill(hidden_LD, scratch, meta, group)
            if scratch.attended_LQ is not None:
                columns_LQ = torch.unflatten(scratch.attended_LQ, 1, (meta.groups, -1))[:, group]
                for chunk in meta.chunks:
                    columns_LQ[chunk.start : chunk.stop] = self._attended(hidden_LD, scratch, meta, chunk, group)
        for chunk in meta.chunks:
            self._finish(hidden_LD, scratch, meta, chunk)

    def _fill(self, hidden_LD: torch.Tensor, scratch: Scratch, meta: Metadata, group: int) -> None:
        """Keys and values of every row and one group of heads, before any row of hidden changes."""
        for chunk in meta.chunks:
            rows = slice(chunk.start, chunk.stop)
            normed_RD = self.norm0(hidden_LD[rows])
            for part, out_LQ in ((1, scratch.keys_LQ), (2, scratch.values_LQ)):
                self._project(normed_RD, part, group, out_LQ[rows])
            del normed_RD
            rotate_(self._heads(scratch.keys_LQ[rows], meta), meta.rotary.cis(chunk.start, chunk.stop))

    def _attended(
        self, hidden_LD: torch.Tensor, scratch: Scratch, meta: Metadata, chunk: Chunk, group: int
    ) -> torch.Tensor:
        """Attention output (R, Q / groups) of a chunk of rows and one group of heads."""
        width = scratch.keys_LQ.shape[1]
        q_RQ = hidden_LD.new_empty(chunk.stop - chunk.start, width)
        self._project(self.norm0(hidden_LD[chunk.start : chunk.stop]), 0, group, q_RQ)
        q_RNH = self._heads(q_RQ, meta)
        rotate_(q_RNH, meta.rotary.cis(chunk.start, chunk.stop))
        k_LNH, v_LNH = self._heads(scratch.keys_LQ, meta), self._heads(scratch.values_LQ, meta)
        return attend(q_RNH, k_LNH, v_LNH, chunk.spans, meta.backend, meta.heads_at_once).flatten(1)

    def _finish(self, hidden_LD: torch.Tensor, scratch: Scratch, meta: Metadata, chunk: Chunk) -> None:
        """Add attention and MLP to a chunk of rows."""
        rows_RD = hidden_LD[chunk.start : chunk.stop]
        if scratch.attended_LQ is None:
            attended_RQ = self._attended(hidden_LD, scratch, meta, chunk, 0)
        else:
            attended_RQ = scratch.attended_LQ[chunk.start : chunk.stop]
        rows_RD.add_(self.wo(attended_RQ))
        del attended_RQ
        rows_RD.add_(self.mlp(self.norm1(rows_RD)))

    def _project(self, normed_RD: torch.Tensor, part: int, group: int, out_RQ: torch.Tensor) -> None:
        """Queries (part 0), keys (1) or values (2) of one group of heads."""
        _linear(normed_RD, self.wqkv, out_RQ, part * self.wo.in_features + group * out_RQ.shape[1])

    def _heads(self, x_RQ: torch.Tensor, meta: Metadata) -> torch.Tensor:
        return torch.unflatten(x_RQ, -1, (self.heads // meta.groups, -1))


class Encoder(nn.Module):
    """The blocks, and the norm that the merge applies."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.qkv_size = config.qkv_size
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = _norm(config)

    def forward(self, hidden_LD: torch.Tensor, meta: Metadata) -> None:
        """Run all blocks, in place; ``final_layernorm`` follows row by row in ``merge``."""
        length, width = hidden_LD.shape[0], self.qkv_size // meta.groups
        keys_LQ, values_LQ = (hidden_LD.new_empty(length, width) for _ in range(2))
        attended_LQ = hidden_LD.new_empty(length, self.qkv_size) if meta.groups > 1 else None
        for block in self.blocks:
            block(hidden_LD, Scratch(keys_LQ, values_LQ, attended_LQ), meta)

    def merge(self, hidden_LD: torch.Tensor, index_R4: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Final norm, mean over frames, and 2 x 2 patches side by side, for some tokens of one image.

        Args:
            hidden_LD: The residual stream.
            index_R4: Rows of the four patches of each token in the first frame.
            grid: The image.

        Returns:
            merged_RK in the dtype of ``hidden``; the mean is taken in float32.
        """
        rows = index_R4.flatten()
        merged: torch.Tensor = self.final_layernorm(hidden_LD.index_select(0, rows))
        if grid.t > 1:
            total = merged.float()
            del merged
            for frame in range(1, grid.t):
                total += self.final_layernorm(hidden_LD.index_select(0, rows + frame * grid.h * grid.w))
            merged = total.div_(grid.t).to(hidden_LD.dtype)
        return merged.view(index_R4.shape[0], -1)


class Tower(nn.Module):
    """``vision_tower`` of the checkpoints."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)


class Projector(nn.Module):
    """Merged patches to the language model's width, with the exact flavour of GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, merged, text = config.hidden_size, config.merged_size, config.text_hidden_size
        bias, eps = config.linear_bias, config.projector_norm_eps
        self.pre_norm = nn.LayerNorm(width, eps=eps) if config.projector == "pre_norm" else None
        first, last = nn.Linear(merged, merged, bias=bias), nn.Linear(merged, text, bias=bias)
        if config.family == "kimi-vl":
            self.linear_1, self.linear_2 = first, last
        else:
            self.proj = nn.Sequential(first, nn.GELU(), last)
        self.post_norm = RMSNorm(text, eps=eps) if config.projector == "post_norm" else None

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """The two linears, whatever the family calls them."""
        first, last = (self.proj[0], self.proj[2]) if hasattr(self, "proj") else (self.linear_1, self.linear_2)
        assert isinstance(first, Linear) and isinstance(last, Linear)
        return first, last

    @property
    def dtype(self) -> torch.dtype:
        """What the projector computes in: its norm's dtype, since linears may hold packed weights."""
        norm = self.pre_norm if self.pre_norm is not None else self.post_norm
        assert norm is not None
        weight: torch.Tensor = norm.weight
        return weight.dtype

    def forward(self, merged_RK: torch.Tensor, out_RE: torch.Tensor) -> None:
        """Project one chunk of merged patches into its place in the output.

        Args:
            merged_RK: Any floating dtype, float8 included; converted only where it is not the projector's.
            out_RE: Where the features go, in any floating dtype.
        """
        first, last = self.linears
        x = merged_RK if merged_RK.dtype == self.dtype else merged_RK.to(self.dtype)
        if self.pre_norm is not None:
            x = self.pre_norm(torch.unflatten(x, -1, (4, -1))).flatten(1)
        x = first(x)
        torch.ops.aten.gelu_(x)
        if self.post_norm is None and out_RE.dtype == self.dtype:
            _linear(x, last, out_RE)
        elif self.post_norm is None:
            out_RE.copy_(last(x))
        elif out_RE.dtype == self.dtype:
            _linear(x, last, out_RE)
            self.post_norm(out_RE, out=out_RE)
        else:
            self.post_norm(last(x), out=out_RE)


# ---- the model ------------------------------------------------------------------------------------------------------


class VisionModel(nn.Module):
    """Tower and projector of one checkpoint.

    Args:
        config: Which model.
        attention: Backend, or ``"auto"`` for the fastest that runs where the weights are.
    """

    def __init__(self, config: VisionConfig, attention: Backend | str = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.moves = 0
        self.vision_tower = Tower(config)
        self._projector_name = PREFIXES[config.family][1].rstrip(".")
        self.add_module(self._projector_name, Projector(config))
        self.eval()

    @classmethod
    def empty(
        cls,
        config: VisionConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: Backend | str = "auto",
        packed: Mapping[str, torch.dtype] | None = None,
    ) -> VisionModel:
        """A model with memory for its weights, and nothing in it yet.

        Args:
            config: Which model.
            dtype: float32, bfloat16 or float16.
            device: Where the weights go.
            attention: As in the constructor.
            packed: Names of linear layers, and the dtype of their packed values; their scales come later.

        Returns:
            The model.

        Raises:
            ConfigError: The dtype is another, or a packed layer is not linear.
        """
        if dtype not in FLOAT_DTYPES:
            known = ", ".join(str(kind).removeprefix("torch.") for kind in FLOAT_DTYPES)
            raise ConfigError(f"dtype = {dtype}: a tower can be {known}", param="dtype")
        with torch.device("meta"):
            model = cls(config, attention).to(dtype)
            for name, kind in (packed or {}).items():
                model.pack(name, kind)
        return model.to_empty(device=device)

    @torch.no_grad()
    def init_weights_(self, seed: int) -> VisionModel:
        """Fill the weights with random values under which features stay near 1.

        Args:
            seed: The same seed gives the same float32 values on every device, then rounded to the model's dtype.

        Returns:
            The model.

        Raises:
            ConfigError: The seed is no whole number from 0 on, or weights are packed.
        """
        if self.packed:
            raise ConfigError("random values cannot be packed; use a model without packed weights", param="packed")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ConfigError(f"seed = {seed!r}, must be a whole number of 0 to {2**63 - 1}", param="seed")
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                values = 1.0 + 0.05 * values
            elif name.endswith("bias"):
                values *= 0.02
            elif "pos_emb" in name:
                values *= 0.2
            else:
                values *= parameter[0].numel() ** -0.5
            parameter.copy_(values)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.moves += 1  # what was made from the weights may no longer be used
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    @property
    def projector(self) -> Projector:
        """``mm_projector`` or ``multi_modal_projector``."""
        module = getattr(self, self._projector_name)
        assert isinstance(module, Projector)
        return module

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tower."""
        return self.vision_tower.patch_embed.pos_emb.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tower."""
        return self.vision_tower.patch_embed.pos_emb.weight.device

    @property
    def packed(self) -> frozenset[str]:
        """Layers that hold packed weights in at least one block, by the names that ``make_plan`` has for them."""
        first, last = self.projector.linears
        layers: list[tuple[str, nn.Module]] = [("first", first), ("last", last)]
        for block in self.vision_tower.encoder.blocks:
            assert isinstance(block, Block)
            layers += [("wqkv", block.wqkv), ("wo", block.wo), ("fc0", block.mlp.fc0), ("fc1", block.mlp.fc1)]
        return frozenset(name for name, layer in layers if isinstance(layer, PackedLinear))

    def pack(self, name: str, kind: torch.dtype | None) -> None:
        """Make room in a linear layer for weights of another kind; those it had are dropped where they were of another.

        Args:
            name: The layer, such as ``"vision_tower.encoder.blocks.0.wo"``.
            kind: ``torch.float8_e4m3fn`` or ``torch.int8``; None is a weight in the model's dtype.

        Raises:
            ConfigError: The layer is not linear.
        """
        layer = self.get_submodule(name)
        if not isinstance(layer, Linear):
            raise ConfigError(f"{name} is not a linear layer, and cannot be packed", param="packed")
        parent, _, last = name.rpartition(".")
        setattr(self.get_submodule(parent), last, as_kind(layer, kind, self.dtype))

    def prepare(
        self, grids: Iterable[Any], rows: int = ROWS, groups: int = 1, positions: Positions | None = None
    ) -> Metadata:
        """Everything a pass over some images needs beside weights and patches.

        Args:
            grids: Images of one pack: anything ``as_grids`` reads, on the host.
            rows: Rows of a chunk at most; fewer take less memory, more are faster.
            groups: Parts that the heads are cut into; a divisor of their number. More take less memory and more time.
            positions: Where resampled position tables are kept; the bits are the same without.

        Returns:
            Metadata on the model's device, good for any number of passes over patches of these grids.

        Raises:
            EmptyInputError: There are no grids.
            GridError: A grid is not legal, or has more frames than this tower takes.
            ConfigError: ``rows`` is under 1, the heads have no such groups, or the attention backend is unknown.
        """
        config, device = self.config, self.device
        pack = as_grids(grids)
        check_frames(config, pack)
        if rows < 1:
            raise ConfigError(f"rows = {rows}, must be at least 1", param="rows")
        if groups < 1 or config.num_heads % groups:
            raise ConfigError(f"groups = {groups}, must divide {config.num_heads} heads", param="groups")
        backend: Any = choose_backend(device, self.dtype) if self.attention == "auto" else self.attention

        starts, merge_index = [0], []
        same_grid: dict[tuple[int, int], list[int]] = {}
        for image, grid in enumerate(pack):
            same_grid.setdefault((grid.h, grid.w), []).append(image)
            first_frame = torch.arange(starts[-1], starts[-1] + grid.h * grid.w, dtype=torch.int32)
            squares = first_frame.view(grid.h // 2, 2, grid.w // 2, 2).transpose(1, 2)
            merge_index.append(squares.reshape(-1, 4))
            starts.append(starts[-1] + grid.patches)

        offsets = tuple(starts)
        chunks = tuple(
            Chunk(start, stop, make_spans(start, stop, offsets, backend, device))
            for start, stop in row_ranges(offsets[-1], rows)
        )
        frames = max(grid.t for grid in pack)
        return Metadata(
            grids=pack,
            starts=offsets,
            rows=rows,
            groups=groups,
            heads_at_once=heads_at_once(max(grid.patches for grid in pack), packs_keys(device, self.dtype)),
            backend=backend,
            chunks=chunks,
            same_grid=tuple((size, tuple(images)) for size, images in same_grid.items()),
            rotary=make_rotary(pack, config.head_dim, config.rope_theta, device),
            merge_index_M4=torch.cat(merge_index).to(device),
            frame_TD=frame_table(frames, config.hidden_size).to(device) if frames > 1 else None,
            pixel_table=torch.tensor(NORMALISE).to(device, self.dtype),
            positions=positions,
        )

    @torch.no_grad()
    def forward(
        self,
        patches_LC: torch.Tensor,
        meta: Metadata,
        dtype: torch.dtype | None = None,
        out: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Encode one pack of images. Inference only: it works in place and keeps nothing for a backward pass.

        Args:
            patches_LC: (L, 588) or (L, 3, 14, 14) on the model's device, images one behind the other; uint8 pixels, or
                normalised floats.
            meta: What ``prepare`` made for these images.
            dtype: Dtype of the features; None is the projector's, or that of ``out``.
            out: Where the features of each image go: (M, E) in any floating dtype, on the model's device. None makes
                room for each image when its turn comes.

        Returns:
            features_ME of each image, in order, each with storage of its own; or the tensors of ``out``.

        Raises:
            InvalidInputError: The model is in training mode, the patches are neither uint8 nor floating, or ``out`` is
                not made for these images.
            GridError: The patches are not those of the grids.
        """
        if self.training:
            raise InvalidInputError(
                "this forward is inference-only and works in place; call model.eval() first", param="training"
            )
        if out is not None:
            self._check_out(out, meta, dtype)
        tower, projector = self.vision_tower, self.projector
        if meta.positions is not None:
            meta.positions.watch([tower.patch_embed.pos_emb.weight], self.moves)
        hidden_LD = tower.patch_embed(as_patches(patches_LC, meta.patches), meta)
        tower.encoder(hidden_LD, meta)

        features, token = [], 0
        for image, grid in enumerate(meta.grids):
            index_M4 = meta.merge_index_M4[token : token + grid.tokens]
            features_ME = self._new_features(grid.tokens, dtype) if out is None else out[image]
            for start, stop in row_ranges(grid.tokens, min(meta.rows, TOKEN_ROWS)):
                projector(tower.encoder.merge(hidden_LD, index_M4[start:stop], grid), features_ME[start:stop])
            features.append(features_ME)
            token += grid.tokens
        return features

    @torch.no_grad()
    def project(
        self, merged_MK: torch.Tensor, rows: int = TOKEN_ROWS, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The projector alone, for features that come from somewhere else.

        Args:
            merged_MK: (M, 4D) or (M, 4, D), any floating dtype; converted chunk by chunk, and only where it is not
                the projector's own.
            rows: Rows of a chunk at most.
            dtype: Dtype of the result; None is the projector's.

        Returns:
            features_ME with storage of their own.
        """
        features_ME = self._new_features(merged_MK.shape[0], dtype)
        for start, stop in row_ranges(merged_MK.shape[0], rows):
            self.projector(merged_MK[start:stop].flatten(1), features_ME[start:stop])
        return features_ME

    def _check_out(self, out: Sequence[torch.Tensor], meta: Metadata, dtype: torch.dtype | None) -> None:
        shapes = [(grid.tokens, self.config.text_hidden_size) for grid in meta.grids]
        if [tuple(each.shape) for each in out] != shapes:
            raise InvalidInputError(
                f"out has shapes {[tuple(each.shape) for each in out]}, these images give {shapes}", param="out"
            )
        for each in out:
            if each.device != self.device or not each.is_floating_point() or each.dtype != (dtype or each.dtype):
                raise InvalidInputError(
                    f"out is {each.dtype} on {each.device}: expected {dtype or 'floats'} on {self.device}", param="out"
                )

    def _new_features(self, tokens: int, dtype: torch.dtype | None) -> torch.Tensor:
        width = self.config.text_hidden_size
        return torch.empty(tokens, width, dtype=dtype or self.projector.dtype, device=self.device)


def check_frames(config: VisionConfig, grids: Iterable[Grid]) -> None:
    """Refuse clips that a tower has no temporal table for.

    Args:
        config: The model.
        grids: Legal grids.

    Raises:
        GridError: One has more frames than the model takes.
    """
    for index, grid in enumerate(grids):
        if grid.t > config.pos_emb_time:
            raise GridError(
                f"grid {index}: t = {grid.t}, but {config.family} takes 1 to {config.pos_emb_time} frame(s)",
                param=f"grids[{index}]",
            )


def as_patches(patches: torch.Tensor, expected: int) -> torch.Tensor:
    """Check patches against the grids, by shape and dtype alone.

    Args:
        patches: (L, 588) or (L, 3, 14, 14).
        expected: Rows the grids ask for.

    Returns:
        A view (L, 588), or a copy where the values of a patch do not stand in one run.

    Raises:
        GridError: The shape is another, or the row count is not ``expected``.
        InvalidInputError: The dtype is neither uint8 nor floating.
    """
    if tuple(patches.shape[1:]) not in ((PATCH_VALUES,), (3, PATCH, PATCH)):
        raise GridError(
            f"patches of shape {tuple(patches.shape)}: expected (L, {PATCH_VALUES}) or (L, 3, {PATCH}, {PATCH})",
            param="patches",
        )
    if patches.shape[0] != expected:
        raise GridError(f"{patches.shape[0]} patches, but the grids ask for {expected}", param="patches")
    if patches.dtype != torch.uint8 and not patches.is_floating_point():
        raise InvalidInputError(
            f"patches are {patches.dtype}: expected uint8 pixels or normalised floats", param="patches"
        )
    return patches.flatten(1)
