"""What a job is, and how it keeps a folder to itself.

``.job.json`` holds everything that the bits of the features depend on. The same command finds its own job there and
goes on with it; any other is refused, so a folder never mixes two. Rank 0 holds a lock on it while it works.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moonvit.checkpoint import resolve, vision_shards
from moonvit.checkpoint.files import CONFIG, PREPROCESSOR
from moonvit.encoder import VisionEncoder
from moonvit.errors import ImageError, InvalidInputError
from moonvit.images import picture_size
from moonvit.jobs.files import INDEX, locked, sync_folder, write_all, writing
from moonvit.parallel import Ranks
from moonvit.plan import Plan
from moonvit.sources import is_data_url

JOB = ".job.json"


@dataclass(frozen=True, eq=False)
class Job:
    """Pictures, and what encodes them.

    Attributes:
        encoder: Of this rank.
        pictures: As they were given.
        sizes: Their width and height in pixels, from their headers.
        plan: Of all of them.
        facts: What ``.job.json`` holds.
    """

    encoder: VisionEncoder
    pictures: Sequence[str]
    sizes: Sequence[tuple[int, int]]
    plan: Plan
    facts: dict[str, Any]

    @cached_property
    def text(self) -> bytes:
        """Content of ``.job.json``."""
        return json.dumps(self.facts).encode()

    @cached_property
    def name(self) -> str:
        """A name that no other job has."""
        return hashlib.sha256(self.text).hexdigest()[:32]

    def shape(self, index: int) -> tuple[int, int]:
        """Rows and columns of the features of a picture."""
        return self.plan.grids[index].tokens, self.encoder.config.text_hidden_size

    def check_shared(self, folder: Path) -> None:
        """Refuse a folder that only rank 0 has claimed under this name.

        Raises:
            InvalidInputError: It holds another job, or none.
        """
        if not (folder / JOB).is_file() or (folder / JOB).read_bytes() != self.text:
            raise InvalidInputError(
                f"{folder} is not the folder that rank 0 has there; ranks must share it", param="out"
            )


def describe(encoder: VisionEncoder, checkpoint: str | Path, pictures: Sequence[str], ranks: int) -> Job:
    """Find out what a job is, from headers alone.

    Args:
        encoder: What encodes.
        checkpoint: What it was loaded from.
        pictures: Files, or ``data:`` URLs.
        ranks: How many ranks share the work.

    Returns:
        The job.

    Raises:
        EmptyInputError: There are no pictures.
        ImageError: A header cannot be read, or a picture is over a limit.
        BudgetError: A picture needs more than the budget.
    """
    sizes = [picture_size(picture, encoder.limits, index) for index, picture in enumerate(pictures)]
    plan = encoder.plan(sizes)
    local = resolve(checkpoint)
    beside = [local / name for name in (CONFIG, PREPROCESSOR)]
    files = [*vision_shards(local), *(file for file in beside if file.is_file())]
    facts = {
        "format": 1,
        "ranks": ranks,
        "dtype": plan.dtype,
        "device": encoder.device.type,
        "budget": plan.budget_bytes,
        "model": asdict(encoder.config),
        "checkpoint": [[file.name, *_source(str(file), 0)[1:]] for file in sorted(files)],
        "pictures": [_source(picture, index) for index, picture in enumerate(pictures)],
    }
    return Job(encoder, pictures, sizes, plan, json.loads(json.dumps(facts)))


def shown(picture: str) -> str:
    """Name of a picture in an index: as it was given, of a ``data:`` URL the digest."""
    return str(_source(picture, 0)[0]) if is_data_url(picture) else picture


def _source(picture: str, index: int) -> list[Any]:
    """Name, bytes and time of change."""
    if is_data_url(picture):
        return [f"data:sha256:{hashlib.sha256(os.fsencode(picture)).hexdigest()}", len(picture), 0]
    try:
        found = os.stat(picture)
    except OSError as error:
        raise ImageError(
            f"image {index}: {picture} cannot be read: {error.strerror}", param=f"images[{index}]"
        ) from None
    return [os.path.abspath(picture), found.st_size, found.st_mtime_ns]


def check_same(job: Job, indices: Iterable[int]) -> None:
    """Refuse pictures that are not those whose headers were read.

    Args:
        job: The job.
        indices: Pictures to look at.

    Raises:
        ImageError: One has changed, or is gone.
    """
    for index in indices:
        if _source(job.pictures[index], index) != job.facts["pictures"][index]:
            said = f"image {index}: {job.pictures[index]} has changed since the job began"
            raise ImageError(said, param=f"images[{index}]")


def agree(job: Job, ranks: Ranks) -> None:
    """Refuse ranks that find different things under the same names.

    Args:
        job: As this rank sees it.
        ranks: The processes of the launch; every one calls this.

    Raises:
        InvalidInputError: The lowest rank that differs from rank 0, and in what; on every rank.
    """
    digests = {key: hashlib.sha256(json.dumps(value).encode()).hexdigest() for key, value in job.facts.items()}
    told = [json.loads(value) for value in ranks.gather(json.dumps(digests).encode())]
    for rank, theirs in enumerate(told):
        differ = [key for key in digests if theirs[key] != told[0][key]]
        if differ:
            error = InvalidInputError(f"rank {rank} and rank 0 differ in {', '.join(differ)}")
            error.rank = rank
            raise error


def claim(job: Job, folder: Path, stack: ExitStack) -> bool:
    """Make a folder this job's. Only rank 0 does.

    Args:
        job: The job.
        folder: Made if it is not there.
        stack: Holds the lock until it closes.

    Returns:
        Whether the job is complete.

    Raises:
        InvalidInputError: The folder is another job's, in use, or cannot be written.
    """
    path, index = folder / JOB, folder / INDEX
    with writing(folder):
        folder.mkdir(exist_ok=True)
    if index.exists() and not path.exists():
        raise InvalidInputError(f"{index} is not of a job; choose another folder", param="out")
    file = stack.enter_context(locked(path))
    old = file.read()
    if not job.text.startswith(old):
        raise InvalidInputError(f"{folder} holds another job: {_difference(old, job.facts)}", param="out")
    if old != job.text:  # new, or cut off while it was written
        with writing(path):
            file.seek(0)
            write_all(file, job.text)
            os.fsync(file.fileno())
            sync_folder(folder)
    return index.exists()


def _difference(old: bytes, now: dict[str, Any]) -> str:
    """The first thing that is not the same about two jobs."""
    try:
        was = json.loads(old)
        key = next(key for key in now if was[key] != now[key])
        before, after = was[key], now[key]
        if key == "model":
            key = next(field for field in after if before[field] != after[field])
            before, after = before[key], after[key]
        elif key in ("pictures", "checkpoint"):
            pairs = zip(before, after, strict=False)
            one, other = next(((one, other) for one, other in pairs if one != other), (None, None))
            if one is None or other is None or len(before) != len(after):
                return f"{len(before)} {key if key == 'pictures' else 'checkpoint files'}, now {len(after)}"
            return f"{one[0]} has changed" if one[0] == other[0] else f"{one[0]}, now {other[0]}"
        return f"{key} was {before}, now {after}"
    except (ValueError, TypeError, LookupError, StopIteration):
        return f"its {JOB} cannot be read"


def read_index(job: Job, folder: Path) -> dict[str, Any]:
    """The index of a job that is complete.

    Args:
        job: The job.
        folder: Its folder.

    Returns:
        Content of ``index.json``.

    Raises:
        InvalidInputError: It is not of this job.
    """
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
        if index["job"] == job.name:
            return index
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise InvalidInputError(f"{folder / INDEX} is not of this job; choose another folder", param="out")
