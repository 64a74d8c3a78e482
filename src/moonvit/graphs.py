"""CUDA graphs of the blocks: hundreds of short kernels, written down once and launched as one.

A graph is recorded for a number of patches and replayed for every pack that has no more, in buffers that stay where
they are. A pass with it reads

    patches_LC -- embed --> hidden_LD -- fill --> hidden_BD -- replay --> hidden_BD -- take --> hidden_LD -- finish -->

and everything but the replay is done anew for each pack: patches, positions, rotary factors, lengths of sequences,
merge and projector. Only the blocks are inside; what they read of a pack is a ``Layout`` of the static buffers.

- **Padding.** Rows from L to B are zeros, and attend within sequences of their own. No image sees them.
- **Lengths.** The host's one number, the longest sequence, is B: no sequence is longer, whatever is replayed.
- **Backends.** ``varlen`` alone takes its lengths from the device. Others read them on the host, so they run eagerly.

Shape suffixes: those of ``moonvit.model``; B patches that a graph has room for, S sequences of its attention.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch

from moonvit.attention import Backend, Factors, Span, Spans, row_ranges
from moonvit.cache import WeightCache
from moonvit.errors import ConfigError
from moonvit.model import Chunk, Layout, Metadata, VisionModel
from moonvit.plan import (
    GRAPH_BUDGETS,
    GRAPH_PATCHES,
    ROWS,
    graph_budget,
    graph_bytes,
    graph_sequences,
    graph_starts,
    read_bytes,
)

Mode = Literal["single", "data", "tensor"]
"""How the ranks of a group share the work; ``"single"`` is no group."""
CAPTURED: Backend = "varlen"
"""The backend that can be recorded."""
WARM_UPS = 2
"""Runs before a recording, in which libraries choose kernels and take workspaces."""


class Recorder(Protocol):
    """Makes work repeatable."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record some work.

        Args:
            work: Device work on tensors that stay where they are. It may be run any number of times, and what it leaves
                in them means nothing.

        Returns:
            The same work on the same tensors, as often as it is called, without the Python that made it.
        """
        ...


def capture_context(
    mode: Mode, enter: Callable[[], AbstractContextManager[Any]] | None = None
) -> AbstractContextManager[Any]:
    """What a recording is made within.

    Tensor-parallel blocks hold collectives of their group, and communicators of engines must be told that they are
    being recorded: they exchange addresses when it is over, so all ranks of the group must enter together. They do,
    since each sees every pack. Data-parallel ranks have packs of their own or none, record when they come to it, and
    record no collective: one that entered the group's mode would wait for the others for ever.

    Args:
        mode: How the ranks share the work.
        enter: Makes the group's graph-capture mode, such as ``ca_comm.capture`` of an engine's group; None where it has
            none, as NCCL needs none.

    Returns:
        The group's mode for tensor-parallel work, else one that does nothing. ``enter`` is called for nothing else.

    Raises:
        ConfigError: The mode is unknown.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode = {mode!r}: known are {', '.join(get_args(Mode))}", param="mode")
    return enter() if mode == "tensor" and enter is not None else nullcontext()


