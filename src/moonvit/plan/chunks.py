"""How rows, channels, weights and heads are cut: the constants of the executor, and the sums that follow from them."""

from __future__ import annotations

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
