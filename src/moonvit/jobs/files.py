"""The file of one rank, which grows picture by picture and may be cut off anywhere.

Of rank 3 of 16::

    .rank-00003-of-00016.safetensors.part   features one behind the other, after room for the header
    .rank-00003-of-00016.journal            a line for each finished picture: index, bytes or complaint, checksum
    rank-00003-of-00016.safetensors         the part under its name, once all its pictures are finished

A line is written after its features are on disk, so the journal never promises what is not there. What stands behind
its last good line is cut off before work goes on.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from moonvit.checkpoint.names import DTYPE_NAMES
from moonvit.errors import InvalidInputError

INDEX = "index.json"
MAX_HEADER = 100_000_000
"""Bytes of a header that readers of safetensors accept."""


def tensor_name(index: int) -> str:
    """What the features of a picture are called."""
    return f"features.{index}"


def journal_of(folder: Path, rank: int, ranks: int) -> Path:
    """The journal of a rank."""
    return folder / f".rank-{rank:05}-of-{ranks:05}.journal"


class RankFile:
    """The safetensors file of one rank. As a context it is open, and locked against other processes.

    Args:
        folder: Where it is.
        rank: Whose it is.
        ranks: How many there are.
        job: Name of the job; it goes into every checksum, so that a journal of another job is worth nothing here.
        shapes: Of the features of each picture of this rank, in the order of the file.
        dtype: Of all features.

    Attributes:
        done: Pictures whose features are in the file.
        failed: Pictures that have none, and why.
        encoded: How many were appended since it was opened.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        job: str,
        shapes: Mapping[int, tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        self.journal = journal_of(folder, rank, ranks)
        self.path = folder / f"{self.journal.stem[1:]}.safetensors"
        self.part = folder / f".{self.path.name}.part"
        self.shapes, self.dtype, self.job = shapes, dtype, job
        self.done: set[int] = set()
        self.failed: dict[int, str] = {}
        self.encoded = 0
        self._seed = zlib.crc32(job.encode())
        self._room = -(-len(self._header(shapes)) // 8) * 8

    def __enter__(self) -> RankFile:
        """Open or make the files, and take over what is good in them.

        Raises:
            InvalidInputError: They are in use, not of this job, or cannot be written, or the header would be too long.
        """
        if self._room > MAX_HEADER:
            raise InvalidInputError(
                f"{len(self.shapes)} pictures on one rank need a header of {self._room} bytes, at most {MAX_HEADER} "
                "can be read; use more ranks, or several folders",
                param="out",
            )
        with ExitStack() as stack:
            there = self.path.exists()
            if self.shapes:
                self._lines = stack.enter_context(locked(self.journal))
                with writing(self.path if there else self.part):
                    self._file = stack.enter_context(_open(self.path if there else self.part))
                    good, end = self._recover()
                    if not there:
                        for file, length in ((self._file, end), (self._lines, good)):
                            file.truncate(length)
                            file.seek(length)
                        sync_folder(self.path.parent)
            if there and not (self.shapes and self.shapes.keys() == self.done | self.failed.keys()):
                raise InvalidInputError(f"{self.path} is there, and is not whole or not of this job", param="out")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, features: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Write features to disk, and then say so in the journal.

        Args:
            features: Of pictures that are not done, in the order of the file.

        Raises:
            InvalidInputError: They cannot be written.
        """
        lines = []
        with writing(self.part):
            for index, tensor in features:
                data = tensor.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
                write_all(self._file, data)
                lines.append([index, len(data), zlib.crc32(data, self._seed)])
            os.fsync(self._file.fileno())
        self._note(lines)
        self.done.update(index for index, _ in features)
        self.encoded += len(features)

    def fail(self, index: int, message: str) -> None:
        """Say in the journal why a picture has no features.

        Args:
            index: The picture.
            message: What is wrong with it.

        Raises:
            InvalidInputError: The journal cannot be written.
        """
        self._note([[index, message, self._sum_of(message)]])
        self.failed[index] = message

    def finish(self) -> str | None:
        """Give the file its header and its visible name.

        Returns:
            The name; None where there are no features, and so no file.

        Raises:
            InvalidInputError: It cannot be written.
        """
        with writing(self.part):
            if not self.done:
                self.part.unlink(missing_ok=True)
                return None
            if not self.path.exists():
                header = self._header(index for index in self.shapes if index in self.done)
                self._file.seek(0)
                write_all(self._file, struct.pack("<Q", self._room) + header.ljust(self._room))
                os.fsync(self._file.fileno())
                os.replace(self.part, self.path)
                sync_folder(self.path.parent)
        return self.path.name

    def forget(self) -> None:
        """Remove the journal, which is of no more use once there is an index."""
        self.journal.unlink(missing_ok=True)

    def _size(self, index: int) -> int:
        tokens, width = self.shapes[index]
        return tokens * width * self.dtype.itemsize

    def _header(self, indices: Iterable[int]) -> bytes:
        """The header of a file of these pictures; never longer than that of more of them."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "job": self.job}}
        kind, start = DTYPE_NAMES[self.dtype], 0
        for index in indices:
            end = start + self._size(index)
            header[tensor_name(index)] = {
                "dtype": kind,
                "shape": list(self.shapes[index]),
                "data_offsets": [start, end],
            }
            start = end
        return json.dumps(header, separators=(",", ":")).encode()

    def _recover(self) -> tuple[int, int]:
        """Take over pictures up to the first that is not whole; how long journal and features are until there."""
        good, end = 0, 8 + self._room
        self._file.seek(end)
        for line in self._lines.read().splitlines(keepends=True):
            try:
                index, what, checksum = json.loads(line)
            except (ValueError, TypeError):
                break
            new = type(index) is int and index in self.shapes and index not in self.done and index not in self.failed
            if not new or not line.endswith(b"\n"):
                break
            if isinstance(what, str) and self._sum_of(what) == checksum:
                self.failed[index] = what
            elif what == self._size(index) and self._checksum(what) == checksum:
                self.done.add(index)
                end += what
            else:
                break
            good += len(line)
        return good, end

    def _sum_of(self, message: str) -> int:
        return zlib.crc32(json.dumps(message).encode(), self._seed)

    def _checksum(self, length: int) -> int:
        """Of the next bytes of the file; -1 where there are fewer."""
        checksum = self._seed
        while length:
            data = self._file.read(min(length, 1 << 20))
            if not data:
                return -1
            checksum = zlib.crc32(data, checksum)
            length -= len(data)
        return checksum

    def _note(self, lines: Sequence[Any]) -> None:
        with writing(self.journal):
            write_all(self._lines, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            os.fsync(self._lines.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say of what is written in this context where it cannot be, and why.

    Args:
        path: What is written.

    Raises:
        InvalidInputError: In place of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidInputError(f"{path} cannot be written: {why}; finished pictures are kept", param="out") from None


def locked(path: Path) -> io.FileIO:
    """Open a file that no other process has open this way; the system lets go of it when this one ends.

    Args:
        path: The file; made if it is not there.

    Returns:
        The file, to read and write.

    Raises:
        InvalidInputError: It is in use, or cannot be opened.
    """
    with writing(path):
        file = _open(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise InvalidInputError(f"another process is at work in {path.parent}: it holds {path.name}") from None
    return file


def _open(path: Path) -> io.FileIO:
    """Open to read and write, without a buffer that could fail when it is emptied later."""
    return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")


def write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    """Write, however many calls it takes.

    Args:
        file: Where to.
        data: What.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all.

    Args:
        path: The file; replaced if it is there.
        data: What it holds.

    Raises:
        InvalidInputError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    with writing(path), _open(part) as file:
        file.truncate(0)
        write_all(file, data)
        os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last.

    Args:
        folder: The folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
