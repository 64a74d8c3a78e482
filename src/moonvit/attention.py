"""The one attention seam: rows of queries against the keys and values of the images they belong to.

Images are packed one behind the other, and an image attends only to itself. The tower hands over a chunk of query rows
at a time, so a call sees a few ``Span``s: where each image's queries stand in the chunk, and where its keys stand in
the packed buffers. No backend ever sees a mask, and none builds a square score matrix except ``reference``.

Shape suffixes: R query rows of a chunk, L packed rows of the keys, N heads, H head dimension, S rows of the RoPE
tables, C = H / 2 complex factors.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from moonvit.errors import ConfigError
from moonvit.plan import Machine, chunk_rows

Backend = Literal["sdpa", "varlen", "reference"]


class Span(NamedTuple):
    """One image's part of a chunk: queries ``q_start:q_stop`` of the chunk see keys ``k_start:k_stop`` of the pack."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


@dataclass(frozen=True)
class Spans:
    """All images of a chunk, in order; both sides are gapless.

    Attributes:
        items: One ``Span`` per image that has queries in the chunk.
        cu_q: Cumulative query rows, int32 (images + 1), on the device; only for ``varlen``.
        cu_k: Cumulative key rows from the first image's first key, int32 (images + 1); only for ``varlen``.
    """

    items: tuple[Span, ...]
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None

    @property
    def max_q(self) -> int:
        """Query rows of the longest image in the chunk."""
        return max(span.q_stop - span.q_start for span in self.items)

    @property
    def max_k(self) -> int:
        """Key rows of the longest image in the chunk."""
        return max(span.k_stop - span.k_start for span in self.items)


def row_ranges(total: int, rows: int) -> Iterator[tuple[int, int]]:
    """Cut ``total`` rows into chunks of at most ``rows``, as equal as multiples of 16 allow.

    Args:
        total: Rows there are.
        rows: Rows of a chunk at most.

    Yields:
        ``(start, stop)`` of each chunk; nothing where there are no rows.
    """
    if total == 0:
        return
    size = chunk_rows(total, rows)
    for start in range(0, total, size):
        yield start, min(start + size, total)


def make_spans(start: int, stop: int, starts: Sequence[int], backend: Backend, device: torch.device) -> Spans:
    """Find the images that own some rows of a pack.

    Args:
        start: First row of the chunk.
        stop: Row after its last.
        starts: First row of each image, and the end of the last.
        backend: Who will read the spans; only ``varlen`` needs them on the device.
        device: Where the attention runs.

    Returns:
        The spans, ready for any number of ``attend`` calls.
    """
    items = []
    for first, last in itertools.pairwise(starts):
        low, high = max(first, start), min(last, stop)
        if low < high:
            items.append(Span(low - start, high - start, first, last))
    if backend != "varlen":
        return Spans(tuple(items))
    base = items[0].k_start
    cu_q = torch.tensor([0, *(span.q_stop for span in items)], dtype=torch.int32).to(device)
    cu_k = torch.tensor([0, *(span.k_stop - base for span in items)], dtype=torch.int32).to(device)
    return Spans(tuple(items), cu_q, cu_k)


# ---- rotary positions -----------------------------------------------------------------------------------------------


def axis_table(
    length: int,
    head_dim: int,
    theta: float = 10000.0,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RoPE factors of one axis.

    Args:
        length: Columns or rows of the grid.
        head_dim: Width H of a head.
        theta: Base of the frequencies.
        device: Where it is computed, since devices differ in the last bit.
        out: Where they go; None makes room.

    Returns:
        complex64 (length, H / 4): ``exp(i * p * theta ** (-4k / H))`` for position p and frequency k. ``torch.polar``
        gives the bits of the official 512 x 512 table; separate sines and cosines do not.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim))
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    if out is None:
        return torch.polar(torch.ones_like(angles), angles)
    return torch.polar(torch.ones_like(angles), angles, out=out)


class Turned(NamedTuple):
    """One image of a pack, as RoPE sees it.

    Attributes:
        start: Row of the pack of its first patch.
        stop: Row after its last.
        first: Row of the tables where its columns begin; its rows follow them.
        h: Patch rows.
        w: Patch columns.
    """

    start: int
    stop: int
    first: int
    h: int
    w: int


