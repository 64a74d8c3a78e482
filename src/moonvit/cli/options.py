"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL_HELP = "Checkpoint directory or hub id; the demo model in the package by default."
DEVICE_HELP = "Where the model works: cpu, cuda, cuda:1."
DTYPE_HELP = "bfloat16, float16, float32, or auto: bfloat16 where the device has it, else float32."
BUDGET_HELP = "Workspace bound: bytes, '256MiB', or 'auto'."
Model = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Device = Annotated[str, typer.Option(help=DEVICE_HELP)]
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]
BudgetText = Annotated[str, typer.Option("--budget", help=BUDGET_HELP)]
