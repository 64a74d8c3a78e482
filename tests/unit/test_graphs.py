"""Graphs of the blocks: which a pack takes, what they hold, when they go, and that a replay is what an eager pass is.

A recorder that writes operations down takes the place of CUDA's; ``tests/gpu`` has the real one.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonvit.checkpoint import packable
from moonvit.errors import ConfigError
from moonvit.families import FAMILIES, family_config
from moonvit.graphs import CudaRecorder, Graph, GraphCache, capture_context
from moonvit.model import Metadata, VisionModel
from moonvit.plan import (
    GRAPH_BUDGETS,
    GRAPH_PATCHES,
    ROWS,
    chunk_rows,
    graph_budget,
    graph_bytes,
    graph_sequences,
    graph_starts,
)
from moonvit.reference import max_relative_error
from tests.graphing import TapeRecorder, operations, varlen_on_cpu
from tests.packing import model_of, pack, state_of, wide_config
from tests.parity.cases import CLIPS, GATE, IMAGES, random_model, random_patches, tiny

pytestmark = pytest.mark.usefixtures(varlen_on_cpu.__name__)
FAMILY_NAMES = list(FAMILIES)
Grids = list[tuple[int, int, int]]
SMALL: Grids = [(1, 4, 6), (1, 2, 2)]
FULL: Grids = [(1, 8, 24), (1, 4, 12), (1, 2, 8)]
"""256 patches: a graph without padding."""
PACKS: dict[str, Grids] = {
    "smallest": [(1, 2, 2)],
    "several": SMALL,
    "to the last row": FULL,
    "one row of squares short": [(1, 14, 18)],
    "two chunks": [(1, 16, 18)],
    "many": IMAGES,
    "as many as there may be": [(1, 2, 2)] * 4,
    "an image over several chunks": [(1, 2, 2), (1, 24, 26)],
}


def varlen_model(family: str = "kimi-k2.5", seed: int = 0, **overrides: object) -> VisionModel:
    model = random_model(tiny(family, **overrides), seed=seed)
    model.attention = "varlen"
    return model


def graphs_of(model: VisionModel, max_bytes: int | str = "1GiB", **options: Any) -> tuple[GraphCache, TapeRecorder]:
    recorder = TapeRecorder()
    return GraphCache(model, max_bytes, recorder, **options), recorder


def run(model: VisionModel, grids: Grids, graphs: GraphCache | None, seed: int = 0) -> list[torch.Tensor]:
    return model(random_patches(grids, seed), model.prepare(grids), blocks=graphs)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- a replay is an eager pass --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_replay_is_within_the_gate_of_an_eager_pass(family: str) -> None:
    model = varlen_model(family)
    graphs, recorder = graphs_of(model)
    packs = dict(PACKS) if family == "kimi-vl" else {**PACKS, **{f"{t} frames": clip for t, clip in CLIPS.items()}}
    for seed, grids in enumerate([*packs.values(), *reversed(packs.values())]):
        assert max_relative_error(run(model, grids, graphs, seed), run(model, grids, None, seed)) <= GATE
    assert recorder.replays == 2 * len(packs)
    assert recorder.recordings == len({graph_budget(sum(t * h * w for t, h, w in g), len(g)) for g in packs.values()})


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_full_graph_gives_the_bits_of_an_eager_pass(family: str) -> None:
    model = varlen_model(family)
    graphs, _ = graphs_of(model)
    for grids in (FULL, [(1, 16, 32)], [(1, 32, 32)]):
        assert graphs.budget_of(model.prepare(grids)) == sum(t * h * w for t, h, w in grids)
        assert same(run(model, grids, graphs), run(model, grids, None))


def test_sdpa_agrees_too() -> None:
    model = varlen_model()
    replayed = run(model, IMAGES, graphs_of(model)[0])
    model.attention = "sdpa"
    assert max_relative_error(replayed, run(model, IMAGES, None)) <= GATE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_off_than_an_eager_pass(dtype: torch.dtype) -> None:
    exact = torch.cat(run(varlen_model(), IMAGES, None))
    model = varlen_model().to(dtype)
    replayed, eager = (torch.cat(run(model, IMAGES, graphs)) for graphs in (graphs_of(model)[0], None))
    assert replayed.dtype == dtype
    assert (replayed.float() - exact).norm() <= 1.1 * (eager.float() - exact).norm()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_packed_weights_are_replayed_too(family: str) -> None:
    config = wide_config(family)
    model = model_of(config, pack(state_of(random_model(config)), packable(config), "mixed"))
    model.attention = "varlen"
    graphs, recorder = graphs_of(model)
    assert max_relative_error(run(model, IMAGES, graphs), run(model, IMAGES, None)) <= GATE
    assert recorder.replays == 1
    assert graphs.bytes == graph_bytes(config, "float32", 512, model.packed) > graph_bytes(config, "float32", 512)


def test_chunks_and_groups_of_a_pass_are_not_those_of_its_graph() -> None:
    model = varlen_model()
    graphs, recorder = graphs_of(model)
    patches, whole = random_patches(IMAGES), run(model, IMAGES, graphs)
    assert same(model(patches, model.prepare(IMAGES, rows=48, groups=2), blocks=graphs), whole)
    assert recorder.recordings == 1


def test_steps_of_forward_are_forward() -> None:
    model = varlen_model()
    patches, meta = random_patches(IMAGES), model.prepare(IMAGES)
    hidden = model.embed(patches, meta)
    with torch.no_grad():
        model.vision_tower.encoder(hidden, meta)
    assert same(model.finish(hidden, meta), model(patches, meta))
    seen: list[tuple[torch.Size, Metadata]] = []
    model(patches, meta, blocks=lambda hidden_LD, meta: seen.append((hidden_LD.shape, meta)))
    assert seen == [((meta.patches, model.config.hidden_size), meta)]


def test_features_go_where_they_are_wanted() -> None:
    model = varlen_model()
    graphs, _ = graphs_of(model)
    expected = run(model, IMAGES, graphs)
    room = [torch.full_like(features, torch.nan) for features in expected]
    given_back = model(random_patches(IMAGES), model.prepare(IMAGES), out=room, blocks=graphs)
    assert all(a is b for a, b in zip(given_back, room, strict=True)) and same(room, expected)


# ---- padding --------------------------------------------------------------------------------------------------------


def test_nothing_of_another_pack_is_left() -> None:
    model = varlen_model()
    graphs, recorder = graphs_of(model)
    expected = run(model, SMALL, graphs_of(model)[0])
    for others, scale in ((FULL, 1e3), ([(1, 2, 2)] * 3, 1.0), (FULL, torch.nan), (FULL, torch.inf)):
        model(random_patches(others, 7) * scale, model.prepare(others), blocks=graphs)
        assert same(run(model, SMALL, graphs), expected)
    assert recorder.recordings == 1


def test_padding_is_numbers_and_does_not_grow() -> None:
    model = varlen_model()
    graphs, _ = graphs_of(model)
    run(model, SMALL, graphs)
    graph = graphs._kept.get(256)
    assert graph is not None
    padding = graph.hidden_BD[28:].clone()
    assert padding.isfinite().all()
    for _ in range(3):
        run(model, SMALL, graphs)
    assert torch.equal(graph.hidden_BD[28:], padding)


def test_rows_of_padding_reach_no_image() -> None:
    model = varlen_model()
    graphs, _ = graphs_of(model)
    expected = run(model, SMALL, graphs)
    graph = graphs._kept.get(256)
    assert graph is not None

    def poisoned(hidden_LD: torch.Tensor, meta: Metadata) -> None:
        graph._set_lengths(meta.starts)
        graph.hidden_BD.copy_(torch.randn_like(graph.hidden_BD) * 100)
        graph.hidden_BD[: meta.patches] = hidden_LD
        graph._replay()
        hidden_LD.copy_(graph.hidden_BD[: meta.patches])

    assert same(model(random_patches(SMALL), model.prepare(SMALL), blocks=poisoned), expected)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80))
def test_sequences_of_a_padded_pack(squares: list[int]) -> None:
    starts = [0, *itertools.accumulate(4 * count for count in squares)]
    for budget in GRAPH_BUDGETS:
        if graph_budget(starts[-1], len(squares), (budget,)) is None:
            continue
        padded = graph_starts(starts, budget)
        assert padded[: len(starts)] == starts and padded[-1] == budget
        assert len(padded) == graph_sequences(budget) + 1
        lengths = [last - first for first, last in itertools.pairwise(padded)]
        assert all(0 <= length <= GRAPH_PATCHES for length in lengths[len(squares) :])
        assert max(lengths) <= budget


def test_lengths_of_chunks() -> None:
    graph = Graph(varlen_model(num_layers=1), 512, TapeRecorder())
    graph._set_lengths((0, 200, 300, 304))
    keys, *queries = graph.lengths.tolist()
    assert keys == [0, 200, 300, 304, 368, 432, 496, *[512] * 10]
    assert queries[0] == [0, 200, *[256] * 15]
    assert queries[1] == [0, 0, 44, 48, 112, 176, 240, *[256] * 10]


# ---- which graph ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patches", "images", "budget"),
    [
        (4, 1, 256),
        (256, 4, 256),
        (257, 1, 512),
        (256, 5, 512),
        (20, 64, 4096),
        (4096, 64, 4096),
        (4100, 1, None),
        (260, 65, None),
    ],
)
def test_a_pack_takes_the_smallest_graph_it_fits(patches: int, images: int, budget: int | None) -> None:
    assert graph_budget(patches, images) == budget


def test_packs_share_a_graph_by_their_room_alone() -> None:
    model = varlen_model(num_layers=1)
    graphs, recorder = graphs_of(model, budgets=(512, 64, 256))
    assert graphs.budgets == (64, 256, 512)
    for grids, recorded in (
        ([(1, 4, 6)], (64,)),
        ([(1, 8, 8)], (64,)),
        ([(1, 2, 2), (1, 2, 2)], (64, 256)),
        ([(1, 2, 10)], (256, 64)),
        ([(1, 12, 12)], (64, 256)),
        ([(1, 22, 22)], (64, 256, 512)),
    ):
        run(model, grids, graphs)
        assert graphs.recorded == recorded
    assert (recorder.recordings, recorder.replays) == (3, 6)


@pytest.mark.parametrize("grids", [[(1, 24, 24)], [(1, 2, 2)] * 9], ids=["patches", "images"])
def test_what_fits_no_graph_is_run_eagerly(grids: Grids) -> None:
    model = varlen_model()
    graphs, recorder = graphs_of(model, budgets=(512,))
    assert graphs.budget_of(model.prepare(grids)) is None
    assert same(run(model, grids, graphs), run(model, grids, None))
    assert (recorder.recordings, graphs.bytes) == (0, 0)


@pytest.mark.parametrize("backend", ["sdpa", "reference", "auto"])
def test_backends_that_read_lengths_on_the_host_are_run_eagerly(backend: str) -> None:
    model = varlen_model()
    model.attention = backend
    graphs, recorder = graphs_of(model)
    assert same(run(model, SMALL, graphs), run(model, SMALL, None))
    assert graphs.warm_up() == () and recorder.recordings == 0


@pytest.mark.parametrize("budgets", [(0,), (256, 100), (-64,)])
def test_budgets_are_multiples_of_64(budgets: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"budget = .*multiple of 64") as caught:
        GraphCache(varlen_model(), 0, TapeRecorder(), budgets)
    assert caught.value.param == "budgets"


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_static_buffers_are_those_of_the_formula(family: str, dtype: str) -> None:
    model = varlen_model(family).to(getattr(torch, dtype))
    config = model.config
    for budget in (64, 256, 512, 1024):
        buffers = sum(buffer.nbytes for buffer in Graph(model, budget, TapeRecorder()).buffers)
        size, rows = torch.finfo(model.dtype).bits // 8, chunk_rows(budget, ROWS[0])
        made = graph_bytes(config, dtype, budget) - buffers - budget * 2 * config.qkv_size * size
        # Normalised, inner and outer rows of the MLP, or what attention of a chunk takes in its place.
        assert made >= rows * (2 * config.hidden_size + config.intermediate_size) * size
        assert made <= rows * 3 * (config.hidden_size + config.intermediate_size) * 4


def test_bytes_of_released_models_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/graphs.md").read_text()
    for name, families in (("Kimi-VL, K2.5", ("kimi-vl", "kimi-k2.5")), ("K3", ("kimi-k3",))):
        for family in families:
            sizes = [graph_bytes(family_config(family), "bfloat16", budget) for budget in GRAPH_BUDGETS]
            assert sizes == sorted(sizes) and all(isinstance(size, int) for size in sizes)
            assert f"| {name} | {' | '.join(f'{size:,}' for size in [*sizes, sum(sizes)])} |" in page


def test_what_was_used_last_stays_and_the_bound_holds() -> None:
    model = varlen_model(num_layers=1)
    size = {budget: graph_bytes(model.config, "float32", budget) for budget in (64, 128, 256)}
    graphs, recorder = graphs_of(model, size[64] + size[256], budgets=(64, 128, 256))
    small, middle, large = [(1, 2, 2)], [(1, 8, 10)], [(1, 12, 12)]
    for grids, recorded, recordings in (
        (small, (64,), 1),
        (large, (64, 256), 2),
        (small, (256, 64), 2),
        (middle, (64, 128), 3),
        (small, (128, 64), 3),
        (large, (64, 256), 4),
    ):
        run(model, grids, graphs)
        assert (graphs.recorded, recorder.recordings) == (recorded, recordings)
        assert graphs.bytes == sum(size[budget] for budget in recorded) <= graphs.max_bytes


@pytest.mark.parametrize("room", [0, "0", "one short"])
def test_a_graph_without_room_drops_nothing_and_is_run_eagerly(room: int | str) -> None:
    model = varlen_model()
    size = graph_bytes(model.config, "float32", 512)
    graphs, recorder = graphs_of(model, size - 1 if room == "one short" else room)
    for grids in (SMALL, IMAGES, SMALL):
        assert max_relative_error(run(model, grids, graphs), run(model, grids, None)) <= GATE
    assert (graphs.recorded, recorder.recordings) == (((256,), 1) if room == "one short" else ((), 0))


def test_dropped_graphs_give_their_memory_back() -> None:
    model = varlen_model(num_layers=1)

    class Held:
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            return work

    graphs = GraphCache(model, graph_bytes(model.config, "float32", 512), Held())
    held: list[weakref.ref[torch.Tensor]] = []
    for grids in (SMALL, IMAGES):
        run(model, grids, graphs)
        graph = graphs._kept.get(graphs.recorded[-1])
        assert graph is not None
        held += [weakref.ref(buffer.untyped_storage()) for buffer in graph.buffers]
        del graph
        assert [ref() is None for ref in held] == [index < len(held) - 3 for index in range(len(held))]
    graphs.clear()
    assert all(ref() is None for ref in held) and graphs.bytes == 0


def test_warming_up_records_what_there_is_room_for() -> None:
    model = varlen_model(num_layers=1)
    sizes = {budget: graph_bytes(model.config, "float32", budget) for budget in (64, 128, 256)}
    graphs, recorder = graphs_of(model, sum(sizes.values()) - 1, budgets=(64, 128, 256))
    assert graphs.warm_up() == (64, 128) == graphs.warm_up()
    assert recorder.recordings == 2
    expected = run(model, SMALL, None)
    assert max_relative_error(run(model, SMALL, graphs), expected) <= GATE and recorder.recordings == 2
    model.vision_tower.encoder.blocks[0].wo.weight.data = torch.zeros_like(
        model.vision_tower.encoder.blocks[0].wo.weight
    )
    assert graphs.warm_up() == (64, 128)
    assert recorder.recordings == 4


# ---- weights --------------------------------------------------------------------------------------------------------


def _in_place(model: VisionModel) -> None:
    with torch.no_grad():
        model.vision_tower.encoder.blocks[1].mlp.fc0.weight.mul_(1.5)


def _loaded(model: VisionModel) -> None:
    model.load_state_dict(random_model(model.config, seed=5).state_dict())


def _assigned(model: VisionModel) -> None:
    model.load_state_dict(random_model(model.config, seed=5).state_dict(), assign=True)


def _replaced(model: VisionModel) -> None:
    block = model.vision_tower.encoder.blocks[2]
    block.wo = torch.nn.Linear(block.wo.in_features, block.wo.out_features, bias=block.wo.bias is not None)


def _moved(model: VisionModel) -> None:
    model.double().float()


@pytest.mark.parametrize("change", [_in_place, _loaded, _assigned, _replaced, _moved])
def test_weights_that_change_drop_all_graphs(change: Callable[[VisionModel], None]) -> None:
    model = varlen_model()
    graphs, recorder = graphs_of(model)
    for grids in (SMALL, IMAGES):
        run(model, grids, graphs)
    change(model)
    assert max_relative_error(run(model, SMALL, graphs), run(model, SMALL, None)) <= GATE
    assert (graphs.recorded, recorder.recordings) == ((256,), 3)
    run(model, SMALL, graphs)
    assert recorder.recordings == 3


def test_weights_outside_the_blocks_may_change() -> None:
    model = varlen_model()
    graphs, recorder = graphs_of(model)
    run(model, SMALL, graphs)
    with torch.no_grad():
        model.projector.linears[0].weight.mul_(2)
        model.vision_tower.patch_embed.proj.weight.mul_(2)
        model.vision_tower.patch_embed.pos_emb.weight.mul_(2)
    assert max_relative_error(run(model, SMALL, graphs), run(model, SMALL, None)) <= GATE
    assert recorder.recordings == 1


def test_weights_that_cannot_be_watched_are_run_eagerly() -> None:
    with torch.inference_mode():
        model = varlen_model()
    graphs, recorder = graphs_of(model)
    with torch.inference_mode():
        assert same(run(model, SMALL, graphs), run(model, SMALL, None))
        assert graphs.warm_up() == () and recorder.recordings == 0


def test_recorded_in_inference_mode_and_replayed_outside() -> None:
    model = varlen_model()
    graphs, recorder = graphs_of(model)
    with torch.inference_mode():
        inside = run(model, SMALL, graphs)
    assert same(run(model, SMALL, graphs), inside)
    assert recorder.recordings == 1


# ---- what is inside -------------------------------------------------------------------------------------------------


def test_a_recording_reads_no_value_and_only_weights_and_static_buffers() -> None:
    model = varlen_model()
    graphs, recorder = graphs_of(model)
    run(model, SMALL, graphs)
    graph = graphs._kept.get(256)
    assert graph is not None
    known = [*model.vision_tower.encoder.parameters(), *graph.buffers]
    assert recorder.tapes[0].read <= {tensor.untyped_storage().data_ptr() for tensor in known}
    with pytest.raises(AssertionError, match="asks the device for a value"):
        recorder.record(lambda: print(torch.ones(2).sum().item()))


def test_what_is_outside_does_not_grow_with_the_layers() -> None:
    outside = []
    for layers in (1, 4):
        model = varlen_model(num_layers=layers)
        graphs, recorder = graphs_of(model)
        meta = model.prepare(IMAGES)
        hidden = model.embed(random_patches(IMAGES), meta)
        graphs(hidden, meta)
        outside.append(operations(partial(graphs, hidden, meta)) - len(recorder.tapes[0].steps))
    assert outside[0] == outside[1] < 20 + 10 * len(IMAGES)


def test_ranks_that_see_the_same_packs_decide_alike() -> None:
    model = varlen_model(num_layers=1)
    size = graph_bytes(model.config, "float32", 1024)
    ranks = [graphs_of(model, size) for _ in range(2)]
    sides = torch.randint(1, 14, (30, 2), generator=torch.Generator().manual_seed(0)).tolist()
    for h, w in sides:
        grids = [(1, 2 * h, 2 * w)]
        hidden = [torch.zeros(4 * h * w, model.config.hidden_size) for _ in ranks]
        for rows, (graphs, _) in zip(hidden, ranks, strict=True):
            graphs(rows, model.prepare(grids))
        assert ranks[0][0].recorded == ranks[1][0].recorded
    assert ranks[0][1].recordings == ranks[1][1].recordings > 3


def test_threads_take_turns() -> None:
    model = varlen_model(num_layers=1)
    graphs, _ = graphs_of(model)
    packs = [SMALL, FULL, [(1, 12, 14)], [(1, 2, 2)] * 3]
    expected = [run(model, grids, graphs) for grids in packs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(5):
            if not same(run(model, packs[index], graphs), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(packs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- capture --------------------------------------------------------------------------------------------------------


@contextmanager
def _group(log: list[str]) -> Iterator[None]:
    log.append("enter the group")
    yield
    log.append("leave the group")


def test_only_tensor_parallel_work_enters_the_groups_capture_mode() -> None:
    for mode in ("single", "data"):
        with capture_context(mode, lambda: pytest.fail("entered the group")):
            pass
    log: list[str] = []
    with capture_context("tensor", lambda: _group(log)):
        log.append("capture")
    assert log == ["enter the group", "capture", "leave the group"]
    with capture_context("tensor"):
        pass  # NCCL needs nothing
    for refused in (capture_context, CudaRecorder):
        with pytest.raises(ConfigError, match="mode = 'pipeline': known are single, data, tensor"):
            refused("pipeline")  # type: ignore[operator]


class _Cuda:
    """As much of ``torch.cuda`` as the recorder uses, and a log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams: list[str] = []

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Any:
        return self._stream("current")

    def Stream(self) -> Any:
        self.streams.append(f"side {len(self.streams)}")
        return self._stream(self.streams[-1])

    def _stream(self, name: str) -> Any:
        cuda = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                cuda.log.append(f"{name} waits for {other}")

            def __str__(self) -> str:
                return name

        return Stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"on {stream}")
        yield
        self.log.append(f"off {stream}")

    def CUDAGraph(self) -> Any:
        cuda = self

        class Captured:
            def replay(self) -> None:
                cuda.log.append("replay")

        return Captured()

    @contextmanager
    def graph(self, graph: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"capture on {stream}, {capture_error_mode}")
        yield
        self.log.append("captured")


@pytest.mark.parametrize("mode", ["single", "data", "tensor"])
def test_cuda_recorder_warms_up_aside_and_captures_within_the_mode(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda()
    for name in ("current_device", "current_stream", "Stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    recorder = CudaRecorder(mode, lambda: _group(cuda.log))
    replay = recorder.record(lambda: cuda.log.append("work"))
    group = ["enter the group"] if mode == "tensor" else []
    assert cuda.log == [
        *("side 0 waits for current", "on side 0", "work", "work", "off side 0"),
        *(*group, "capture on side 0, thread_local", "work", "captured"),
        *(["leave the group"] if group else []),
        "current waits for side 0",
    ]
    cuda.log.clear()
    replay()
    assert cuda.log == ["replay"]
    recorder.record(lambda: None)
    assert cuda.streams == ["side 0"]
