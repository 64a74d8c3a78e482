"""How rows, channels, weights and heads are cut: the constants of the executor, and the sums that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

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
GRAPH_BUDGETS = (256, 512, 1024, 2048, 4096)
"""Patches that a captured graph has room for, ascending; each is a multiple of ``GRAPH_PATCHES``."""
GRAPH_PATCHES = 64
"""Patches of such a room for each image that it takes at most, and of a sequence of padding at most."""
_STEP = 16
"""What rows of a chunk are a multiple of, where they can be."""


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


def graph_budget(patches: int, images: int, budgets: Sequence[int] = GRAPH_BUDGETS) -> int | None:
    """The graph that a pack is replayed with: the smallest it fits.

    Args:
        patches: Of the pack.
        images: Of the pack.
        budgets: Patches that the graphs have room for, ascending.

    Returns:
        Its patches; None where the pack fits none.
    """
    return next((room for room in budgets if patches <= room and images <= room // GRAPH_PATCHES), None)


def graph_sequences(budget: int) -> int:
    """Sequences that attention within a graph is made for: as many images as it takes, and its padding.

    Args:
        budget: Patches that the graph has room for.

    Returns:
        Their number, empty ones included.
    """
    return 2 * budget // GRAPH_PATCHES


def graph_starts(starts: Sequence[int], budget: int) -> list[int]:
    """First rows of the sequences of a padded pack.

    Rows of padding are sequences of their own, so that attention computes them and leaves no row as it found it, and
    short ones, so that they cost little. What is then left to ``graph_sequences`` is empty.

    Args:
        starts: First row of each image, and the end of the last.
        budget: Patches that the graph has room for; it is the one that ``graph_budget`` gives.

    Returns:
        ``graph_sequences(budget) + 1`` rows, from 0 to ``budget``.
    """
    padded = [*starts, *range(starts[-1] + GRAPH_PATCHES, budget, GRAPH_PATCHES)]
    return padded + [budget] * (graph_sequences(budget) + 1 - len(padded))
