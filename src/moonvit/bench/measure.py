"""What a piece of work allocates, to the byte.

``peak`` replays what torch's allocator gave out and took back. Two modes make work measurable that a machine is too
slow for: ``ProductsLeftOut`` runs everything for real but matrix products and attention, whose results are zeros;
``Ledger`` counts fake tensors, which have no memory at all.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from moonvit.model import VisionModel
from moonvit.plan import Machine


class Bytes(NamedTuple):
    """What some work took.

    Attributes:
        peak: Most bytes at once beyond what there was before.
        kept: Bytes that its result holds.
    """

    peak: int
    kept: int


def peak(work: Callable[[], Any], device: str = "cpu") -> Bytes:
    """Run some work and count what it allocates.

    Args:
        work: Its result is held until the count is taken.
        device: Whose allocator.

    Returns:
        The count.
    """
    if device != "cpu":
        return _cuda_peak(work, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = work()
    assert recorded.profiler is not None
    results = recorded.profiler.kineto_results
    events = sorted((event for event in results.events() if event.name() == "[memory]"), key=lambda e: e.start_ns())
    sums = list(accumulate(event.nbytes() for event in events))
    del kept
    return Bytes(max(sums, default=0), sums[-1] if sums else 0)


def _cuda_peak(work: Callable[[], Any], device: str) -> Bytes:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = work()
    torch.cuda.synchronize(device)
    counted = Bytes(torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before)
    del kept
    return counted


def machine(device: str = "cpu") -> Machine:
    """This machine, as plans want it.

    Args:
        device: Type of the device.

    Returns:
        Threads, and whether the CPU has instructions for bfloat16.
    """
    return Machine(device, torch.get_num_threads(), bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


@contextmanager
def outputs_ready(model: VisionModel, tokens: Sequence[int]) -> Iterator[None]:
    """Make room for features beforehand, so that what is counted inside is workspace alone.

    Args:
        model: Whose features.
        tokens: Of each image that will be encoded, in order.

    Yields:
        Nothing; the model is as before afterwards.
    """
    buffers = iter([model._new_features(count, None) for count in tokens])
    model._new_features = lambda tokens, dtype: next(buffers)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model._new_features


def resident() -> int | None:
    """Bytes of memory this process holds, or None where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


# ---- without products -----------------------------------------------------------------------------------------------

_aten = torch.ops.aten


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.new_zeros(*x.shape[:-1], width)


def _attended(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, laid out as torch's CPU kernel does."""
    batch, heads, rows, width = q.shape
    out = q.new_zeros(batch, rows, heads, width).transpose(1, 2)
    return out, q.new_zeros(batch, rows, heads, dtype=torch.float32).transpose(1, 2)


_RESULTS: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: lambda x, weight, bias=None: _rows(x, weight.shape[0]),
    _aten.mm.default: lambda x, other: _rows(x, other.shape[1]),
    _aten.addmm.default: lambda bias, x, other: _rows(x, other.shape[1]),
    _aten.conv2d.default: lambda x, weight, *_: x.new_zeros(len(x), len(weight), 1, 1),
    _aten.convolution.default: lambda x, weight, *_: x.new_zeros(len(x), len(weight), 1, 1),
    _aten.scaled_dot_product_attention.default: lambda q, *_: _attended(q)[0],
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attended,
}
"""Result of each product, made without it."""
_FILLED = (_aten.mm.out, _aten.addmm.out)
"""Products into a buffer."""


class ProductsLeftOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Everything runs and allocates as it does, but matrix products and attention give zeros.

    What kernels of these products take for themselves is not seen. A patch embedding written as a convolution must have
    patches as input.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Stand in for the products."""
        kwargs = kwargs or {}
        if func in _FILLED:
            return kwargs["out"].zero_()
        return _RESULTS[func](*args) if func in _RESULTS else func(*args, **kwargs)


# ---- fake tensors ---------------------------------------------------------------------------------------------------


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of tensors that operations make, also of those that have no memory.

    Attributes:
        live: Bytes there are now.
        peak: Most there were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what an operation makes; what it is given was there before."""
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._known.setdefault(leaf.untyped_storage(), None)
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in self._known:
                storage = leaf.untyped_storage()
                self._known[storage] = None
                self.live += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return made

    def _gone(self, count: int) -> None:
        self.live -= count
