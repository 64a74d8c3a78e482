"""Patch grids: what one image or video chunk is to the tower, as three integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from moonvit.errors import EmptyInputError, GridError

MAX_SIDE = 512
"""Patches along one side of the largest grid the rotary table of the official towers covers."""
MAX_FRAMES = 4
"""Frames in one video chunk: rows of the temporal table."""
MERGE = 2
"""Side of the square of patches that becomes one language token."""


class Grid(NamedTuple):
    """Patches of one image (t = 1) or video chunk, counted in frames, rows and columns.

    Attributes:
        t: Frames, 1 to 4.
        h: Patch rows of a frame, even, 2 to 512.
        w: Patch columns of a frame, even, 2 to 512.
    """

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        """Patches the tower sees: t * h * w."""
        return self.t * self.h * self.w

    @property
    def tokens(self) -> int:
        """Rows that reach the language model: frames are pooled, 2 x 2 patches are merged."""
        return (self.h // MERGE) * (self.w // MERGE)


def as_grid(value: Any, index: int = 0) -> Grid:
    """Read a grid from ``Grid``, ``(t, h, w)``, ``(h, w)``, or one row of an integer tensor or array.

    Args:
        value: What the caller gave.
        index: Its place in the request, for the message.

    Returns:
        The validated grid.

    Raises:
        GridError: It is not two or three whole numbers, a side is odd, under 2 or over 512, or t is not 1 to 4.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)) or len(items) not in (2, 3):
        raise GridError(f"grid {index}: expected (h, w) or (t, h, w), got {value!r}", param=f"grids[{index}]")
    numbers = []
    for item in items:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise GridError(f"grid {index}: {item!r} is not a whole number", param=f"grids[{index}]")
        numbers.append(int(item.__index__()))
    grid = Grid(*numbers) if len(numbers) == 3 else Grid(1, *numbers)
    if not 1 <= grid.t <= MAX_FRAMES:
        raise GridError(f"grid {index}: t = {grid.t}, allowed 1 to {MAX_FRAMES}", param=f"grids[{index}]")
    for name, side in (("h", grid.h), ("w", grid.w)):
        if not MERGE <= side <= MAX_SIDE:
            raise GridError(
                f"grid {index}: {name} = {side} patches, allowed {MERGE} to {MAX_SIDE}", param=f"grids[{index}]"
            )
        if side % MERGE:
            raise GridError(
                f"grid {index}: {name} = {side} patches is not a multiple of the merge size {MERGE}",
                param=f"grids[{index}]",
            )
    return grid


def as_grids(values: Iterable[Any]) -> tuple[Grid, ...]:
    """Read and validate the grids of a request.

    Args:
        values: Anything ``as_grid`` reads, one per image or chunk; an (N, 2) or (N, 3) integer tensor works too.

    Returns:
        The grids in request order.

    Raises:
        EmptyInputError: There are none.
        GridError: One of them is not legal.
    """
    grids = tuple(as_grid(value, index) for index, value in enumerate(values))
    if not grids:
        raise EmptyInputError("no grids: an encode request needs at least one image")
    return grids
