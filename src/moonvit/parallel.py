"""Several ranks that encode as one, applied from outside to the single-device model.

``Parallel`` is what a user says: how the work is divided, and which process group may be used. ``Ranks`` is that group
at work. It speaks only inside the group, and every rank makes the same calls in the same order whatever it holds:
before the work they agree on the request, after it on whether it succeeded, so that an error of one is raised on all,
and a rank that dies is named by the others instead of being waited for.

Two ways to divide: images go to ranks (data), or heads and MLP do (tensor); ``moonvit.deploy`` says how.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moonvit import errors
from moonvit.errors import ConfigError, EngineError, InvalidInputError, MoonvitError
from moonvit.model import VisionModel

AGREED_BYTES = 16
"""What a rank tells the others before and after its work."""
MODES = ("auto", "data", "tensor")
_T = TypeVar("_T")
_GLANCE = 0.5
"""Seconds between two looks at the others while waiting for them."""
_GRACE = 10.0
"""Seconds in which it becomes known who broke a connection."""
_YEARS = timedelta(days=3650)


@dataclass(frozen=True)
class Parallel:
    """How an encoder works with the ranks of a process group.

    Attributes:
        mode: ``"data"`` gives whole images to ranks; ``"tensor"`` divides heads and MLP, of which each rank then holds
            its part; ``"auto"`` is data, which any model and any number of ranks can do.
        group: A ``torch.distributed`` process group, of which every member makes the same calls. None is the default
            group, or this process alone where there is none.
        receiver: The rank of the group that wants the features; the others get none. None gives them to all.

    Raises:
        ConfigError: The mode or the receiver cannot be.
    """

    mode: Literal["auto", "data", "tensor"] = "auto"
    group: dist.ProcessGroup | None = None
    receiver: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode = {str(self.mode)[:40]!r}: known are {', '.join(MODES)}", param="mode")
        if self.receiver is not None and (not isinstance(self.receiver, int) or self.receiver < 0):
            raise ConfigError(f"receiver = {self.receiver!r}, expected a rank of the group, or None", param="receiver")


class Ranks:
    """The members of a process group, or one process alone.

    Made on every member at once. What it is given is done by this rank; it then waits for the others, and while it
    waits looks every half second whether they are still there.

    Args:
        group: The group; None is one process alone, which never waits for anybody.

    Attributes:
        rank: Place of this process in the group.
        size: Members of the group.

    Raises:
        EngineError: This process is not a member, or another one is gone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = 0, 1
        self._lost: str | None = None
        self._lock = threading.Lock()
        if group is None:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise EngineError("this process is not a member of the process group it was given")
        self._group = group
        self._store = distributed_c10d._get_process_group_store(group)
        self._on_stream = dist.get_backend(group) == "nccl"
        place = torch.device("cuda", torch.cuda.current_device()) if self._on_stream else torch.device("cpu")
        self._said = torch.empty(AGREED_BYTES, dtype=torch.uint8, device=place)
        self._heard = list(torch.empty(self.size, AGREED_BYTES, dtype=torch.uint8, device=place))
        self._members: list[_Process] = []
        self._members = [_Process.from_bytes(said) for said in self.gather(_Process.this().to_bytes())]

    @classmethod
    def of(cls, parallel: Parallel | None) -> Ranks:
        """The ranks that a user means.

        Args:
            parallel: What was said; None is one process alone.

        Returns:
            Their group.

        Raises:
            ConfigError: Several processes were launched and have no group yet, or the receiver is none of them.
            EngineError: As in the constructor.
        """
        group = parallel.group if parallel else None
        if parallel and group is None:
            if dist.is_initialized():
                group = dist.group.WORLD
            elif int(os.environ.get("WORLD_SIZE") or 1) > 1:
                raise ConfigError(
                    f"{os.environ['WORLD_SIZE']} processes were launched, but there is no process group: "
                    "call torch.distributed.init_process_group first",
                    param="group",
                )
        ranks = cls(group)
        if parallel and parallel.receiver is not None and parallel.receiver >= ranks.size:
            raise ConfigError(
                f"receiver = {parallel.receiver}, but the ranks of the group are 0 to {ranks.size - 1}",
                param="receiver",
            )
        return ranks

    # ---- requests ---------------------------------------------------------------------------------------------------

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the calls of one request together: threads take turns. Every rank must begin them in the same order."""
        if self.size == 1:
            yield
            return
        with self._lock:
            self.check()
            yield

    def together(self, work: Callable[[], _T], facts: Callable[[_T], Mapping[str, Any]] | None = None) -> _T:
        """Do something that every rank does, and go on only where all of them could.

        Args:
            work: Holds no call of the group.
            facts: What of the result must be the same on all ranks, JSON-able.

        Returns:
            What ``work`` gave on this rank.

        Raises:
            MoonvitError: What it raised on the first rank where it failed, on all ranks.
            InvalidInputError: The facts differ; the message says which.
            EngineError: It failed otherwise on another rank, or a rank is gone.
        """
        if self.size == 1:
            return work()
        error: Exception | None = None
        told: Mapping[str, Any] = {}
        try:
            result = work()
            told = facts(result) if facts else {}
        except Exception as found:
            error = found
        except BaseException as found:
            self._leave(found)
            raise
        digest = hashlib.blake2b(json.dumps(told).encode(), digest_size=AGREED_BYTES - 1).digest()
        heard = self._agree(bytes([error is not None]) + digest)
        if any(said[0] for said in heard):
            self._raise(error, [rank for rank, said in enumerate(heard) if said[0]])
        if len(set(heard)) > 1:
            self._refuse(told)
        return result

    def common(self, flags: Sequence[bool]) -> list[bool]:
        """What every rank has.

        Args:
            flags: What this one has; as many on every rank.

        Returns:
            True where all ranks say so.
        """
        if self.size == 1:
            return list(flags)
        heard = self.gather(bytes(flags))
        return [all(said[index] for said in heard) for index in range(len(flags))]

    @contextmanager
    def linked(self) -> Iterator[None]:
        """Do what holds calls of the group: who leaves it by an error takes the others along."""
        try:
            yield
        except BaseException as error:
            self._leave(error)
            raise

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place.

        Args:
            values: Of the same shape and dtype on every rank, contiguous.

        Returns:
            ``values``.
        """
        self._finish(dist.all_reduce(values, group=self._group, async_op=True))
        return values

    def exchange(
        self,
        own: dict[int, torch.Tensor],
        owners: Sequence[int],
        room: Callable[[int], torch.Tensor],
        receiver: int | None = None,
    ) -> list[torch.Tensor]:
        """Give each tensor to the ranks that want it, at its exact size.

        Args:
            own: Tensors of this rank by index, contiguous.
            owners: The rank of each tensor.
            room: Makes the tensor that another rank's one, by index, is received in.
            receiver: The rank that wants them; None is all.

        Returns:
            All tensors in order; none on ranks that want none. Those of this rank are the same as in ``own``.
        """
        if self.size == 1:
            return [own[index] for index in range(len(owners))]
        tensors, works = [], []
        wanted = receiver is None or receiver == self.rank
        for index, owner in enumerate(owners):
            tensor = own[index] if owner == self.rank else room(index) if wanted else None
            if wanted:
                assert tensor is not None
                tensors.append(tensor)
            if receiver is None:
                assert tensor is not None
                works.append(dist.broadcast(_raw(tensor), group_src=owner, group=self._group, async_op=True))
            elif owner != receiver:
                works.append(self._send(tensor, owner, receiver))
        for work in works:
            self._finish(work)
        self._settle()
        return tensors

    def _send(self, tensor: torch.Tensor | None, owner: int, receiver: int) -> Any:
        # An all-to-all in which all but one pair exchange nothing. Unlike a send and its receive it can be waited for
        # in small steps, which those do not survive.
        nothing = self._said[:0]
        given = _raw(tensor) if tensor is not None and self.rank == owner else nothing
        taken = _raw(tensor) if tensor is not None and self.rank == receiver else nothing
        sent, received = [0] * self.size, [0] * self.size
        sent[receiver], received[owner] = given.numel(), taken.numel()
        return dist.all_to_all_single(taken, given, received, sent, group=self._group, async_op=True)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def gather(self, value: bytes) -> list[bytes]:
        """Tell all ranks something short.

        Args:
            value: Of any length, which may differ from rank to rank.

        Returns:
            What each rank said, in rank order.

        Raises:
            EngineError: A rank is gone.
        """
        if self.size == 1:
            return [value]
        lengths = [int.from_bytes(said, "little") for said in self._agree(len(value).to_bytes(AGREED_BYTES, "little"))]
        place = self._said.device
        given = torch.zeros(max(1, *lengths), dtype=torch.uint8, device=place)
        given[: len(value)] = torch.tensor(list(value), dtype=torch.uint8, device=place)
        heard = [torch.empty_like(given) for _ in lengths]
        self._finish(dist.all_gather(heard, given, group=self._group, async_op=True))
        self._settle()
        return [bytes(said[:length].tolist()) for said, length in zip(heard, lengths, strict=True)]

    def _agree(self, word: bytes) -> list[bytes]:
        self._said.copy_(torch.tensor(list(word), dtype=torch.uint8))
        self._finish(dist.all_gather(self._heard, self._said, group=self._group, async_op=True))
        self._settle()
        return [bytes(said.tolist()) for said in self._heard]

    def _raise(self, error: Exception | None, failed: Sequence[int]) -> None:
        """Raise what the first of the failed ranks has to say."""
        said = self.gather(json.dumps(_told(error)).encode())[failed[0]]
        if self.rank == failed[0]:
            assert error is not None
            first = error
        else:
            name, message, param = json.loads(said)
            if kind := getattr(errors, name, None):
                first = kind(message, param=param)
            else:
                first = EngineError(f"rank {failed[0]} of {self.size} failed: {name}: {message[:500]}")
        if isinstance(first, MoonvitError):
            first.rank = failed[0]
        raise first from None

    def _refuse(self, told: Mapping[str, Any]) -> None:
        everyone = [json.loads(said) for said in self.gather(json.dumps(told).encode())]
        for key in told:
            for rank, other in enumerate(everyone):
                if other.get(key) != everyone[0].get(key):
                    raise InvalidInputError(
                        f"the ranks do not agree on {key}: rank 0 has {str(everyone[0].get(key))[:100]}, "
                        f"rank {rank} has {str(other.get(key))[:100]}",
                        param=key,
                    )
        raise InvalidInputError("the ranks were not asked for the same")

    # ---- who is there -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See whether all ranks are there, without waiting for them.

        Raises:
            EngineError: One is known to be gone; what the group was used for cannot go on.
        """
        if self.size == 1:
            return
        if self._lost is None:
            self._lost = self._look()
        if self._lost is not None:
            raise EngineError(self._lost)

    def _look(self) -> str | None:
        """Who is gone: a process of this machine, or whom another rank has told of."""
        gone = [rank for rank, member in enumerate(self._members) if rank != self.rank and member.has_ended()]
        try:
            if gone:
                process = self._members[gone[0]]
                said = f"rank {gone[0]} of {self.size} is gone: its process {process.pid} has ended"
                self._store.set("lost", said)
                return said
            return bytes(self._store.get("lost")).decode() if self._store.check(["lost"]) else None
        except RuntimeError as error:
            return said if gone else f"the process that holds the store of {self.size} ranks is gone: {_line(error)}"

    def _leave(self, error: BaseException) -> None:
        """Tell the others that this rank does not go on."""
        if self.size == 1 or self._lost is not None:
            return
        self._lost = f"rank {self.rank} of {self.size} left in the middle of a request: {_line(error)}"
        try:
            if not self._store.check(["lost"]):
                self._store.set("lost", self._lost)
        except RuntimeError:  # with its store the group is gone too
            pass

    def _finish(self, work: Any) -> None:
        """Wait for a call of the group; on a stream, only queue behind it."""
        if self._on_stream:
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=_GLANCE))
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._blame(error)
            try:
                self.check()
            except EngineError:
                # Who has done its part may leave before the others have noticed.
                if not self._succeeds(work):
                    raise
                return

    @staticmethod
    def _succeeds(work: Any) -> bool:
        try:
            work.wait(timedelta(seconds=_GLANCE))
        except RuntimeError:
            return False
        return True

    def _settle(self) -> None:
        """On a stream, wait for what is queued there; calls that wait for a dead rank would never end."""
        if not self._on_stream:
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        started = time.monotonic()
        while not event.query():
            waited = time.monotonic() - started
            if waited > _GLANCE:
                self.check()
            time.sleep(min(0.05, waited / 10))

    def _blame(self, error: Exception) -> None:
        """Say who broke a connection, as soon as it is known."""
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            self.check()
            time.sleep(0.1)
        self._lost = f"a rank of {self.size} is gone, and it is not known which: {_line(error)}"
        raise EngineError(self._lost) from error


def sum_up(model: VisionModel, ranks: Ranks) -> None:
    """Let a model whose heads and MLP are divided over ranks add up what each of them gives.

    Args:
        model: This rank's part.
        ranks: The ranks.
    """
    from moonvit.checkpoint.parts import SUMMED

    for block in model.vision_tower.encoder.blocks:
        for name in SUMMED:
            block.get_submodule(name).register_forward_hook(lambda _layer, _given, out_RD: ranks.add_up(out_RD))


@contextmanager
def launched() -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, or this process alone.

    The group is made here, speaks over TCP (gloo), and ends with the block. It has no time limit of its own: a rank may
    be done hours before another.

    Yields:
        The ranks.

    Raises:
        EngineError: The others cannot be reached.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        yield Ranks()
        return
    try:
        dist.init_process_group("gloo", timeout=_YEARS)
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"the other ranks cannot be reached: {_line(error)}") from error
    try:
        yield Ranks(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Process:
    """A process, and the machine it is on: a kernel that runs, and its space of process numbers."""

    machine: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> _Process:
        return cls(_machine(), os.getpid(), _started(os.getpid()) or "")

    def has_ended(self) -> bool:
        """Whether it is a process of this machine and no longer runs."""
        return self.machine == _machine() != "" and _started(self.pid) != self.started

    def to_bytes(self) -> bytes:
        return json.dumps([self.machine, self.pid, self.started]).encode()

    @classmethod
    def from_bytes(cls, said: bytes) -> _Process:
        return cls(*json.loads(said))


@cache
def _machine() -> str:
    """Empty where this cannot be known, as outside Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in ticks; None where it has ended, also where nobody has asked for its exit code yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, so that a group need not know its dtype."""
    return tensor.view(torch.uint8).view(-1)


def _told(error: Exception | None) -> list[str | None]:
    if isinstance(error, MoonvitError):
        return [type(error).__name__, error.message, error.param]
    return [type(error).__name__, _line(error), None]


def _line(error: BaseException | None) -> str:
    """What an error says, in one line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
