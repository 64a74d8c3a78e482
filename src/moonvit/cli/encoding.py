"""``moonvit encode``: pictures into features, on the screen or in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moonvit.cli.options import BudgetText, Device, Dtype, Json, Model
from moonvit.cli.tables import table
from moonvit.cli.terminal import exists, naming, open_encoder, print_json, progress, shown
from moonvit.errors import InvalidInputError


def encode(
    images: Annotated[list[str], typer.Argument(help="Pictures: files, or data: URLs.", show_default=False)],
    model: Model = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the features here, as safetensors, in place of what is there."),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    budget: BudgetText = "auto",
    as_json: Json = False,
) -> None:
    """Encode pictures into language-model features.

    The file given with -o holds one tensor for each picture, features.0, features.1 and so on, of shape (tokens,
    language width), and the pictures' names and sizes in its metadata.
    """
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
