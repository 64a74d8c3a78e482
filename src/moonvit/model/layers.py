"""Layers of tower and projector, with the names of the official checkpoints.

Shape suffixes: those of ``moonvit.model``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from moonvit.attention import (
    attend,
    rotate_,
)
from moonvit.families import PATCH, VisionConfig
from moonvit.grids import Grid
from moonvit.model.metadata import Chunk, Layout, Metadata, Positions
from moonvit.plan import NORM_VALUES, POSITION_BAND
from moonvit.quantised import Linear, PackedLinear, linear_into


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

    def forward(self, hidden_LD: torch.Tensor, scratch: Scratch, meta: Layout) -> None:
        """Run the block.

        Args:
            hidden_LD: The residual stream, changed in place.
            scratch: Memory for keys and values.
            meta: What ``prepare`` made, or as much of it.
        """
        for group in range(meta.groups):
            self._fill(hidden_LD, scratch, meta, group)
            if scratch.attended_LQ is not None:
                columns_LQ = torch.unflatten(scratch.attended_LQ, 1, (meta.groups, -1))[:, group]
                for chunk in meta.chunks:
                    columns_LQ[chunk.start : chunk.stop] = self._attended(hidden_LD, scratch, meta, chunk, group)
        for chunk in meta.chunks:
            self._finish(hidden_LD, scratch, meta, chunk)

    def _fill(self, hidden_LD: torch.Tensor, scratch: Scratch, meta: Layout, group: int) -> None:
        """Keys and values of every row and one group of heads, before any row of hidden changes."""
        for chunk in meta.chunks:
            rows = slice(chunk.start, chunk.stop)
            normed_RD = self.norm0(hidden_LD[rows])
            for part, out_LQ in ((1, scratch.keys_LQ), (2, scratch.values_LQ)):
                self._project(normed_RD, part, group, out_LQ[rows])
            del normed_RD
            rotate_(self._heads(scratch.keys_LQ[rows], meta), meta.rotary.cis(chunk.start, chunk.stop))

    def _attended(
        self, hidden_LD: torch.Tensor, scratch: Scratch, meta: Layout, chunk: Chunk, group: int
    ) -> torch.Tensor:
        """Attention output (R, Q / groups) of a chunk of rows and one group of heads."""
        width = scratch.keys_LQ.shape[1]
        q_RQ = hidden_LD.new_empty(chunk.stop - chunk.start, width)
        self._project(self.norm0(hidden_LD[chunk.start : chunk.stop]), 0, group, q_RQ)
        q_RNH = self._heads(q_RQ, meta)
        rotate_(q_RNH, meta.rotary.cis(chunk.start, chunk.stop))
        k_LNH, v_LNH = self._heads(scratch.keys_LQ, meta), self._heads(scratch.values_LQ, meta)
        return attend(q_RNH, k_LNH, v_LNH, chunk.spans, meta.backend, meta.heads_at_once).flatten(1)

    def _finish(self, hidden_LD: torch.Tensor, scratch: Scratch, meta: Layout, chunk: Chunk) -> None:
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

    def _heads(self, x_RQ: torch.Tensor, meta: Layout) -> torch.Tensor:
        return torch.unflatten(x_RQ, -1, (self.heads // meta.groups, -1))


class Encoder(nn.Module):
    """The blocks, and the norm that the merge applies."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.qkv_size = config.qkv_size
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = _norm(config)

    def forward(self, hidden_LD: torch.Tensor, meta: Layout) -> None:
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
