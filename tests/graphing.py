"""CUDA graphs on a CPU: a recorder that runs operations again, and the varlen kernel that they are recorded with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from moonvit import attention


@torch.library.custom_op("moonvit_tests::varlen", mutates_args=())
def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
) -> torch.Tensor:
    """What ``varlen_attn`` computes, in one operation: lengths are read when it runs. Rows of no sequence are NaN."""
    out = torch.full_like(q, torch.nan)
    rows, keys = cu_q.tolist(), cu_k.tolist()
    assert rows[0] == keys[0] == 0 and rows == sorted(rows) and keys == sorted(keys) and len(rows) == len(keys)
    assert rows[-1] <= len(q) and keys[-1] <= len(k)
    for i in range(len(rows) - 1):
        length, seen = rows[i + 1] - rows[i], keys[i + 1] - keys[i]
        assert length <= max_q and seen <= max_k, "a kernel would compute a part of this sequence"
        if length:
            parts = (
                t.transpose(0, 1)[None]
                for t in (q[rows[i] : rows[i + 1]], k[keys[i] : keys[i + 1]], v[keys[i] : keys[i + 1]])
            )
            result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts)[0]
            out[rows[i] : rows[i + 1]] = result[0].transpose(0, 1)
    return out


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives the CPU a varlen backend."""
    monkeypatch.setattr(attention, "_varlen_function", lambda: varlen)
    yield


READS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"}
"""Operations that ask the device for a value: a capture would fail."""


def _storages(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


class _Tape(TorchDispatchMode):
    """Writes operations down as they are run, and where what they read was before."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.read: set[int] = set()
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in READS, f"{func} asks the device for a value"
        given = _storages((args, kwargs))
        self.read |= given - self._made
        result = func(*args, **(kwargs or {}))
        self._made |= _storages(result) - given
        self.steps.append((func, args, kwargs or {}, result))
        return result

    def again(self) -> None:
        """Run them again: on the tensors that were there before, and anew for what they made."""
        made: dict[int, Any] = {}

        def now(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, result in self.steps:
            fresh = func(*tree_map(now, args), **tree_map(now, kwargs))
            pairs = zip(result, fresh, strict=True) if isinstance(result, (tuple, list)) else [(result, fresh)]
            made.update((id(old), new) for old, new in pairs if isinstance(old, torch.Tensor))


class TapeRecorder:
    """Records as CUDA does: operations, tensors and numbers as they are then. A replay runs no Python of ours."""

    def __init__(self) -> None:
        self.tapes: list[_Tape] = []
        self.replays = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # a warm-up
        with _Tape() as tape:
            work()
        self.tapes.append(tape)

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                tape.again()

        return replay

    @property
    def recordings(self) -> int:
        """How often something was recorded."""
        return len(self.tapes)


def operations(work: Callable[[], None]) -> int:
    """Operations that some work runs."""

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += 1
            return func(*args, **(kwargs or {}))

    with Count() as count:
        work()
    return count.number
