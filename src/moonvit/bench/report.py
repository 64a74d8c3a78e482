"""What a benchmark says: one JSON document of one shape, a table for a page, a picture."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from moonvit.bench.memory import OURS, Row
from moonvit.errors import MissingDependencyError

PACKAGES = ("moonvit", "torch", "numpy", "transformers")
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
COMPARED = ("peak", "workspace", "kept after the request")
"""Metrics whose ratios mean something: the others are the same for all, or no rival has them."""


def document(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON document of a benchmark.

    Args:
        name: Of the benchmark.
        rows: What it measured.

    Returns:
        ``bench``, ``machine``, ``rows``, and ``ratios`` of ours to each rival.
    """
    return {
        "bench": name,
        "machine": describe_machine(),
        "rows": [row._asdict() for row in rows],
        "ratios": ratios(rows),
    }


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Ours over each rival, for every case and metric that both have.

    Args:
        rows: What was measured.

    Returns:
        Ratios by ``case: metric, against rival``.
    """
    ours = {(row.case, row.metric): row.value for row in rows if row.who == OURS}
    return {
        f"{row.case}: {row.metric}, against {row.who}": round(ours[row.case, row.metric] / row.value, 6)
        for row in rows
        if row.who != OURS and row.metric in COMPARED and (row.case, row.metric) in ours and row.value
    }


def describe_machine() -> dict[str, Any]:
    """What ran: machine, packages, commit."""
    return {
        "system": platform.system(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "bfloat16_instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
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


def write_docs(found: dict[str, Any], folder: Path) -> None:
    """Write the document and its picture, and the tables into the page between their marks.

    Args:
        found: What ``document`` made.
        folder: Where ``<bench>.md`` stands.
    """
    name = found["bench"]
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(found, folder / f"{name}.png")
    page = folder / f"{name}.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{markdown(found)}\n{END}{rest.split(END)[1]}")


def plot(found: dict[str, Any], file: Path) -> None:
    """Draw peaks of ours and of rivals, a panel for each case, each on a scale of its own.

    Args:
        found: What ``document`` made.
        file: The PNG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("a plot needs matplotlib: pip install matplotlib") from None

    panels: dict[str, list[tuple[str, float]]] = {}
    for row in (Row(**row) for row in found["rows"]):
        if row.metric == "peak":
            panels.setdefault(row.case, []).append((row.who, row.value))
    panels = {case: bars for case, bars in panels.items() if len(bars) > 1}
    if not panels:
        return
    heights = [len(bars) + 1.0 for bars in panels.values()]
    figure = Figure(figsize=(9.0, 0.24 * sum(heights) + 0.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    title = "Peak memory beyond weights and inputs, MiB; each panel has a scale of its own"
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
