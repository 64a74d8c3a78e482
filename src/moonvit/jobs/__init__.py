"""A job: pictures into a folder of features, over the ranks of a launch. It may be cut off anywhere, and goes on later.

Headers are read first, so that every shape is known and every rank finds the same assignment. Then each rank encodes
its own pictures into its own file; ``files.py`` says how that survives a cut, ``identity.py`` what keeps two jobs
apart. ``index.json`` comes last: a folder that has it is complete.

A damaged picture is recorded as failed, and the others go on: one in a million must not cost the rest, and would stop
every later run at the same place. A picture that vanished or changed, features that are not finite, or a full disk end
the job, for there something other than one picture is wrong.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moonvit.deploy import assign_images
from moonvit.encoder import VisionEncoder
from moonvit.errors import ImageError, MoonvitError
from moonvit.jobs.files import INDEX, RankFile, journal_of, tensor_name, write_whole
from moonvit.jobs.identity import Job, agree, check_same, claim, describe, read_index, shown
from moonvit.parallel import Ranks
from moonvit.plan import Batch

POLL = 0.5
"""Seconds between two looks at the journals."""


@dataclass(frozen=True)
class Outcome:
    """A job that is complete.

    Attributes:
        index: Content of ``index.json``: ``job``, ``family``, ``dtype``, ``ranks``, ``total_bytes``, ``files`` (of each
            rank, None without features), ``tensors`` (name -> file), ``images`` (``image``, ``tensor`` or None,
            ``source_size``, ``grid``, ``tokens``, ``dtype``, ``shape``), ``failed`` (``index``, ``image``,
            ``message``).
        encoded: Pictures encoded by this run, over all ranks.
        kept: Pictures that earlier runs had encoded.
    """

    index: dict[str, Any]
    encoded: int
    kept: int


def run_job(
    encoder: VisionEncoder,
    checkpoint: str | Path,
    pictures: Sequence[str],
    folder: Path,
    ranks: Ranks,
    advance: Callable[[int], object] = lambda count: None,
) -> Outcome:
    """Encode pictures into a folder; every rank calls it with the same arguments.

    Args:
        encoder: On each rank its own, all alike.
        checkpoint: What it was loaded from.
        pictures: Files, or ``data:`` URLs.
        folder: One that all ranks share; made if need be. Files of others in it are left alone.
        ranks: The processes of the launch.
        advance: Told on rank 0, from a thread, how many more pictures all ranks have finished.

    Returns:
        The outcome, the same on every rank; where the job was complete already, what the folder holds.

    Raises:
        InvalidInputError: The folder holds another job or colliding files, is in use, or cannot be written.
        ImageError: A header cannot be read, or a picture vanished or changed.
        BudgetError: A picture needs more than the budget.
        NonFiniteError: The model gave NaN or infinity.
        EngineError: A rank is lost.
    """
    with ExitStack() as stack:
        job = ranks.together(lambda: describe(encoder, checkpoint, pictures, ranks.size))
        agree(job, ranks)
        complete = ranks.together(lambda: ranks.rank == 0 and claim(job, folder, stack))
        own = assign_images(encoder.config, job.plan.grids, ranks.size)[ranks.rank]
        shapes = {index: job.shape(index) for index in own}
        file = RankFile(folder, ranks.rank, ranks.size, job.name, shapes, encoder.dtype)
        if ranks.gather(b"complete" if complete else b"")[0]:
            index = ranks.together(lambda: read_index(job, folder))
            file.forget()
            return Outcome(index, 0, len(index["tensors"]))
        ranks.together(lambda: job.check_shared(folder))
        ranks.together(lambda: stack.enter_context(file))
        with _watching(folder, ranks, advance):
            try:
                _work(job, file, ranks)
            except MoonvitError as error:
                error.rank = ranks.rank
                raise
            written = ranks.together(file.finish)
            mine = {"file": written, "encoded": file.encoded, "failed": list(file.failed.items())}
            told = [json.loads(value) for value in ranks.gather(json.dumps(mine).encode())]
        index = _index(job, told)

        def publish() -> None:
            if ranks.rank == 0:
                write_whole(folder / INDEX, json.dumps(index).encode() + b"\n")

        ranks.together(publish)
        file.forget()
        encoded = sum(one["encoded"] for one in told)
        return Outcome(index, encoded, len(index["tensors"]) - encoded)


def _work(job: Job, file: RankFile, ranks: Ranks) -> None:
    """Encode what this rank has to and has not yet.

    Passes are those of the rank's pictures without the failed ones, never without the finished ones: a picture keeps
    its company, and so its bits, wherever a run before was cut off.
    """
    own = list(file.shapes)
    if not own:
        return
    share = job.encoder.plan([job.sizes[index] for index in own])
    plan = replace(share, grids=job.plan.grids)  # of all pictures, so that errors give their place in the job
    for part in share.batches:
        ranks.check()
        left = [own[place] for place in part.indices if own[place] not in file.failed]
        while not file.done.issuperset(left):
            batch = Batch(tuple(left), sum(plan.grids[index].patches for index in left))
            try:
                features = job.encoder.encode_batch(job.pictures, plan, batch)
            except ImageError as error:
                index = next(index for index in left if error.param == f"images[{index}]")
                check_same(job, [index])
                file.fail(index, error.message.removeprefix(f"image {index}: "))
                left.remove(index)
                continue
            check_same(job, left)
            new = [(index, one.tensor) for index, one in zip(left, features, strict=True) if index not in file.done]
            file.append(new)


@contextmanager
def _watching(folder: Path, ranks: Ranks, advance: Callable[[int], object]) -> Iterator[None]:
    """On rank 0, tell how many pictures all ranks have finished, from the lines of their journals."""
    read = {journal_of(folder, rank, ranks.size): 0 for rank in range(ranks.size)}
    stop = threading.Event()

    def look() -> None:
        for path, start in read.items():
            try:
                with path.open("rb") as stream:
                    stream.seek(start)
                    new = stream.read()
            except OSError:  # a rank without pictures has no journal
                continue
            read[path] += len(new)
            advance(new.count(b"\n"))

    def watch() -> None:
        while not stop.wait(POLL):
            look()

    if ranks.rank:
        yield
        return
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    look()


def _index(job: Job, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the folder holds, from what each rank told of its file."""
    plan, config = job.plan, job.encoder.config
    file_of = {
        index: one["file"]
        for one, share in zip(told, assign_images(config, plan.grids, len(told)), strict=True)
        for index in share
    }
    failed = dict(sorted((index, message) for one in told for index, message in one["failed"]))
    names = [shown(picture) for picture in job.pictures]
    images = [
        {
            "image": names[index],
            "tensor": None if index in failed else tensor_name(index),
            "source_size": list(job.sizes[index]),
            "grid": list(grid),
            "tokens": grid.tokens,
            "dtype": plan.dtype,
            "shape": list(job.shape(index)),
        }
        for index, grid in enumerate(plan.grids)
    ]
    tokens = sum(grid.tokens for index, grid in enumerate(plan.grids) if index not in failed)
    return {
        "job": job.name,
        "family": config.family,
        "dtype": plan.dtype,
        "ranks": len(told),
        "total_bytes": tokens * config.text_hidden_size * job.encoder.dtype.itemsize,
        "files": [one["file"] for one in told],
        "tensors": {tensor_name(index): file for index, file in sorted(file_of.items()) if index not in failed},
        "images": images,
        "failed": [{"index": index, "image": names[index], "message": said} for index, said in failed.items()],
    }
