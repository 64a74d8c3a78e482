"""What commands share at the terminal: answers on stdout, progress on stderr, names of files in errors, the model."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonvit.errors import MoonvitError

if TYPE_CHECKING:
    from rich.console import Console

    from moonvit.encoder import VisionEncoder


def console() -> Console:
    """Where progress goes: stderr; of ranks that were launched together only the first shows any."""
    from rich.console import Console

    quiet = os.environ.get("RANK", "0") != "0"
    return Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=quiet)


def print_json(document: Any) -> None:
    """The one document of ``--json``, on stdout."""
    sys.stdout.write(json.dumps(document) + "\n")


@contextmanager
def progress(what: str, total: int) -> Iterator[Any]:
    """A bar on stderr; yields a function that moves it by so many. Silent where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def naming(pictures: list[str]) -> Iterator[None]:
    """Say which file "image 3" is."""
    try:
        yield
    except MoonvitError as error:
        found = re.match(r"image ([0-9]+)(?=[ :])", error.message)
        if found and int(found[1]) < len(pictures):
            name = f"{found[0]} ({shown(pictures[int(found[1])])})"
            error.message = name + error.message.removeprefix(found[0])
        raise


@contextmanager
def leaving_at_once(said: str) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once, whatever its main thread waits for; nothing is tidied up.

    Args:
        said: What to say after the name of the signal.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        if caught := os.read(reader, 1):
            console().show_cursor()
            sys.stderr.write(f"moonvit: ended by {signal.Signals(caught[0]).name}{said}\n")
            sys.stderr.flush()
            os._exit(128 + caught[0])

    # The system's own handler writes the number of a signal into the pipe; a handler of ours would have to wait for the
    # main thread to be back from torch.
    former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    descriptor = signal.set_wakeup_fd(writer)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in former.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)


def model_path(model: str | None) -> str:
    """The model that was asked for, or the demo model."""
    if model is not None:
        return model
    from moonvit.engines import default_model

    return str(default_model())


def open_encoder(model: str | None, device: str, dtype: str, budget: str) -> VisionEncoder:
    """An encoder, as options describe it."""
    from moonvit.encoder import VisionEncoder

    with console().status("loading the model"):
        return VisionEncoder.from_pretrained(model_path(model), device=device, dtype=dtype, budget=budget)


def shown(image: str) -> str:
    """What a person typed, where it is long its ends."""
    return image if len(image) <= 60 else image[:28] + "..." + image[-28:]


def exists(path: str) -> bool:
    """Whether there is such a file or directory; text that can be no path is none."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False
