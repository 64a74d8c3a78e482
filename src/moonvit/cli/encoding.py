"""``moonvit encode``: pictures into features, on the screen, in a file, or as a job in a folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonvit.cli.options import BudgetText, Device, Dtype, Json, Model
from moonvit.cli.tables import table
from moonvit.cli.terminal import (
    exists,
    leaving_at_once,
    model_path,
    naming,
    open_encoder,
    print_json,
    progress,
    shown,
)
from moonvit.errors import ImageError, InvalidInputError, MoonvitError

if TYPE_CHECKING:
    from moonvit.jobs import Outcome


def encode(
    images: Annotated[list[str], typer.Argument(help="Pictures: files, or data: URLs.", show_default=False)],
    model: Model = None,
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            help="Write the features here: a safetensors file, in place of what is there, or FOLDER/ for a job.",
        ),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    budget: BudgetText = "auto",
    as_json: Json = False,
) -> None:
    """Encode pictures into language-model features.

    The file given with -o holds one tensor for each picture, features.0, features.1 and so on, of shape (tokens,
    language width), and the pictures' names and sizes in its metadata.

    A folder gets such a file from each rank of torchrun, and index.json when all are complete. The same command goes on
    where it was interrupted.
    """
    # torchrun tells each of its ranks how many there are.
    if os.environ.get("WORLD_SIZE", "1") != "1" or (out and _is_folder(out, 1)):
        _encode_job(images, model, out, device, dtype, budget, as_json)
    else:
        _encode_file(images, model, None if out is None else Path(out), device, dtype, budget, as_json)


def _encode_file(
    images: list[str], model: str | None, out: Path | None, device: str, dtype: str, budget: str, as_json: bool
) -> None:
    if out is not None:
        _check_out(out, images)
    encoder = open_encoder(model, device, dtype, budget)
    results = []
    with naming(images), progress("encoding", len(images)) as advance:
        plan = encoder.plan(images)
        for batch in plan.batches:
            results += encoder.encode_batch(images, plan, batch)
            advance(len(batch.indices))
    rows: list[dict[str, Any]] = [
        {
            "image": shown(image),
            "source_size": list(one.source_size),
            "grid": list(one.grid),
            "tokens": one.tokens,
            "shape": list(one.tensor.shape),
            "dtype": str(one.tensor.dtype).removeprefix("torch."),
            "mean": float(one.tensor.float().mean()),
            "std": float(one.tensor.float().std()),
        }
        for image, one in zip(images, results, strict=True)
    ]
    if out is not None:
        from moonvit.checkpoint import save_tensors

        metadata = {"images": json.dumps([{k: row[k] for k in ("image", "source_size", "grid")} for row in rows])}
        save_tensors({f"features.{n}": one.tensor for n, one in enumerate(results)}, out, metadata)
    if as_json:
        print_json({"images": rows, "plan": plan.to_dict(), "out": None if out is None else str(out)})
        return
    cells = [
        [
            row["image"],
            "x".join(map(str, row["source_size"])),
            "x".join(map(str, row["grid"])),
            str(row["tokens"]),
            f"({row['shape'][0]}, {row['shape'][1]})",
            f"{row['std']:.3f}",
        ]
        for row in rows
    ]
    table(
        f"{encoder.config.family}, {rows[0]['dtype']}",
        ["image", "pixels", "grid t x h x w", "tokens", "features", "std"],
        cells,
    )
    if out is not None:
        typer.echo(f"written to {out}")


def _encode_job(
    images: list[str], model: str | None, out: str | None, device: str, dtype: str, budget: str, as_json: bool
) -> None:
    from moonvit.jobs import run_job
    from moonvit.parallel import launched

    rank = f" on rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    stopped = f"{rank}; what is finished is kept, and the same command goes on from there"
    with leaving_at_once(stopped), launched() as ranks:
        try:
            folder = ranks.together(lambda: _job_folder(out, ranks.size))
            if device == "cuda" and "LOCAL_RANK" in os.environ:
                device = f"cuda:{os.environ['LOCAL_RANK']}"
            encoder = ranks.together(lambda: open_encoder(model, device, dtype, budget))
            with naming(images), progress("encoding", len(images)) as advance:
                outcome = run_job(encoder, model_path(model), images, folder, ranks, advance)
            if ranks.rank == 0:
                _show(outcome, folder, as_json)
                sys.stdout.flush()
            ranks.gather(b"")  # torchrun ends all ranks when one leaves with an error: the answer comes first
            failed = outcome.index["failed"]
            if failed:
                first = f"image {failed[0]['index']} ({shown(failed[0]['image'])}): {failed[0]['message']}"
                error = ImageError(f"{len(failed)} of {len(images)} pictures failed; {first}")
                error.rank = 0
                raise error
        except MoonvitError as error:
            if ranks.size == 1:
                raise
            if error.rank in (None, ranks.rank):  # an error that all ranks have is said by the one it happened on
                typer.echo(f"moonvit: rank {ranks.rank}: {error.message}", err=True)
            raise typer.Exit(error.exit_code) from None


def _show(outcome: Outcome, folder: Path, as_json: bool) -> None:
    """The answer of a job."""
    index, encoded, kept = outcome.index, outcome.encoded, outcome.kept
    if as_json:
        print_json({**index, "encoded": encoded, "kept": kept, "out": str(folder)})
        return
    files = len([name for name in index["files"] if name])
    before = (
        "" if not kept else f", {kept} of them before" if encoded else ", all of them before: nothing was left to do"
    )
    typer.echo(
        f"{encoded + kept} pictures encoded{before}: {index['total_bytes']:,} bytes in {files} "
        f"{'file' if files == 1 else 'files'}, listed in {folder / 'index.json'}"
    )


def _is_folder(out: str, ranks: int) -> bool:
    """Whether a job writes here: a directory, or what ends like one; several ranks take any name that is no file's."""
    if out.endswith(("/", os.sep)):
        return True
    if not out or exists(out):
        return bool(out) and Path(out).is_dir()
    return ranks > 1 and not out.endswith(".safetensors")


def _job_folder(out: str | None, ranks: int) -> Path:
    if out is None or not _is_folder(out, ranks):
        what = "" if out is None else f", not {out!r}"
        raise InvalidInputError(f"{ranks} ranks write into a folder: name one with -o FOLDER/{what}", param="out")
    return Path(out)


def _check_out(out: Path, images: list[str]) -> None:
    """Refuse to write where it cannot be done or a picture would be lost, before any work."""
    if out == Path():
        raise InvalidInputError("the name of the file to write is empty", param="out")
    if not out.parent.is_dir():
        raise InvalidInputError(f"{out} cannot be written: there is no directory {out.parent}", param="out")
    if out.exists() and not out.is_file():
        raise InvalidInputError(f"{out} is no regular file and cannot be written over", param="out")
    for image in images:
        if out.exists() and exists(image) and out.samefile(image):
            raise InvalidInputError(f"{out} is one of the pictures and would be lost", param="out")
