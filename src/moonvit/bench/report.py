"""What a benchmark says: rows, one JSON document of one shape, a table for a page, a picture."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moonvit.attention import has_bfloat16
from moonvit.errors import InvalidInputError, MissingDependencyError

PACKAGES = ("moonvit", "torch", "numpy", "transformers")
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
OURS = "moonvit"
PLAN = "moonvit's plan"
"""What ours was said to take beforehand."""


class Row(NamedTuple):
    """One number.

    Attributes:
        case: What was done.
        who: By whom.
        metric: What was counted.
        value: How much.
        unit: Of what.
    """

    case: str
    who: str
    metric: str
    value: float
    unit: str = "bytes"


def document(name: str, rows: Sequence[Row], compared: Collection[str]) -> dict[str, Any]:
    """The JSON document of a benchmark.

    Args:
        name: Of the benchmark.
        rows: What it measured.
        compared: Metrics whose ratios mean something.

    Returns:
        ``bench``, ``machine``, ``rows``, and ``ratios`` of ours to each rival.
    """
    return {
        "bench": name,
        "machine": describe_machine(),
        "rows": [row._asdict() for row in rows],
        "ratios": ratios(rows, compared),
    }


def ratios(rows: Sequence[Row], compared: Collection[str]) -> dict[str, float]:
    """Ours over each rival, for every case and metric that both have.

    Args:
        rows: What was measured.
        compared: Metrics whose ratios mean something.

    Returns:
        Ratios by ``case: metric, against rival``.
    """
    ours = {(row.case, row.metric): row.value for row in rows if row.who == OURS}
    return {
        f"{row.case}: {row.metric}, against {row.who}": round(ours[row.case, row.metric] / row.value, 6)
        for row in rows
        if row.who != OURS and row.metric in compared and (row.case, row.metric) in ours and row.value
    }


def describe_machine() -> dict[str, Any]:
    """What ran: machine, packages, commit."""
    return {
        "system": platform.system(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "bfloat16_instructions": has_bfloat16(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this checkout, with a mark where files differ from it; None where it is none."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an environment may lie in somebody else's repository
        return git("rev-parse", "HEAD") + ("-changed" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


# ---- for people -----------------------------------------------------------------------------------------------------


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Rows as text: case, who, metric, value, unit; a case is named once.

    Args:
        rows: What was measured.

    Returns:
        Cells of a table.
    """
    shown, before = [], None
    for row in rows:
        value = f"{row.value:,.0f}" if float(row.value).is_integer() else f"{row.value:,.3f}"
        shown.append([row.case if row.case != before else "", row.who, row.metric, value, row.unit])
        before = row.case
    return shown


def markdown(found: dict[str, Any]) -> str:
    """The tables of a document, for a page.

    Args:
        found: What ``document`` made.

    Returns:
        Markdown.
    """
    machine = found["machine"]
    lines = [
        f"Measured on {machine['cpu']}, {machine['threads']} threads, torch {machine['packages']['torch']}, "
        f"transformers {machine['packages']['transformers']}; bfloat16 instructions: "
        f"{'yes' if machine['bfloat16_instructions'] else 'no'}.",
        "",
        "| case | who | metric | value | unit |",
        "|---|---|---|---:|---|",
        *(f"| {' | '.join(line)} |" for line in cells([Row(**row) for row in found["rows"]])),
        "",
        "| ratio of ours | |",
        "|---|---:|",
        *(f"| {name} | {value:.4g} |" for name, value in found["ratios"].items()),
    ]
    return "\n".join(lines)


def check_docs(name: str, folder: Path) -> None:
    """Refuse a folder that ``write_docs`` cannot write to, before anything is measured for it.

    Args:
        name: Of the benchmark.
        folder: Where ``<name>.md`` stands.

    Raises:
        InvalidInputError: There is no such page, or it has no place for the tables.
        MissingDependencyError: matplotlib is not installed.
    """
    page = folder / f"{name}.md"
    if not page.is_file():
        raise InvalidInputError(f"{page} is not there, so no tables can be written into it", param="docs")
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InvalidInputError(f"{page} has no place for tables between {BEGIN} and {END}", param="docs")
    check_plot()


def write_docs(found: dict[str, Any], folder: Path, metric: str, title: str) -> None:
    """Write the document and its picture, and the tables into the page between their marks.

    Args:
        found: What ``document`` made.
        folder: Where ``<bench>.md`` stands.
        metric: As for ``plot``.
        title: As for ``plot``.

    Raises:
        InvalidInputError: As for ``check_docs``.
        MissingDependencyError: matplotlib is not installed.
    """
    name = found["bench"]
    check_docs(name, folder)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(found, folder / f"{name}.png", metric, title)
    page = folder / f"{name}.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{markdown(found)}\n{END}{rest.split(END)[1]}")


def check_plot() -> None:
    """Say what a plot needs, before anything is measured for it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("a plot needs matplotlib: pip install matplotlib")


def plot(found: dict[str, Any], file: Path, metric: str, title: str) -> None:
    """Draw one metric of ours and of rivals in MiB, a panel for each case, each on a scale of its own.

    Args:
        found: What ``document`` made.
        file: The PNG.
        metric: Which; its unit is bytes. Nothing is drawn where no case has it of two.
        title: What it is.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    check_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[str, list[tuple[str, float]]] = {}
    for row in (Row(**row) for row in found["rows"]):
        if row.metric == metric and row.who != PLAN:
            panels.setdefault(row.case, []).append((row.who, row.value))
    panels = {case: bars for case, bars in panels.items() if len(bars) > 1}
    if not panels:
        return
    heights = [len(bars) + 1.0 for bars in panels.values()]
    figure = Figure(figsize=(9.0, 0.24 * sum(heights) + 0.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (case, bars) in zip(axes, panels.items(), strict=True):
        bars = sorted(bars, key=lambda bar: bar[0] != OURS)
        sizes = [value / 2**20 for _, value in bars]
        colours = ["#1f6f8b" if who == OURS else "#c9c4bb" for who, _ in bars]
        axis.barh(range(len(bars)), sizes, height=0.72, color=colours)
        axis.set_yticks(range(len(bars)), [who for who, _ in bars], fontsize=8)
        axis.set_ylim(len(bars) - 0.4, -0.6)
        axis.set_xlim(0, 1.12 * max(sizes))
        axis.set_title(case, fontsize=8.5, loc="left", pad=3)
        for place, size in enumerate(sizes):
            text = f"{size:,.1f}" if size >= 1 else f"{size:.3f}"
            axis.annotate(text, (size, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axis.set_xticks([])
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(file)
