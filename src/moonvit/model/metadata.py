"""What a pass needs beside weights and patches: everything that is worked out of grids, on the host, before it starts.

Shape suffixes: those of ``moonvit.model``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moonvit.attention import (
    Backend,
    Factors,
    Rotary,
    Spans,
    choose_backend,
    make_rotary,
    make_spans,
    packs_keys,
    row_ranges,
)
from moonvit.cache import WeightCache
from moonvit.errors import ConfigError, GridError, InvalidInputError
from moonvit.families import PATCH, PATCH_VALUES, VisionConfig
from moonvit.grids import Grid, as_grids
from moonvit.plan import heads_at_once
from moonvit.preprocess import NORMALISE

ROWS = 256
"""Rows of a chunk where the caller does not choose."""
Positions = WeightCache[tuple[int, int], torch.Tensor]
"""Position tables (h, w, D) in the model's dtype, by (h, w)."""


@dataclass(frozen=True)
class Chunk:
    """Rows ``start:stop`` of the pack, and the images they belong to."""

    start: int
    stop: int
    spans: Spans


@dataclass(frozen=True)
class Layout:
    """What the blocks need beside weights and hidden rows.

    Attributes:
        groups: Parts that the heads of a block are cut into.
        heads_at_once: Heads of one attention call; None is all.
        backend: Attention backend the spans were made for.
        chunks: The pack cut into chunks.
        rotary: RoPE of the pack.
    """

    groups: int
    heads_at_once: int | None
    backend: Backend
    chunks: tuple[Chunk, ...]
    rotary: Rotary | Factors


@dataclass(frozen=True)
class Metadata(Layout):
    """Everything ``forward`` needs beside weights and patches, already on the model's device: a ``Layout`` and more.

    Attributes:
        grids: The images, in pack order.
        starts: First row of each image, and the end of the last (images + 1).
        rows: Rows of a chunk at most.
        same_grid: For each distinct (h, w), the images that have it.
        merge_index_M4: Rows of the pack that become a token, first frame, in the order (0,0) (0,1) (1,0) (1,1), int32.
        frame_TD: Temporal table, float32 (T, D); None where every image has one frame.
        pixel_table: Normalised value of each uint8, in the model's dtype (256).
        positions: Where resampled position tables are kept; None keeps none.
    """

    grids: tuple[Grid, ...]
    starts: tuple[int, ...]
    rows: int
    same_grid: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
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


def prepare(
    config: VisionConfig,
    grids: Iterable[Any],
    rows: int,
    groups: int,
    positions: Positions | None,
    attention: Backend | str,
    dtype: torch.dtype,
    device: torch.device,
) -> Metadata:
    """Metadata of a pack, as ``VisionModel.prepare`` documents it.

    Args:
        config: The model.
        grids: Images of one pack.
        rows: Rows of a chunk at most.
        groups: Parts that the heads are cut into.
        positions: Where resampled position tables are kept.
        attention: Backend, or ``"auto"``.
        dtype: Of the tower.
        device: Of the tower.

    Returns:
        On that device.

    Raises:
        EmptyInputError: There are no grids.
        GridError: A grid is not legal, or has more frames than this tower takes.
        ConfigError: ``rows`` is under 1, the heads have no such groups, or the attention backend is unknown.
    """
    pack = as_grids(grids)
    check_frames(config, pack)
    if rows < 1:
        raise ConfigError(f"rows = {rows}, must be at least 1", param="rows")
    if groups < 1 or config.num_heads % groups:
        raise ConfigError(f"groups = {groups}, must divide {config.num_heads} heads", param="groups")
    backend: Any = choose_backend(device, dtype) if attention == "auto" else attention

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
        heads_at_once=heads_at_once(max(grid.patches for grid in pack), packs_keys(device, dtype)),
        backend=backend,
        chunks=chunks,
        same_grid=tuple((size, tuple(images)) for size, images in same_grid.items()),
        rotary=make_rotary(pack, config.head_dim, config.rope_theta, device),
        merge_index_M4=torch.cat(merge_index).to(device),
        frame_TD=frame_table(frames, config.hidden_size).to(device) if frames > 1 else None,
        pixel_table=torch.tensor(NORMALISE).to(device, dtype),
        positions=positions,
    )


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
