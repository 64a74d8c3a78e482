"""What can only be shown on an NVIDIA GPU: ``pytest tests/gpu``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from moonvit import reference
from moonvit.attention import attend, choose_backend, make_rotary, make_spans, rotate_, row_ranges, this_machine
from moonvit.bench.measure import peak, room_for, run_plan
from moonvit.checkpoint import packable
from moonvit.encoder import VisionEncoder
from moonvit.families import FAMILIES
from moonvit.graphs import CudaRecorder, GraphCache
from moonvit.grids import Grid
from moonvit.model import VisionModel
from moonvit.plan import GRAPH_BUDGETS, make_plan
from moonvit.quantised import Unpacked
from tests.packing import WAYS, model_of, pack, plain, state_of, wide_config
from tests.parity.cases import CLIPS, GATE, IMAGES, random_model, random_patches, tiny, wide
from tests.unit.test_attention import GRIDS, RELEASED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
CUDA = torch.device("cuda")
HALVES = [torch.bfloat16, torch.float16]
FAMILY_NAMES = list(FAMILIES)


@pytest.fixture(autouse=True)
def exact_float32() -> Any:
    """No TF32: the float32 gate is for float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def _grids(family: str) -> list[tuple[int, int, int]]:
    return [
        *IMAGES,
        *([grid for grids in CLIPS.values() for grid in grids] if FAMILIES[family].pos_emb_time > 1 else []),
    ]


