"""One thread that works on several requests, a small step of each in turn.

A job is an iterator of steps: a micro-batch of pictures, a chunk of the prompt, one token. After each step the next job
gets its turn, so a long prompt delays the tokens of others by one step and no more. A job that fails, or that nobody
waits for any more, is gone at its next step and touches no other.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

from moonvit.engines import Delta
from moonvit.errors import EngineError, MoonvitError, OverloadedError

log = logging.getLogger("moonvit.engine")

Steps = Iterator[Delta | None]
"""What a job does; None where a step has nothing to say."""


class Job:
    """A request in work.

    Args:
        steps: What to do, one step at a time.
        deliver: Called in the worker's thread with each delta, with the error that ended the job, or with None at its
            end.
        name: For the log.
    """

    def __init__(self, steps: Steps, deliver: Callable[[Delta | BaseException | None], None], name: str = "") -> None:
        self.steps = steps
        self.deliver = deliver
        self.name = name
        self.cancelled = False


class Worker:
    """The thread and its queues.

    Args:
        max_active: Jobs that take turns; the others wait in order.
        max_waiting: Jobs that may wait.
    """

    def __init__(self, max_active: int, max_waiting: int) -> None:
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._active: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="moonvit-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether a job given now would be worked on."""
        return self._thread.is_alive() and not self._closed

    def submit(self, job: Job) -> None:
        """Queue a job.

        Args:
            job: What to do.

        Raises:
            OverloadedError: Too many wait already.
            EngineError: The worker has stopped.
        """
        with self._changed:
            if not self.alive:
                raise EngineError("the engine has stopped")
            if len(self._waiting) >= self._max_waiting:
                raise OverloadedError(f"{len(self._waiting)} requests wait already, allowed {self._max_waiting}")
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Forget a job; the step it is in is its last one. Cancelling what is over does nothing."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Stop after the step in progress; jobs that are not over get an ``EngineError``."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                if self._step(job):
                    with self._changed:
                        self._active.append(job)
        finally:
            with self._changed:
                self._closed = True
                left = [*self._active, *self._waiting]
                self._active.clear()
                self._waiting.clear()
            for job in left:
                _finish(job, EngineError("the engine was stopped"))

    def _next(self) -> Job | None:
        with self._changed:
            while not (self._closed or self._active or self._waiting):
                self._changed.wait()
            if self._closed:
                return None
            while self._waiting and len(self._active) < self._max_active:
                self._active.append(self._waiting.popleft())
            return self._active.popleft()

    def _step(self, job: Job) -> bool:
        """Do one step; whether there are more."""
        if job.cancelled:
            _finish(job, None)
            return False
        try:
            delta = next(job.steps)
        except StopIteration:
            _finish(job, None)
            return False
        except Exception as error:
            _finish(job, _as_moonvit(error, job.name))
            if type(error).__name__ == "AcceleratorError":
                # The device's context is lost, and with it every tensor on it: better no engine than wrong answers.
                log.critical("the accelerator failed; the engine stops")
                with self._changed:
                    self._closed = True
            return False
        except BaseException:
            _finish(job, EngineError("the engine was stopped"))
            raise
        if delta is not None:
            job.deliver(delta)
        return True


def _finish(job: Job, last: BaseException | None) -> None:
    close = getattr(job.steps, "close", None)
    try:
        if close is not None:
            close()
    finally:
        job.deliver(last)


def _as_moonvit(error: Exception, name: str) -> MoonvitError:
    if isinstance(error, MoonvitError):
        return error
    log.error("request %s failed in the engine", name or "without a name", exc_info=error)
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower() or "allocate memory" in str(error):
        return EngineError("there was not enough memory for this request")
    return MoonvitError(f"the engine failed on this request: {type(error).__name__}")
