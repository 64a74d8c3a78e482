"""What ``moonvit plan`` shows: pictures, ranks, stages, stock towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moonvit.cli.tables import bars, byte_count, table

if TYPE_CHECKING:
    from moonvit.deploy import Deployment
    from moonvit.plan import Plan
    from moonvit.stock import Stock


def kv_tokens(count: int, each: int, ranks: int) -> dict[str, int]:
    """KV tokens that bytes of each rank hold: engines give every rank what the fullest has room for.

    Args:
        count: Bytes on each rank.
        each: Bytes of a token on one rank.
        ranks: How many ranks there are.

    Returns:
        Bytes of a token, tokens of a rank, tokens of all.
    """
    return {"bytes_per_token": each, "rank": count // each, "all": count // each * ranks}


def beside_stock(tower: Stock, spread: Deployment, kv_bytes: int | None) -> dict[str, Any]:
    """A stock tower beside our ranks.

    Args:
        tower: What it takes, computed.
        spread: What ours take.
        kv_bytes: Bytes of a KV token on one rank; None asks for no tokens.

    Returns:
        One row of the comparison, JSON-able.
    """
    heaviest = tower.heaviest
    saved = heaviest.peak_bytes - max(spread.rank_peaks)
    return {
        "tower": tower.engine,
        "basis": "computed",
        "mode": tower.mode,
        "peak_bytes": heaviest.peak_bytes,
        "moment": heaviest.moment,
        "moments": heaviest.moments,
        "ranks": [rank.peak_bytes for rank in tower.ranks],
        "difference_bytes": saved,
        "kv_tokens": None if kv_bytes is None else kv_tokens(saved, kv_bytes, len(tower.ranks)),
    }


def show_plan(title: str, spread: Deployment, images: list[dict[str, Any]]) -> None:
    """Show pictures, ranks where there are several, and where the bytes of the peak go.

    Args:
        title: What is planned for.
        spread: The request over its ranks.
        images: What the document has of each picture.
    """
    made = spread.whole
    several = spread.tp * spread.dp > 1
    rows = [
        [
            f"{number}  {image['item']}" if several else image["item"],
            f"{image['grid'][1]} x {image['grid'][2]}",
            f"{image['patches']:,}",
            f"{image['tokens']:,}",
            byte_count(image["output_bytes"]),
            f"{image['flops'] / 1e12:,.2f}",
            byte_count(image["alone_peak_bytes"]),
        ]
        for number, image in enumerate(images)
    ]
    if len(rows) > 1:
        flops = sum(image["flops"] for image in images)
        sums = [f"{made.patches:,}", f"{made.tokens:,}", byte_count(made.output_bytes), f"{flops / 1e12:,.2f}"]
        rows.append(["all", "", *sums, ""])
    table(title, ["picture", "grid", "patches", "tokens", "features", "TFLOP", "peak alone"], rows)
    if not several:
        _show_peak("the peak", made)
        return
    _show_ranks(spread)
    rank, most = max(
        ((share.ranks[0], share.plan) for share in spread.shares if share.plan), key=lambda pair: pair[1].peak_bytes
    )
    _show_peak(f"rank {rank}: the peak of encoding", most)


def _show_peak(what: str, made: Plan) -> None:
    """Where the bytes go: what lives at the peak, its sum, and what comes and goes at other times."""
    live = made.at_peak
    other = {name: count for name, count in made.stages.items() if count and name not in live}
    rows = [
        ([name, f"{count:,}", byte_count(count), f"{100 * count / made.peak_bytes:.1f} %"], count, "full")
        for name, count in _falling(live)
    ]
    for name, count in (("peak", made.peak_bytes), ("workspace", made.workspace_bytes)):
        rows.append(([name, f"{count:,}", byte_count(count), f"{100 * count / made.peak_bytes:.1f} %"], 0, "none"))
    rows += [
        ([name, f"{count:,}", byte_count(count), "other times"], count, "hatched") for name, count in _falling(other)
    ]
    passes, groups = len(made.batches), made.groups
    how = f"{passes} pass{'es' * (passes > 1)}, chunks of {made.rows} rows" + f", {groups} groups of heads" * (
        groups > 1
    )
    bars(f"\n{what} comes at {made.moment}: {how}", ["stage", "bytes", "", "of the peak"], rows)


def _falling(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _show_ranks(spread: Deployment) -> None:
    busy = [share for share in spread.shares if share.plan]
    rows = [
        [
            _span(share.ranks),
            _list(share.images),
            f"{share.plan.patches:,}",
            f"{share.plan.tokens:,}",
            f"{share.load / 1e12:,.2f}",
            byte_count(share.plan.workspace_bytes),
            byte_count(share.peak_bytes),
            byte_count(share.received_bytes),
        ]
        for share in busy
        if share.plan
    ]
    idle = [share for share in spread.shares if not share.plan]
    if idle:  # they come last, and are alike: all they hold is the features of the others
        ranks = (*idle[0].ranks, *idle[-1].ranks)
        held = [byte_count(count) for count in (0, idle[0].peak_bytes, idle[0].received_bytes)]
        rows.append([_span(ranks), "empty", "0", "0", "0.00", *held])
    features = spread.whole.output_bytes
    table(
        f"\n{spread.tp * spread.dp} ranks, tp {spread.tp} x dp {spread.dp}: "
        f"the busiest has {spread.imbalance:.3f} x the least it can have\n(max / mean {spread.over_mean:.3f})",
        ["rank", "pictures", "patches", "tokens", "TFLOP", "workspace", "peak", "receives"],
        rows,
    )
    count = spread.tp * spread.dp
    moved: list[tuple[str, int, int]] = [
        ("features, at their sizes", max(share.received_bytes for share in spread.shares), spread.received_bytes),
        ("features, padded all-gather", spread.padded_bytes, spread.padded_bytes * count),
    ]
    if spread.tp > 1:
        summed = [share.reduced_bytes for share in spread.shares]
        moved.append(("layers summed in a group", max(summed), sum(summed) * spread.tp))
    table(
        "\nbytes moved",
        ["", "each rank, at most", "of the features", "all ranks"],
        [[what, byte_count(most), f"{most / features:.2f} x", byte_count(total)] for what, most, total in moved],
    )


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if ranks[0] == ranks[-1] else f"{ranks[0]}-{ranks[-1]}"


def _list(images: Sequence[int]) -> str:
    """Pictures by number; of many only the first."""
    return ", ".join(map(str, images[:6])) + (f" and {len(images) - 6} more" if len(images) > 6 else "")


def show_beside(rows: list[dict[str, Any]], spread: Deployment, kv_bytes: int | None) -> None:
    """Show stock towers beside our ranks, and what the differences return.

    Args:
        rows: Of ``beside_stock``.
        spread: What ours take.
        kv_bytes: As there.
    """
    ours = max(spread.rank_peaks)
    cells = [(["moonvit", "planned", "", byte_count(ours), ""], ours, "full")]
    for row in rows:
        taken = row["peak_bytes"]
        cells.append(
            ([row["tower"], row["basis"], row["moment"], byte_count(taken), f"{taken / ours:.2f} x"], taken, "hatched")
        )
    bars(
        "\nbeside stock towers on CUDA (computed from their tensor shapes, not measured)",
        ["tower", "", "most at", "peak", "of ours"],
        cells,
    )
    differences = [
        [row["tower"], row["mode"], f"{row['difference_bytes']:,}"]
        + ([f"{row['kv_tokens'][key]:,}" for key in ("rank", "all")] if kv_bytes else [])
        for row in rows
    ]
    table(
        "\nthe difference" + (f", and the KV tokens of {kv_bytes:,} bytes it returns" if kv_bytes else ""),
        ["tower", "", "bytes of a rank", *(["tokens a rank", "in all"] if kv_bytes else [])],
        differences,
    )