@pytest.mark.parametrize(("heads", "head_dim"), RELEASED)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS.keys())
def test_rotary_has_the_bits_of_the_full_table(
    heads: int, head_dim: int, grids: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    table = reference.full_rotary_table(head_dim, device=CUDA)
    factors = torch.cat([table[:h, :w].reshape(h * w, -1).repeat(t, 1) for t, h, w in grids])
    patches = len(factors)
    x = torch.randn(patches, heads, head_dim, device=CUDA).to(dtype)
    turned = torch.view_as_complex(x.float().view(patches, heads, -1, 2)) * factors[:, None]
    expected = torch.view_as_real(turned).flatten(-2).to(dtype)
    rotary = make_rotary(grids, head_dim, 10000.0, CUDA)
    assert torch.equal(rotary.cis(0, patches), factors)
    keys_values = torch.stack((x, x), dim=1)
    for start, stop in row_ranges(patches, 256):
        rotate_(keys_values[start:stop, 0], rotary.cis(start, stop))
    assert torch.equal(keys_values[:, 0], expected)


@pytest.mark.parametrize(("heads", "head_dim"), RELEASED)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_fused_attention_agrees_with_the_reference(heads: int, head_dim: int, dtype: torch.dtype, backend: Any) -> None:
    if backend == "varlen" and choose_backend(CUDA, dtype) != "varlen":
        pytest.skip("varlen runs in half precision from compute capability 8.0")
    starts = (0, 4, 40, 44, 1340)
    keys_values = torch.randn(starts[-1], 2, heads, head_dim, device=CUDA).to(dtype)
    q, k, v = torch.randn(starts[-1], heads, head_dim, device=CUDA).to(dtype), keys_values[:, 0], keys_values[:, 1]
    for start, stop in row_ranges(starts[-1], 256):
        ours = attend(q[start:stop], k, v, make_spans(start, stop, starts, backend, CUDA), backend)
        slow = attend(q[start:stop], k, v, make_spans(start, stop, starts, "reference", CUDA), "reference")
        bound = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        assert reference.max_relative_error([ours], [slow]) <= bound


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("size", [tiny, wide])
def test_float32_is_within_the_gate_of_float64(family: str, size: Any) -> None:
    model, grids = random_model(size(family)), _grids(family)
    patches = random_patches(grids)
    expected = reference.features(model.state_dict(), model.config, patches, grids)
    model.to(CUDA)
    ours = model(patches.to(CUDA), model.prepare(grids, 96))
    assert reference.max_relative_error([one.cpu() for one in ours], expected) <= GATE


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", HALVES)
def test_low_precision_is_no_further_off_than_plain_pytorch(family: str, dtype: torch.dtype) -> None:
    model, grids = random_model(wide(family), dtype).to(CUDA), _grids(family)
    patches = random_patches(grids).to(CUDA)
    with torch.device(CUDA):
        exact = torch.cat(reference.features(model.state_dict(), model.config, patches, grids, torch.float32))
        plain = torch.cat(reference.features(model.state_dict(), model.config, patches, grids, dtype))
    ours = torch.cat(model(patches, model.prepare(grids)))
    assert (ours - exact).norm() <= 1.1 * (plain - exact).norm()


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_never_waits_for_the_device(family: str, dtype: torch.dtype) -> None:
    model, grids = random_model(tiny(family), dtype).to(CUDA), _grids(family)
    pixels = torch.randint(0, 256, (sum(t * h * w for t, h, w in grids), 588), dtype=torch.uint8, device=CUDA)
    meta = model.prepare(grids, 96)
    first = model(pixels, meta)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = model(pixels, meta)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_packed_weights_give_what_their_numbers_give(way: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonvit.plan.chunks.PACKED_VALUES", 6000)  # several blocks of narrow matrices
    config, grids = wide_config(family), _grids(family)
    state = pack(state_of(random_model(config)), packable(config), way)
    expected = reference.features(plain(state), config, random_patches(grids), grids)
    model, patches = model_of(config, state).to(CUDA), random_patches(grids).to(CUDA)
    meta = model.prepare(grids, 96)
    ours = model(patches, meta)
    assert reference.max_relative_error([one.cpu() for one in ours], expected) <= GATE
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = model(patches, meta)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    for name, tensor in model.state_dict().items():
        if state[name].dtype.itemsize == 1:
            assert torch.equal(tensor.cpu().view(torch.uint8), state[name].view(torch.uint8))


def test_peak_follows_hidden_keys_and_values() -> None:
    model = random_model(wide("kimi-k3"), torch.bfloat16).to(CUDA)
    grids, rows = [(1, 128, 128)], 256
    pixels = torch.zeros(16384, 588, dtype=torch.uint8, device=CUDA)
    meta = model.prepare(grids, rows)
    model(pixels, meta)  # library workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    features = model(pixels, meta)
    peak = torch.cuda.max_memory_allocated() - before
    config = model.config
    whole = 2 * 16384 * (config.hidden_size + 2 * config.qkv_size)
    a_chunk = rows * (8 * config.qkv_size * 4 + 4 * config.intermediate_size * 2)
    assert peak <= whole + a_chunk + features[0].nbytes


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_the_allocator_gives(family: str, dtype: str) -> None:
    """Within 2 % and the allocator's rounding to 512 bytes; what libraries keep was there before."""
    model = random_model(wide(family), getattr(torch, dtype)).to(CUDA)
    for grids in ([Grid(1, 128, 128)], [Grid(1, 36, 36)] * 3):
        plan = make_plan(model.config, grids, dtype=dtype, machine=this_machine("cuda"))
        pixels = torch.zeros(plan.patches, 588, dtype=torch.uint8, device=CUDA)
        work = partial(run_plan, model, pixels, plan, out=room_for(model, plan))
        work()
        found = peak(work, "cuda").peak
        assert abs(found - plan.workspace_bytes) <= 0.02 * plan.workspace_bytes + 512 * len(plan.stages)


# ---- graphs ---------------------------------------------------------------------------------------------------------


def _graph_model(model: VisionModel, dtype: torch.dtype = torch.bfloat16) -> VisionModel:
    if choose_backend(CUDA, dtype) != "varlen":
        pytest.skip("graphs need varlen: half precision from compute capability 8.0")
    return model.to(CUDA, dtype)


def _assert_as_good_as_eager(model: VisionModel, grids: list[tuple[int, int, int]], graphs: GraphCache) -> None:
    """Replays are the same twice, and no further off than an eager pass."""
    patches, meta = random_patches(grids).to(CUDA), model.prepare(grids)
    replayed, again, eager = (model(patches, meta, blocks=blocks) for blocks in (graphs, graphs, None))
    assert all(torch.equal(a, b) for a, b in zip(replayed, again, strict=True))
    with torch.device(CUDA):
        exact = torch.cat(reference.features(Unpacked(model.state_dict()), model.config, patches, grids, torch.float32))
    assert (torch.cat(replayed) - exact).norm() <= 1.1 * (torch.cat(eager) - exact).norm()


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_captured_graph_is_no_further_off_than_an_eager_pass(family: str, dtype: torch.dtype) -> None:
    model = _graph_model(random_model(wide(family)), dtype)
    graphs = GraphCache(model, "1GiB")
    packs = [[(1, 2, 2)], IMAGES, [(1, 16, 16)], [(1, 36, 36)], [(1, 8, 8)] * 20, [(1, 64, 64)]]
    packs += [*CLIPS.values()] if FAMILIES[family].pos_emb_time > 1 else []
    for grids in packs + packs[::-1]:
        _assert_as_good_as_eager(model, grids, graphs)
    assert set(graphs.recorded) >= {256, 512, 2048, 4096}


@pytest.mark.parametrize("way", ["weights that change", "packed weights"])
def test_weights_that_change_or_are_packed_are_captured_too(way: str) -> None:
    config = wide_config("kimi-k2.5")
    state = state_of(random_model(config))
    packed = way == "packed weights"
    model = _graph_model(model_of(config, pack(state, packable(config), "mixed") if packed else state))
    graphs = GraphCache(model, "1GiB")
    _assert_as_good_as_eager(model, IMAGES, graphs)
    assert graphs.recorded == (512,)
    if not packed:
        model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()}, assign=True)
        _assert_as_good_as_eager(model, IMAGES, graphs)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_replay_never_waits_for_the_device_and_launches_little(family: str) -> None:
    model, grids = _graph_model(random_model(tiny(family, num_layers=8))), _grids(family)
    graphs = GraphCache(model, "1GiB")
    meta, patches = model.prepare(grids, 96), random_patches(grids).to(CUDA)
    model(patches, meta, blocks=graphs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(patches, meta, blocks=graphs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    hidden = model.embed(patches, meta)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        graphs(hidden, meta)
        torch.cuda.synchronize()
    calls = [event.name for event in seen.events()]
    assert sum("GraphLaunch" in name for name in calls) == 1
    assert sum("LaunchKernel" in name for name in calls) < 20 + 12 * len(grids)


@pytest.mark.parametrize("family", ["kimi-k2.5", "kimi-k3"])
def test_a_captured_graph_stays_within_its_bytes(family: str) -> None:
    """What libraries keep for the stream of the recordings was taken by the first one."""
    model, recorder = _graph_model(random_model(wide(family))), CudaRecorder()
    GraphCache(model, "1GiB", recorder, (256,)).warm_up()
    for budget in GRAPH_BUDGETS:
        graphs = GraphCache(model, "1GiB", recorder, (budget,))
        found = peak(graphs.warm_up, "cuda")
        assert graphs.recorded == (budget,)
        assert found.peak <= graphs.bytes + 512 * 16  # the allocator's rounding
        graphs.clear()


def test_an_encoder_replays_and_its_plan_counts_the_graphs() -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_layers": 2}
    enc, plain = (VisionEncoder.from_config("kimi-k2.5", graph_cache=nbytes, **options) for nbytes in ("80MB", 0))
    _graph_model(enc.model)
    patches, grids = random_patches(IMAGES), IMAGES
    assert enc.plan(grids).peak_bytes == plain.plan(grids).peak_bytes + 80_000_000
    _assert_as_good_as_eager(enc.model, IMAGES, enc._graphs)
    assert len(enc.encode_patches(patches, grids)) == len(grids) and enc._graphs.recorded


def test_dropped_graphs_give_the_devices_memory_back() -> None:
    graphs = GraphCache(_graph_model(random_model(wide("kimi-k2.5"))), "1GiB")
    after = []
    for _ in range(3):
        assert graphs.warm_up() == GRAPH_BUDGETS
        graphs.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        after.append(torch.cuda.memory_reserved())
    assert after[0] == after[1] == after[2]


def test_float32_is_run_eagerly() -> None:
    model, patches = random_model(tiny("kimi-k2.5")).to(CUDA), random_patches(IMAGES).to(CUDA)
    graphs, meta = GraphCache(model, "1GiB"), model.prepare(IMAGES)
    ours, eager = model(patches, meta, blocks=graphs), model(patches, meta)
    assert graphs.recorded == () and all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