@dataclass(frozen=True)
class Rotary:
    """RoPE of a pack, without anything that stands for each patch.

    Attributes:
        axis_SC: For each distinct (h, w) its w column factors, then its h row factors; complex64 (S, H / 4).
        images: The images of the pack, in order.
    """

    axis_SC: torch.Tensor
    images: tuple[Turned, ...]

    def cis(self, start: int, stop: int) -> torch.Tensor:
        """Factors of patches ``start:stop``: complex64 (R, H / 2), column and row angles taking turns."""
        x_index_R, y_index_R = self._indices(start, stop)
        columns = self.axis_SC.index_select(0, x_index_R)
        rows = self.axis_SC.index_select(0, y_index_R)
        del x_index_R, y_index_R
        return torch.stack((columns, rows), dim=-1).flatten(1)

    def _indices(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the tables for column and row of each patch; counted anew for each chunk, so none are kept."""
        found = []
        for image in self.images[bisect_right(self.images, start, key=lambda image: image.stop) :]:
            if image.start >= stop:
                break
            low, high = max(start, image.start) - image.start, min(stop, image.stop) - image.start
            patch = torch.arange(low, high, dtype=torch.int32, device=self.axis_SC.device)
            y = patch.div(image.w, rounding_mode="floor")
            if image.stop - image.start > image.h * image.w:
                y.remainder_(image.h)
            found.append((patch.remainder_(image.w).add_(image.first), y.add_(image.first + image.w)))
        if len(found) == 1:
            return found[0]
        columns, rows = zip(*found, strict=True)
        return torch.cat(columns), torch.cat(rows)


@dataclass(frozen=True)
class Factors:
    """RoPE of a pack, written out for each patch: for passes that may make nothing anew.

    Attributes:
        cis_LC: Factors of the pack, complex64 (L, H / 2).
    """

    cis_LC: torch.Tensor

    def cis(self, start: int, stop: int) -> torch.Tensor:
        """Factors of patches ``start:stop``, a view."""
        return self.cis_LC[start:stop]


def make_rotary(
    grids: Sequence[tuple[int, int, int]], head_dim: int, theta: float, device: torch.device | str = "cpu"
) -> Rotary:
    """Tables for the images of a pack.

    Args:
        grids: (t, h, w) of each image; any positive sizes. All frames of an image turn alike.
        head_dim: Width H of a head.
        theta: Base of the frequencies.
        device: Where they are wanted.

    Returns:
        ``sum of (h + w) over distinct (h, w) * H / 4 * 8`` bytes of table, whatever the images are in number.
    """
    first_row: dict[tuple[int, int], int] = {}
    images, rows, start = [], 0, 0
    for t, h, w in grids:
        if (h, w) not in first_row:
            first_row[h, w] = rows
            rows += w + h
        images.append(Turned(start, start + t * h * w, first_row[h, w], h, w))
        start += t * h * w
    axis_SC = torch.empty(rows, head_dim // 4, dtype=torch.complex64, device=device)
    for (h, w), first in first_row.items():
        axis_table(w, head_dim, theta, device, axis_SC[first : first + w])
        axis_table(h, head_dim, theta, device, axis_SC[first + w : first + w + h])
    return Rotary(axis_SC, tuple(images))


def rotate_(x_RNH: torch.Tensor, cis_RC: torch.Tensor) -> None:
    """Apply 2-D RoPE in place: consecutive values form a pair, turned in float32 and written back in x's dtype.

    Args:
        x_RNH: Queries or keys of a chunk; rows may be strided.
        cis_RC: Factors, complex64 (R, H / 2).
    """
    pairs = torch.unflatten(x_RNH, -1, (-1, 2))
    turned = torch.view_as_complex(pairs.float())
    turned.mul_(cis_RC.unsqueeze(1))
    if x_RNH.dtype != torch.float32:
        x_RNH.copy_(torch.view_as_real(turned).flatten(-2))


# ---- backends -------------------------------------------------------------------------------------------------------


def _varlen_function() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The fastest backend that can run here.

    Args:
        device: Where the tower's weights are.
        dtype: Their dtype.

    Returns:
        ``"varlen"`` on NVIDIA GPUs from compute capability 8.0 in a half precision, ``"sdpa"`` elsewhere.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda" and half and torch.version.hip is None and _varlen_function() is not None:
        major, _ = torch.cuda.get_device_capability(device)
        if major >= 8:
            return "varlen"
    return "sdpa"


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16, as torch itself asks before it uses oneDNN."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def this_machine(device: str = "cpu") -> Machine:
    """This machine, as plans want it.

    Args:
        device: Type of the device.

    Returns:
        Threads, and whether the CPU has instructions for bfloat16.
    """
    return Machine(device, torch.get_num_threads(), has_bfloat16())


def packs_keys(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel of ``sdpa`` copies keys and values for every call.

    Args:
        device: Where the tower's weights are.
        dtype: Their dtype.

    Returns:
        True for bfloat16 on CPUs with instructions for it.
    """
    return device.type == "cpu" and dtype == torch.bfloat16 and has_bfloat16()


def attend(
    q_RNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    spans: Spans,
    backend: Backend,
    heads_at_once: int | None = None,
) -> torch.Tensor:
    """Softmax attention, not causal, scale ``H ** -0.5``, each image within itself.

    Args:
        q_RNH: Queries of the chunk.
        k_LNH: Keys of all packed images; rows may be strided.
        v_LNH: Values, likewise.
        spans: Which queries see which keys.
        backend: One of ``BACKENDS``.
        heads_at_once: Heads of one kernel call on a CPU, where kernels copy keys and values; None is all.

    Returns:
        (R, N, H) in the dtype of the queries.

    Raises:
        ConfigError: The backend is unknown, or no kernel of linear memory can take these tensors.
    """
    function = BACKENDS.get(backend)
    if function is None:
        raise ConfigError(f"attention backend {backend!r} is unknown; known: {', '.join(BACKENDS)}", param="attention")
    return function(q_RNH, k_LNH, v_LNH, spans, heads_at_once)


def _per_image(
    one_image: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    q_RNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    spans: Spans,
    heads_at_once: int | None = None,
) -> torch.Tensor:
    """Run a one-image kernel on (1, N, rows, H) tensors for every image of the chunk, some heads at a time."""
    heads = q_RNH.shape[1]
    step = heads if heads_at_once is None else min(heads, heads_at_once)
    whole = step == heads and len(spans.items) == 1
    out_RNH = None if whole else torch.empty_like(q_RNH)
    for q_start, q_stop, k_start, k_stop in spans.items:
        for first in range(0, heads, step):
            some = slice(first, first + step)
            parts = (
                t.transpose(0, 1).unsqueeze(0)
                for t in (q_RNH[q_start:q_stop, some], k_LNH[k_start:k_stop, some], v_LNH[k_start:k_stop, some])
            )
            result_RNH = one_image(*parts).squeeze(0).transpose(0, 1)
            if out_RNH is None:
                return result_RNH
            out_RNH[q_start:q_stop, some] = result_RNH
            del result_RNH  # before the next one is made
    assert out_RNH is not None
    return out_RNH


def _sdpa(
    q_RNH: torch.Tensor, k_LNH: torch.Tensor, v_LNH: torch.Tensor, spans: Spans, heads_at_once: int | None
) -> torch.Tensor:
    step = heads_at_once if q_RNH.device.type == "cpu" else None
    return _per_image(_sdpa_kernel(q_RNH), q_RNH, k_LNH, v_LNH, spans, step)


def _sdpa_kernel(query: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    # scaled_dot_product_attention falls back to a kernel with a full score matrix where its fast ones refuse. The
    # public switch against that is process-wide, and would take the fallback from other models in other threads too.
    if query.device.type == "cpu":
        return _cpu_flash
    if query.device.type == "cuda":
        return _cuda_fused
    return F.scaled_dot_product_attention


def _cpu_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
    return output


def _cuda_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    cuda = torch.backends.cuda
    params = cuda.SDPAParams(q, k, v, None, 0.0, False, False)
    if not (cuda.can_use_flash_attention(params) or cuda.can_use_efficient_attention(params)):
        raise ConfigError(
            f"no fused attention kernel takes head dimension {q.shape[-1]} in {q.dtype} on this GPU; "
            "use bfloat16 or float16, or the CPU",
            param="attention",
        )
    return F.scaled_dot_product_attention(q, k, v)


def _varlen(
    q_RNH: torch.Tensor, k_LNH: torch.Tensor, v_LNH: torch.Tensor, spans: Spans, heads_at_once: int | None
) -> torch.Tensor:
    function = _varlen_function()
    if function is None or spans.cu_q is None or spans.cu_k is None:
        raise ConfigError(
            "the varlen backend needs torch.nn.attention.varlen and spans made for it; use sdpa", param="attention"
        )
    first, last = spans.items[0].k_start, spans.items[-1].k_stop
    output: torch.Tensor = function(
        q_RNH, k_LNH[first:last], v_LNH[first:last], spans.cu_q, spans.cu_k, spans.max_q, spans.max_k
    )
    return output


def _reference(
    q_RNH: torch.Tensor, k_LNH: torch.Tensor, v_LNH: torch.Tensor, spans: Spans, heads_at_once: int | None
) -> torch.Tensor:
    def one_image(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
        return (scores.softmax(dim=-1) @ v.float()).to(q.dtype)

    return _per_image(one_image, q_RNH, k_LNH, v_LNH, spans)


BACKENDS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Spans, int | None], torch.Tensor]] = {
    "sdpa": _sdpa,
    "varlen": _varlen,
    "reference": _reference,
}
"""``sdpa``: any device, an image at a time. ``varlen``: one CUDA call per chunk. ``reference``: slow, float32."""
