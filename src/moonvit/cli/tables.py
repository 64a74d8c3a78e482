"""Tables and bars on stdout."""

from __future__ import annotations

import sys


def table(title: str, columns: list[str], rows: list[list[str]], right: int = 1, left: int | None = None) -> None:
    """A table on stdout.

    Args:
        title: Above it.
        columns: Headings.
        rows: Cells.
        right: From this column on cells are numbers,
        left: up to this one; None is to the end.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="right" if right <= number < (left or len(columns)) else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    # Names of files are shown as they are: brackets in them are no markup.
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
    console.print(title, style="italic")  # within the table it would be folded to the table's width
    console.print(table)


def bars(title: str, columns: list[str], rows: list[tuple[list[str], int, str]]) -> None:
    """A table that ends in a bar for each row's number.

    Args:
        title: Above it.
        columns: Headings, without one for the bars.
        rows: Cells, the number, and ``"full"``, ``"hatched"`` or ``"none"`` for how its bar is drawn.
    """
    from rich.console import Console

    console = Console()
    before = [cells for cells, _, _ in rows]
    columns = [*columns, ""]
    taken = sum(2 + max(len(cells[n]) for cells in [columns, *before]) for n in range(len(columns) - 1))
    room = max(8, min(60, console.width - taken))
    whole, hatched, eighths = ("█", "░", " ▏▎▍▌▋▊▉") if console.encoding.startswith("utf") else ("#", "-", " " * 8)
    most = max(count for _, count, _ in rows)
    shown = []
    for cells, count, drawn in rows:
        full, rest = divmod(max(8 * room * count // most, 1), 8)
        bars = {"full": whole * full + eighths[rest].strip(), "hatched": hatched * max(full, 1), "none": ""}
        shown.append([*cells, bars[drawn]])
    table(title, columns, shown, left=len(columns) - 1)


def byte_count(count: int) -> str:
    """Bytes for people.

    Args:
        count: The number.

    Returns:
        It in the largest unit of B to GiB that leaves it at 1 or more.
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError
