"""The attention seam: chunks and spans, rotary positions, and backends that agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moonvit import attention
from moonvit.attention import Span, attend, axis_table, choose_backend, make_rotary, make_spans, rotate_, row_ranges
from moonvit.errors import ConfigError
from moonvit.reference import full_rotary_table

CPU = torch.device("cpu")
RELEASED = [(16, 72), (12, 128)]
GRIDS = {
    "1x1": [(1, 1, 1)],
    "2x512": [(1, 2, 512)],
    "512x2": [(1, 512, 2)],
    "36x36": [(1, 36, 36)],
    "64x64": [(1, 64, 64)],
    "37x91, two frames": [(2, 37, 91)],
    "repeated": [(1, 36, 36)] * 3,
    "mixed": [(1, 36, 36), (2, 37, 91), (1, 1, 1), (1, 36, 36), (4, 6, 10), (1, 2, 512)],
}


@pytest.fixture(scope="module", params=RELEASED, ids=["72", "128"])
def released(request: pytest.FixtureRequest) -> tuple[int, int, torch.Tensor]:
    """Heads, head dimension, and the 512 x 512 table of the official towers."""
    heads, head_dim = request.param
    return heads, head_dim, full_rotary_table(head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS.keys())
def test_rotary_has_the_bits_of_the_full_table(
    released: tuple[int, int, torch.Tensor], grids: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    heads, head_dim, table = released
    factors = torch.cat([table[:h, :w].reshape(h * w, -1).repeat(t, 1) for t, h, w in grids])
    patches = len(factors)
    x = torch.randn(patches, heads, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    turned = torch.view_as_complex(x.float().view(patches, heads, -1, 2)) * factors[:, None]
    expected = torch.view_as_real(turned).flatten(-2).to(dtype)

    rotary = make_rotary(grids, head_dim, 10000.0)
    assert torch.equal(rotary.cis(0, patches), factors)
    for rows in (256, 100):
        keys_values = torch.stack((x, x), dim=1)  # keys stand in every other row of a buffer
        for start, stop in row_ranges(patches, rows):
            rotate_(keys_values[start:stop, 0], rotary.cis(start, stop))
        assert torch.equal(keys_values[:, 0], expected)
        assert torch.equal(keys_values[:, 1], x)


def test_rotary_tables_follow_distinct_grids() -> None:
    one = make_rotary([(1, 36, 36)], 128, 10000.0)
    assert one.axis_SC.nbytes == (36 + 36) * 128 // 4 * 8 == 18_432
    assert make_rotary([(1, 36, 36)] * 5, 128, 10000.0).axis_SC.nbytes == 18_432
    largest = make_rotary([(1, 512, 512)], 128, 10000.0)
    assert largest.axis_SC.nbytes == 262_144
    assert not any(isinstance(value, torch.Tensor) for image in largest.images for value in image)
    both = make_rotary([(1, 36, 36), (1, 2, 512)], 128, 10000.0)
    assert both.axis_SC.nbytes == (36 + 36 + 2 + 512) * 128 // 4 * 8


def test_axis_table_values() -> None:
    table = axis_table(3, 72)
    assert table.shape == (3, 18) and table.dtype == torch.complex64
    frequencies = table[1].angle()
    expected = torch.tensor([1.0, 0.59948421, 0.35938138])
    torch.testing.assert_close(frequencies[:3], expected, rtol=1e-6, atol=0)
    assert frequencies[-1].item() == pytest.approx(1.6681e-4, rel=1e-4)
    assert torch.equal(table[0], torch.ones(18, dtype=torch.complex64))


@given(total=st.integers(0, 5000), rows=st.integers(1, 600))
def test_row_ranges_cover_every_row_once(total: int, rows: int) -> None:
    ranges = list(row_ranges(total, rows))
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(total))
    sizes = [stop - start for start, stop in ranges]
    assert all(0 < size <= rows for size in sizes)
    assert len(set(sizes[:-1])) <= 1
    if rows >= 16:
        assert len(sizes) <= -(-total // rows) + 1


def test_row_ranges_are_even() -> None:
    assert [stop - start for start, stop in row_ranges(1296, 256)] == [224, 224, 224, 224, 224, 176]
    assert list(row_ranges(100, 256)) == [(0, 100)]


def test_spans_of_a_chunk_that_cuts_images() -> None:
    spans = make_spans(6, 20, (0, 4, 10, 12, 40), "varlen", CPU)
    assert spans.items == (Span(0, 4, 4, 10), Span(4, 6, 10, 12), Span(6, 14, 12, 40))
    assert spans.cu_q is not None and spans.cu_q.tolist() == [0, 4, 6, 14] and spans.cu_q.dtype == torch.int32
    assert spans.cu_k is not None and spans.cu_k.tolist() == [0, 6, 8, 36] and spans.cu_k.dtype == torch.int32
    assert (spans.max_q, spans.max_k) == (8, 28)
    assert make_spans(6, 20, (0, 4, 10, 12, 40), "sdpa", CPU).cu_q is None


def _packed(starts: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    keys_values = torch.randn(starts[-1], 2, heads, head_dim, generator=generator).to(dtype)
    queries = torch.randn(starts[-1], heads, head_dim, generator=generator).to(dtype)
    return queries, keys_values[:, 0], keys_values[:, 1]


def _by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
    """Attention under a dense block mask, in float64."""
    owner = torch.repeat_interleave(torch.arange(len(starts) - 1), torch.tensor(starts).diff())
    scores = torch.einsum("qnh,knh->nqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(owner[:, None] != owner[None], -torch.inf)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1), v.double())


@pytest.mark.parametrize("backend", ["sdpa", "reference", "varlen"])
@pytest.mark.parametrize(("heads", "head_dim"), [*RELEASED, (3, 20)])
def test_backends_agree_with_a_dense_mask(
    backend: Any, heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def varlen_on_cpu(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *longest: int
    ) -> torch.Tensor:
        assert longest == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        assert cu_q[-1] == len(q) and cu_k[-1] == len(k) == len(v)
        spans = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
        return attend(q, k, v, attention.Spans(tuple(Span(a, b, c, d) for a, b, c, d in spans)), "reference")

    monkeypatch.setattr(attention, "_varlen_function", lambda: varlen_on_cpu)
    starts = (0, 4, 37, 39, 120)
    q, k, v = _packed(starts, heads, head_dim, torch.float32)
    expected = _by_hand(q, k, v, starts)
    for rows, heads_at_once in ((7, None), (50, 1), (1000, 2), (1000, 100)):
        out = torch.empty_like(q)
        for start, stop in row_ranges(starts[-1], rows):
            spans = make_spans(start, stop, starts, backend, CPU)
            out[start:stop] = attend(q[start:stop], k, v, spans, backend, heads_at_once)
        assert (out.double() - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), RELEASED)
def test_the_cpu_never_builds_a_score_matrix(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []
            self.largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.names.append(str(func))
            for tensor in result if isinstance(result, tuple) else (result,):
                self.largest = max(self.largest, tensor.numel())
            return result

    starts = (0, 2048)
    q, k, v = _packed(starts, heads, head_dim, dtype)
    with Recorder() as seen:
        out = attend(q[:256], k, v, make_spans(0, 256, starts, "sdpa", CPU), "sdpa")
    assert out.shape == (256, heads, head_dim) and out.dtype == dtype
    assert seen.largest <= 2048 * heads * head_dim < heads * 2048 * 256
    assert any("flash_attention_for_cpu" in name for name in seen.names)
    assert not any("math" in name or "softmax" in name for name in seen.names)


def test_backend_choice_and_refusals() -> None:
    assert choose_backend(CPU, torch.bfloat16) == "sdpa"
    q, k, v = _packed((0, 4), 2, 8, torch.float32)
    spans = make_spans(0, 4, (0, 4), "sdpa", CPU)
    with pytest.raises(ConfigError, match=r"'flash'.*known: sdpa, varlen, reference"):
        attend(q, k, v, spans, "flash")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="varlen"):
        attend(q, k, v, spans, "varlen")


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    rows=st.integers(1, 64),
    noisy=st.integers(0, 4),
)
def test_an_image_never_sees_another(lengths: list[int], rows: int, noisy: int) -> None:
    noisy %= len(lengths)
    starts = tuple(sum(lengths[:count]) for count in range(len(lengths) + 1))
    q, k, v = _packed(starts, 2, 8, torch.float32)
    other = [x.clone() for x in (q, k, v)]
    for x in other:
        x[starts[noisy] : starts[noisy + 1]] = torch.nan
    results = []
    for queries, keys, values in ((q, k, v), other):
        out = torch.empty_like(q)
        for start, stop in row_ranges(starts[-1], rows):
            spans = make_spans(start, stop, starts, "sdpa", CPU)
            out[start:stop] = attend(queries[start:stop], keys, values, spans, "sdpa")
        results.append(out)
    outside = torch.ones(starts[-1], dtype=torch.bool)
    outside[starts[noisy] : starts[noisy + 1]] = False
    assert torch.equal(results[0][outside], results[1][outside])