class CudaRecorder:
    """Records CUDA graphs, each with memory of its own.

    Args:
        mode: As for ``capture_context``.
        enter: Likewise.
    """

    def __init__(self, mode: Mode = "single", enter: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
        if mode != "tensor":
            capture_context(mode)  # an unknown one is refused now
        self.mode: Mode = mode
        self.enter = enter
        self._streams: dict[int, torch.cuda.Stream] = {}

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run some work on a stream beside, then capture it there, on the current device.

        Args:
            work: As ``Recorder.record`` has it.

        Returns:
            The replay, on the stream that is current when it is called.
        """
        device = torch.cuda.current_device()
        # One stream for all recordings: libraries keep a workspace for each stream they have seen, and so take it in a
        # warm-up, outside the graphs.
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream, current = self._streams[device], torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may allocate meanwhile.
        with (
            capture_context(self.mode, self.enter),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            work()
        current.wait_stream(stream)
        return graph.replay


class Graph:
    """The blocks for packs of up to B patches, recorded, and the buffers they were recorded on.

    Args:
        model: Whose blocks.
        budget: Patches that there is room for (B).
        recorder: Who records.
    """

    @torch.no_grad()
    def __init__(self, model: VisionModel, budget: int, recorder: Recorder) -> None:
        config, device = model.config, model.device
        ranges = list(row_ranges(budget, ROWS[0]))
        # A buffer made in inference mode could only be filled there.
        with torch.inference_mode(False):
            self.hidden_BD = torch.zeros(budget, config.hidden_size, dtype=model.dtype, device=device)
            self.factors = Factors(torch.zeros(budget, config.head_dim // 2, dtype=torch.complex64, device=device))
            shape = len(ranges) + 1, graph_sequences(budget) + 1
            self.lengths = torch.zeros(shape, dtype=torch.int32, device=device)
            self._bounds = torch.tensor([(0, budget), *ranges], dtype=torch.int32)
        self._set_lengths((0,))
        cu_k = self.lengths[0]
        chunks = tuple(
            # One span as wide as any image may be: all that is said of an image in particular is in the lengths.
            Chunk(start, stop, Spans((Span(0, stop - start, 0, budget),), cu_q, cu_k))
            for (start, stop), cu_q in zip(ranges, self.lengths[1:], strict=True)
        )
        layout = Layout(groups=1, heads_at_once=None, backend=CAPTURED, chunks=chunks, rotary=self.factors)
        self._replay = recorder.record(partial(model.vision_tower.encoder, self.hidden_BD, layout))

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """What replays read and write."""
        return self.hidden_BD, self.factors.cis_LC, self.lengths

    def __call__(self, hidden_LD: torch.Tensor, meta: Metadata) -> None:
        """Take a pack through the blocks, in place.

        Args:
            hidden_LD: The embedded pack.
            meta: What ``prepare`` made.
        """
        length = hidden_LD.shape[0]
        self._set_lengths(meta.starts)
        self.factors.cis_LC[:length].copy_(meta.rotary.cis(0, length))
        self.hidden_BD[:length].copy_(hidden_LD)
        self.hidden_BD[length:].zero_()  # else padding would go through the blocks again, and grow
        self._replay()
        hidden_LD.copy_(self.hidden_BD[:length])

    def _set_lengths(self, starts: Sequence[int]) -> None:
        """Cumulative keys of every sequence, then its cumulative queries in each chunk."""
        first, last = self._bounds[:, :1], self._bounds[:, 1:]
        rows_S = torch.tensor(graph_starts(starts, self.hidden_BD.shape[0]), dtype=torch.int32)
        lengths = torch.minimum(torch.maximum(rows_S, first), last) - first
        # From pinned memory the copy waits for nothing.
        self.lengths.copy_(lengths.pin_memory() if self.lengths.is_cuda else lengths, non_blocking=True)


class GraphCache:
    """Runs the blocks of a model: by replay where a pack has a graph or there is room for one, else eagerly.

    Pass it to the model: ``model(patches_LC, meta, blocks=graphs)``. Which graph a pack takes, and which are dropped
    for it, follows from the packs so far and the numbers here alone, so tensor-parallel ranks decide alike.

    Features agree with eager ones within the float32 gate; they are the same bits where products have the same rows: a
    pack that fills its graph, prepared with the default rows and heads in one group.

    Args:
        model: In evaluation mode, on its device. Graphs are forgotten when a weight of its blocks changes, moves, or is
            replaced.
        max_bytes: Of all graphs together, as ``graph_bytes`` counts them; the least recently used are dropped for new
            ones, and recorded again when their turn comes. 0 runs everything eagerly.
        recorder: Who records; None is a ``CudaRecorder`` without a group.
        budgets: Patches that graphs have room for.

    Not for several CUDA streams at a time: the buffers of a graph are one pack's at a time, in the order of the stream.

    Raises:
        ConfigError: ``max_bytes`` cannot be read, or a budget is no multiple of 64.
    """

    def __init__(
        self,
        model: VisionModel,
        max_bytes: int | str,
        recorder: Recorder | None = None,
        budgets: Sequence[int] = GRAPH_BUDGETS,
    ) -> None:
        for budget in budgets:
            if budget < GRAPH_PATCHES or budget % GRAPH_PATCHES:
                raise ConfigError(f"budget = {budget}: must be a multiple of {GRAPH_PATCHES} patches", param="budgets")
        self.model = model
        self.budgets = tuple(sorted(set(budgets)))
        self._recorder = CudaRecorder() if recorder is None else recorder
        self._kept: WeightCache[int, Graph] = WeightCache(read_bytes(max_bytes, "max_bytes"))
        self._lock = threading.Lock()

    @torch.no_grad()
    def __call__(self, hidden_LD: torch.Tensor, meta: Metadata) -> None:
        """Take a pack through the blocks, in place.

        Args:
            hidden_LD: The embedded pack.
            meta: What ``prepare`` made.
        """
        budget = self.budget_of(meta)
        if budget is None or not self._replayed(hidden_LD, meta, budget):
            self.model.vision_tower.encoder(hidden_LD, meta)

    def budget_of(self, meta: Metadata) -> int | None:
        """The graph that a pack takes, whether there is room for it or not.

        Args:
            meta: What ``prepare`` made.

        Returns:
            Patches of the graph; None where the pack is too large, has too many images, or is for a backend that cannot
            be recorded.
        """
        if meta.backend != CAPTURED:
            return None
        return graph_budget(meta.patches, len(meta.grids), self.budgets)

    def warm_up(self) -> tuple[int, ...]:
        """Record before the first request comes: every graph there is room for, smallest first.

        Tensor-parallel ranks must call it together.

        Returns:
            Patches of the graphs there are.
        """
        if self.model.prepare([(1, 2, 2)]).backend == CAPTURED:
            with self._lock, self._device():
                for budget in self.budgets if self._current() else ():
                    if budget in self.recorded or self.bytes + self._bytes_of(budget) <= self.max_bytes:
                        self._graph(budget)
        return self.recorded

    @property
    def recorded(self) -> tuple[int, ...]:
        """Patches of the graphs there are, least recently used first."""
        return tuple(self._kept.keys())

    @property
    def bytes(self) -> int:
        """Bytes of the graphs there are."""
        return self._kept.bytes

    @property
    def max_bytes(self) -> int:
        """Bytes that graphs may have."""
        return self._kept.max_bytes

    def clear(self) -> None:
        """Forget all graphs, and give their memory back."""
        with self._lock:
            self._kept.clear()

    def _replayed(self, hidden_LD: torch.Tensor, meta: Metadata, budget: int) -> bool:
        # A graph has one set of buffers: the next pack must not fill them before this one is taken.
        with self._lock, self._device():
            graph = self._graph(budget) if self._current() else None
            if graph is not None:
                graph(hidden_LD, meta)
            return graph is not None

    def _current(self) -> bool:
        """Forget graphs of weights that are no more; whether graphs can be kept at all."""
        weights = list(self.model.vision_tower.encoder.parameters())
        # Made in inference mode: whether they change cannot be known, and to record for each pack is worse than not to.
        if any(weight.is_inference() for weight in weights):
            return False
        self._kept.watch(weights, self.model.moves)
        return True

    def _graph(self, budget: int) -> Graph | None:
        """The graph, recorded if there is room for it; None where there is not."""
        graph = self._kept.get(budget)
        if graph is None and self._kept.make_room(nbytes := self._bytes_of(budget)):
            graph = Graph(self.model, budget, self._recorder)
            self._kept.put(budget, graph, nbytes)
        return graph

    def _bytes_of(self, budget: int) -> int:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return graph_bytes(self.model.config, dtype, budget, self.model.packed)

    def _device(self) -> AbstractContextManager[Any]:
        device = self.model.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
