"""What of a checkpoint a rank of a tensor-parallel group holds, so that no rank ever has the whole of a divided tensor.

Shape suffixes: D tower width, Q qkv width, I MLP width.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from moonvit.checkpoint.names import SHAPE, WORDS, expected_shapes, known_names, part_shape, role_of
from moonvit.errors import CheckpointError
from moonvit.families import VisionConfig
from moonvit.quantised import BLOCK, SCALE_NAMES

PLAN: dict[str, tuple[Placement, Placement]] = {
    "wqkv": (Shard(0), Shard(0)),  # (3Q, D), heads of q, of k and of v
    "wo": (Shard(1), Partial()),  # (D, Q)
    "mlp.fc0": (Shard(0), Shard(0)),  # (I, D)
    "mlp.fc1": (Shard(1), Partial()),  # (D, I)
}
"""Placement of the weight and the bias of each linear of a block; everything else is ``Replicate``. A partial bias is
the first rank's, and zero elsewhere, since results are summed."""
SUMMED = tuple(layer for layer, (_, bias) in PLAN.items() if bias == Partial())
"""Layers whose results are summed over the group."""
_WORD = 4


@dataclass(frozen=True)
class Part:
    """One rank's part of a model.

    Attributes:
        config: The whole model.
        rank: The rank.
        ranks: Ranks of the group, which divide heads and MLP.
    """

    config: VisionConfig
    rank: int
    ranks: int

    def take(self, name: str, shape: tuple[int, ...], source: Any) -> torch.Tensor:
        """This rank's part of a tensor.

        Args:
            name: Of the tensor, in any known spelling.
            shape: Of the whole tensor.
            source: What gives parts of it when it is indexed: a tensor, or an open file's view of one.

        Returns:
            A tensor with storage of its own, where it is a part.

        Raises:
            CheckpointError: A scale, or a word of packed values, would have to be divided, or a matrix says of itself
                that it has another shape.
        """
        piece, last = role_of(name, known_names(self.config))
        placement, axis, parts = _place(piece.name if piece else "")
        if piece is None or (placement == Replicate() and last != SHAPE):
            return _all(source)
        if placement == Partial():
            whole = _all(source)
            return whole if self.rank == 0 else torch.zeros_like(whole)
        total = part_shape(expected_shapes(self.config)[piece.name], piece)
        if last == SHAPE:
            return self._shape(name, _all(source), total, axis if isinstance(placement, Shard) else None)
        parts = 1 if piece.part is not None else parts
        if len(shape) <= axis or (last in SCALE_NAMES and shape[axis] == 1):
            return _all(source)
        unit = 1
        if shape[axis] != total[axis]:
            unit = BLOCK if last in SCALE_NAMES else _WORD if last == WORDS else 1
        each = total[axis] // parts  # rows or columns that are divided evenly, as many times as there are parts
        own = each // self.ranks
        if own % unit:
            raise CheckpointError(
                f"{name} is packed {unit} {'rows' if axis == 0 else 'columns'} together, and {self.ranks} ranks have "
                f"{own} each: use data parallel, or ranks that have a multiple of {unit}"
            )
        starts = [(part * each + self.rank * own) // unit for part in range(parts)]
        cuts = [(slice(None),) * axis + (slice(start, start + own // unit),) for start in starts]
        taken = [source[cut] for cut in cuts]
        return torch.cat(taken) if len(taken) > 1 else taken[0].clone()

    def _shape(self, name: str, told: torch.Tensor, total: tuple[int, ...], axis: int | None) -> torch.Tensor:
        if told.tolist() != list(total):
            raise CheckpointError(f"{name} says {told.tolist()}, expected {list(total)}")
        told = told.clone()
        if axis is not None:
            told[axis] //= self.ranks
        return told


def _place(official: str) -> tuple[Placement, int, int]:
    """Placement of what belongs to a parameter, its axis, and how many parts are divided each for itself."""
    found = re.search(r"\.blocks\.\d+\.(.+)\.(weight|bias)$", official)
    if found is None or found[1] not in PLAN:
        return Replicate(), 0, 1
    placement = PLAN[found[1]][found[2] == "bias"]
    return placement, placement.dim if isinstance(placement, Shard) else 0, 3 if found[1] == "wqkv" else 1


def _all(source: Any) -> torch.Tensor:
    tensor: torch.Tensor = source[...]
    return tensor
