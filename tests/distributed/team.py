"""Processes that stand for ranks: started once, they do what they are told until the tests are over."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

STARTING = 240
"""Seconds that processes may take to import torch on a busy machine."""
WATCHDOG = 60
"""Seconds that a task may take."""


class Team:
    """Ranks of a gloo group over a store that none of them holds, as ``torchrun`` starts them.

    Args:
        size: Their number.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        context = mp.get_context("spawn")
        self.processes, self._pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        self.collect(STARTING)

    def run(self, work: Callable[..., Any], *args: Any, seconds: float = WATCHDOG) -> list[Any]:
        """What a function of this package gives on every rank; where it raises, the error.

        Args:
            work: At the top of a module.
            *args: For all ranks the same.
            seconds: What it may take.

        Returns:
            Results in rank order.
        """
        self.tell(work, *args)
        return self.collect(seconds)

    def tell(self, work: Callable[..., Any], *args: Any) -> None:
        """Begin to do something."""
        for pipe in self._pipes:
            pipe.send((work, args))

    def collect(self, seconds: float, gone: frozenset[int] = frozenset()) -> list[Any]:
        """Results of what was begun; None for ranks that are expected to be gone."""
        results: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(results) + len(gone - results.keys()) < self.size:
            open_pipes = {self._pipes[rank]: rank for rank in range(self.size) if rank not in results.keys() | gone}
            ready = wait(list(open_pipes), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self.stop()
                raise AssertionError(f"ranks {sorted(open_pipes.values())} of {self.size} gave nothing in {seconds} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    results[open_pipes[pipe]] = pipe.recv()
                except EOFError:
                    self.stop()
                    raise AssertionError(f"rank {open_pipes[pipe]} of {self.size} died") from None
        return [results.get(rank) for rank in range(self.size)]

    def kill(self, rank: int) -> None:
        """SIGKILL."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End all of them."""
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    pipe.send("ready")
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            return
        try:
            result = work(*args)
        except Exception as error:
            error.__notes__ = [traceback.format_exc()]
            result = error
        pipe.send(result)


def good(results: list[Any]) -> list[Any]:
    """Results, none of which is an error."""
    for rank, result in enumerate(results):
        if isinstance(result, Exception):
            notes = "".join(getattr(result, "__notes__", []))
            raise AssertionError(f"rank {rank}: {result!r}\n{notes}")
    return results
