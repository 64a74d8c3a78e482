"""What a piece of work allocates, to the byte.

``peak`` replays what torch's allocator gave out and took back. Two modes make work measurable that a machine is too
slow for: ``ProductsLeftOut`` runs everything for real but matrix products and attention, whose results are zeros;
``Ledger`` counts fake tensors, which have no memory at all.

Shape suffixes: those of ``moonvit.model``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from moonvit.model import Positions, VisionModel
from moonvit.plan import Plan


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


def peak_without_products(work: Callable[[], Any]) -> Bytes:
    """Run some work on the CPU, products left out, and count what it allocates.

    Args:
        work: As for ``peak``.

    Returns:
        The count, without what kernels of products take for themselves.
    """
    with ProductsLeftOut():  # type: ignore[no-untyped-call]
        return peak(work)


def peak_of_fakes(work: Callable[[], Any]) -> Bytes:
    """Run some work on fake tensors and count what it would allocate.

    Args:
        work: As for ``peak``.

    Returns:
        The count, without what kernels take for themselves.
    """
    with Ledger() as ledger:
        result = work()
        kept = ledger.live
    del result
    return Bytes(ledger.peak, kept)


def run_plan(
    model: VisionModel,
    patches_LC: torch.Tensor,
    plan: Plan,
    positions: Positions | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Every pass of a plan, one after the other, as an encoder makes them.

    Args:
        model: Tower and projector.
        patches_LC: (L, 588) of all images, on the model's device.
        plan: What ``make_plan`` made for them.
        positions: Where position tables are kept; None keeps none.
        out: Where the features of each image go, as ``forward`` takes it; what is allocated is then workspace.

    Returns:
        features_ME of each image, in order.
    """
    features: list[torch.Tensor] = []
    start = 0
    for batch in plan.batches:
        grids = [plan.grids[index] for index in batch.indices]
        meta = model.prepare(grids, plan.rows, plan.groups, positions)
        room = None if out is None else [out[index] for index in batch.indices]
        features += model(patches_LC[start : start + batch.patches], meta, out=room)
        start += batch.patches
    return features


def room_for(model: VisionModel, plan: Plan) -> list[torch.Tensor]:
    """Room for the features of a request.

    Args:
        model: Whose features.
        plan: Of the request.

    Returns:
        (M, E) of each image, not filled, in the dtype of the projector.
    """
    width, dtype = model.config.text_hidden_size, model.projector.dtype
    return [torch.empty(grid.tokens, width, dtype=dtype, device=model.device) for grid in plan.grids]


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
