"""``moonvit bench``: measurements beside rivals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moonvit.cli.options import Json
from moonvit.cli.tables import table
from moonvit.cli.terminal import console, print_json
from moonvit.errors import InvalidInputError

app = typer.Typer(help="Measure against rivals; outputs are proven equal first.", no_args_is_help=True)


@app.command()
def memory(
    cases: Annotated[str, typer.Option(help="Which, by letter, separated by commas.")] = "a,b,c,d,e",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and requests.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Run the largest images too; may take an hour.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the peaks here, as a PNG.", show_default=False)] = None,
    docs: Annotated[
        Path | None,
        typer.Option(help="Write memory.json, memory.png and the tables of memory.md there.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count the bytes that towers allocate, ours and others.

    a: rotary tables. b: the projector. c: tower and projector of 1, 5 and 50 images beside transformers. d: the largest
    legal image of each family. e: two thousand requests. The last line is one JSON document.
    """
    if quick and full:
        raise InvalidInputError("--quick and --full exclude each other", param="quick")
    if plot is not None and not plot.parent.is_dir():
        raise InvalidInputError(f"{plot} cannot be written: there is no directory {plot.parent}", param="plot")
    from moonvit.bench import report
    from moonvit.bench.memory import COMPARED, DRAWN, TITLE, run

    # Everything that could fail afterwards is tried before an hour is spent.
    if plot is not None:
        report.check_plot()
    if docs is not None:
        report.check_docs("memory", docs)
    letters = [letter.strip() for letter in cases.split(",")]
    rows = run(letters, "quick" if quick else "full" if full else "usual")
    found = report.document("memory", rows, COMPARED)
    if not as_json:
        table("memory", ["case", "who", "metric", "value", "unit"], report.cells(rows), right=3)
    print_json(found)
    if plot is not None:
        report.plot(found, plot, DRAWN, TITLE)
    if docs is not None:
        report.write_docs(found, docs, DRAWN, TITLE)


@app.command()
def scale(
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the requests.")] = False,
    docs: Annotated[Path | None, typer.Option(help="Write the tables of scale.md there.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Count, on paper, what requests take on 8, 16, 128 and 1,024 ranks.

    Random requests against the bound, K3 on sixteen ranks, and a day in groups of sixteen and in one group. Bytes by
    formula are proven equal to a count of messages. The last line is one JSON document.
    """
    if quick and docs is not None:
        raise InvalidInputError("--quick and --docs exclude each other: the page shows the whole count", param="docs")
    from moonvit.bench import report
    from moonvit.bench.scale import COMPARED, run, write_page

    page = docs and docs / "scale.md"
    if page and not page.is_file():
        raise InvalidInputError(f"{page} is not there, so no tables can be written into it", param="docs")
    with console().status("counting") as status:
        rows = run("quick" if quick else "usual", lambda what: status.update(f"counting: {what}"))
    if not as_json:
        table("scale", ["case", "who", "metric", "value", "unit"], report.cells(rows), right=3)
    print_json(report.document("scale", rows, COMPARED))
    if page:
        write_page(rows, page)
