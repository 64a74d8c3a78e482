"""``moonvit bench memory``: what the vision stack allocates, ours beside others, on the same inputs.

Five cases, each in a process of its own: a rotary tables, b the projector, c tower and projector of 1, 5 and 50 images
beside transformers, d the largest legal image of each family, e many requests. Every case proves that outputs are equal
before it counts. Counts are bytes of torch's allocator beyond weights and inputs, so they do not depend on how busy the
machine is.

``peak`` is the most there was at once, features included as they come; ``workspace`` is the most there was beyond
features, for which room was made beforehand, and is what a plan promises; ``kept`` is what the result holds, a position
table that is kept for the next request included.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from moonvit.attention import make_rotary, this_machine
from moonvit.bench import rivals
from moonvit.bench.measure import (
    Bytes,
    peak,
    peak_of_fakes,
    peak_without_products,
    resident,
    room_for,
    run_plan,
)
from moonvit.bench.report import OURS, PLAN, Row
from moonvit.compare import GATE
from moonvit.encoder import VisionEncoder
from moonvit.errors import ConfigError, DivergenceError, MissingDependencyError
from moonvit.families import VisionConfig, family_config
from moonvit.grids import Grid
from moonvit.model import Positions, VisionModel
from moonvit.plan import POSITION_CACHE, TOKEN_ROWS, Budget, Machine, Plan, chunk_rows, make_plan
from moonvit.preprocess import resize_plan
from moonvit.reference import max_relative_error

COMPARED = ("peak", "workspace", "prepared", "kept after the request")
"""Metrics whose ratios mean something: the others are the same for all, or no rival has them."""
DRAWN = "peak"
TITLE = "Peak memory beyond weights and inputs, MiB; each panel has a scale of its own"
LARGEST = {"kimi-vl": (6732, 153), "kimi-k2.5": (489, 7083), "kimi-k3": (1861, 7041)}
"""Pixels of a picture that no other takes more patches than, by family: from a search over every size."""
LAYERS = 2
"""Blocks of the towers of released width: what is allocated does not depend on them."""
LEFT_OUT = "products left out"
UNSEEN = Machine(bfloat16=False)
"""What plans are made for where kernels of products are not seen: one that takes nothing in them."""

Counter = Callable[[Callable[[], Any]], Bytes]


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        images: Images of a bfloat16 request in case c, with products left out on a CPU.
        real: Images of a float32 request in case c that is run whole.
        real_half: The same in bfloat16, on a CPU.
        whole: Families whose largest image is run whole, in float32; on a CUDA device all are.
        requests: Requests of case e.
        early: After which of them memory is read first.
    """

    images: tuple[int, ...] = (1, 5, 50)
    real: tuple[int, ...] = (1, 5)
    real_half: tuple[int, ...] = ()
    whole: tuple[str, ...] = ("kimi-vl",)
    requests: int = 2000
    early: int = 100


EXTENTS = {
    "quick": Extent(images=(1, 5), real=(), whole=(), requests=200),
    "usual": Extent(),
    "full": Extent(real=(1, 5, 50), real_half=(1, 5), whole=tuple(LARGEST)),
}


# ---- proofs ---------------------------------------------------------------------------------------------------------


def prove(case: str, equal: bool, what: str = "") -> None:
    """Stop where outputs that must be equal are not.

    Args:
        case: What was done.
        equal: Whether they are.
        what: What was found.

    Raises:
        DivergenceError: They are not.
    """
    if not equal:
        raise DivergenceError(f"{case}: outputs differ{what}, so nothing was measured")


def prove_close(case: str, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], gate: float = GATE) -> None:
    """Stop where features differ by more than float32 allows.

    Args:
        case: What was done.
        ours: Features.
        theirs: Features.
        gate: Relative error allowed.

    Raises:
        DivergenceError: They do.
    """
    error = max_relative_error([f.float() for f in ours], [f.float() for f in theirs])
    prove(case, error <= gate, f" by {error:.1e}, allowed are {gate:.1e}")


# ---- counting -------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def _named(text: str, device: str, without: bool = False) -> str:
    return text + (f", {LEFT_OUT}" if without else "") + (f", {device}" if device != "cpu" else "")


def _pixels(grids: Sequence[Grid]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    total = sum(grid.patches for grid in grids)
    return torch.randint(0, 256, (total, 588), generator=generator, dtype=torch.uint8)


def _counter(device: str, without: bool = False) -> Counter:
    """Counts what work allocates there, with or without products."""

    def count(work: Callable[[], Any]) -> Bytes:
        gc.collect()
        return peak_without_products(work) if without else peak(work, device)

    return count


def _planned_for(device: str, without: bool = False) -> Machine:
    return UNSEEN if without else this_machine(device)


def _into(results: list[Any], work: Callable[[], Any]) -> None:
    results.append(work())


def _and_drop(work: Callable[[], Any]) -> None:
    work()


def _ours(
    case: str,
    model: VisionModel,
    patches: torch.Tensor,
    plan: Plan,
    count: Counter,
    theirs: Sequence[torch.Tensor] | None = None,
    positions: Positions | None = None,
) -> list[Row]:
    """Peak and workspace of a request beside what was planned; features are held against those of a rival, if given."""
    ours: list[list[torch.Tensor]] = []
    loose = count(partial(_into, ours, partial(run_plan, model, patches, plan, positions)))
    if theirs is not None:
        prove_close(case, ours[0], theirs)
    ours.clear()
    tight = count(partial(run_plan, model, patches, plan, out=room_for(model, plan)))
    return [
        Row(case, OURS, "peak", loose.peak),
        Row(case, PLAN, "peak", plan.peak_bytes - plan.at_peak["patches"]),
        Row(case, OURS, "kept", loose.kept),
        Row(case, OURS, "workspace", tight.peak),
        Row(case, PLAN, "workspace", plan.workspace_bytes),
        Row(case, OURS, "features", plan.output_bytes),
    ]


# ---- a: rotary tables -----------------------------------------------------------------------------------------------


def rotary(extent: Extent, device: str = "cpu") -> Iterable[Row]:
    """Building rotary factors at head dimension 128: the full grid, the request's grids, ours.

    Args:
        extent: How much.
        device: Where.

    Yields:
        Rows.

    Raises:
        DivergenceError: Factors differ in a bit.
    """
    count = _counter(device)
    model = VisionModel.empty(family_config("kimi-k3", num_layers=1), device=device)
    requests = {
        "one 36x36": [Grid(1, 36, 36)],
        "five 36x36": [Grid(1, 36, 36)] * 5,
        "one 512x512": [Grid(1, 512, 512)],
    }
    for name, grids in requests.items():
        case = _named(f"a: rotary, {name}", device)
        say(case)
        kinds: dict[str, Callable[[], Any]] = {
            OURS: partial(make_rotary, grids, 128, 10000.0, device),
            "request-sized": partial(rivals.request_sized, grids, 128, device),
            "full grid": partial(rivals.full_grid, grids, 128, device),
        }
        tables = make_rotary(grids, 128, 10000.0, device)
        factors = tables.cis(0, sum(grid.patches for grid in grids))
        gathered, table = rivals.full_grid(grids, 128, device)
        for theirs in (rivals.request_sized(grids, 128, device), gathered):
            prove(case, torch.equal(torch.view_as_real(factors), torch.view_as_real(theirs)))
        for_ever = table.nbytes
        del factors, theirs, gathered, table
        for who, work in kinds.items():
            counted = count(work)
            yield Row(case, who, "peak", counted.peak)
            yield Row(case, who, "kept", counted.kept)
        yield Row(case, OURS, "a chunk of factors", count(partial(tables.cis, 0, 256)).peak)
        yield Row(case, OURS, "kept after the request", count(partial(_and_drop, kinds[OURS])).kept)
        yield Row(case, "full grid", "kept after the request", for_ever)
        # five images of the largest size are five passes
        plan = make_plan(model.config, grids, dtype="float32", machine=this_machine(device))
        yield Row(case, OURS, "prepared", count(partial(model.prepare, grids[:1])).kept)
        yield Row(case, PLAN, "prepared", plan.stages["rope"])


# ---- b: the projector -----------------------------------------------------------------------------------------------


def projector(extent: Extent, device: str = "cpu") -> Iterable[Row]:
    """The projector of K3 on three features: all at once, one by one, ours; the first two also on one of 16 ranks.

    Args:
        extent: How much.
        device: Where; on a CPU products are left out.

    Yields:
        Rows.

    Raises:
        DivergenceError: Features differ in float32.
    """
    without, grid = device == "cpu", Grid(1, 72, 74)
    count = _counter(device, without)
    case = _named(f"b: projector, three of {grid.tokens:,} rows, bfloat16", device, without)
    say(case)
    config = family_config("kimi-k3", num_layers=1)
    model = VisionModel.empty(config, device=device).init_weights_(0)
    proof = [torch.randn(36, config.merged_size, device=device) for _ in range(3)]
    with torch.no_grad():
        ours = [model.project(features) for features in proof]
        for form in (rivals.concatenated, rivals.per_image):
            prove_close(case, ours, form(model.projector, proof))
            parts = [form(model.projector, proof, rank=rank, ranks=16) for rank in range(16)]
            sums = [torch.stack(summands).sum(0) for summands in zip(*parts, strict=True)]
            norm = model.projector.post_norm
            prove_close(case, ours, sums if norm is None else [norm(total) for total in sums])
        del ours, parts, sums
        model = model.to(torch.bfloat16)
        features = [torch.randn(grid.tokens, config.merged_size, device=device).bfloat16() for _ in range(3)]
        kinds: dict[str, Callable[[], Any]] = {
            OURS: lambda: [model.project(each) for each in features],
            "concatenated": lambda: rivals.concatenated(model.projector, features),
            "per image": lambda: rivals.per_image(model.projector, features),
            "concatenated, 1 of 16 ranks": lambda: rivals.concatenated(model.projector, features, ranks=16),
            "per image, 1 of 16 ranks": lambda: rivals.per_image(model.projector, features, ranks=16),
        }
        plan = make_plan(config, [grid] * 3, dtype="bfloat16", machine=_planned_for(device, without))
        yield Row(case, OURS, "features", plan.output_bytes)
        for who, work in kinds.items():
            counted = count(work)
            yield Row(case, who, "peak", counted.peak)
            yield Row(case, who, "kept", counted.kept)
            if who == OURS:
                yield Row(case, OURS, "workspace", counted.peak - counted.kept)
        # in the tower the rows that come in are made by the merge and count; here they are inputs
        given = chunk_rows(grid.tokens, TOKEN_ROWS) * features[0][0].nbytes
        yield Row(case, PLAN, "workspace", plan.stages["projector"] - given)


# ---- c: tower and projector -----------------------------------------------------------------------------------------


class _Towers:
    """The same K2.5 weights in our model and in transformers."""

    def __init__(self, dtype: str, device: str) -> None:
        config = family_config("kimi-k2.5", num_layers=LAYERS)
        self.device = device
        model = VisionModel.empty(config).init_weights_(0)
        with tempfile.TemporaryDirectory() as folder:
            rivals.write_k25_checkpoint(model.state_dict(), config, Path(folder))
            self.theirs = rivals.load_transformers(Path(folder), dtype).to(device)
        self.ours = model.to(getattr(torch, dtype)).to(device)

    def inputs(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pixels for us; normalised pixels and grids for transformers."""
        patches = _pixels(grids).to(self.device)
        normalised = (patches.to(self.ours.dtype) / 127.5 - 1).view(-1, 3, 14, 14)
        return patches, normalised, torch.tensor([tuple(grid) for grid in grids]).to(self.device)

    def prove(self, case: str) -> None:
        """Features are equal: two small images in one request, and one of 36 x 36, its heads also in groups."""
        for grids in ([Grid(1, 12, 10), Grid(1, 8, 14)], [Grid(1, 36, 36)]):
            patches, normalised, theirs_grids = self.inputs(grids)
            theirs = rivals.transformers_features(self.theirs, normalised, theirs_grids)
            for groups in (1, 4):
                prove_close(case, self.ours(patches, self.ours.prepare(grids, groups=groups)), theirs)


def towers(extent: Extent, device: str = "cpu") -> Iterable[Row]:
    """Tower and projector of K2.5 on some images of 36x36, beside transformers.

    Args:
        extent: How much.
        device: Where.

    Yields:
        Rows.

    Raises:
        DivergenceError: Features differ in float32.
    """
    on_cpu = device == "cpu"
    pair = _Towers("float32", device)
    say("c: proofs")
    pair.prove("c: K2.5")
    for count in extent.real:
        yield from _beside_transformers(pair, "float32", count, device)
    del pair
    pair = _Towers("bfloat16", device)
    for count in extent.images:
        yield from _beside_transformers(pair, "bfloat16", count, device, on_cpu)
    for count in extent.real_half if on_cpu else ():
        yield from _beside_transformers(pair, "bfloat16", count, device)


def _beside_transformers(pair: _Towers, dtype: str, images: int, device: str, without: bool = False) -> Iterable[Row]:
    counted_as = "1 image" if images == 1 else f"{images} images"
    case = _named(f"c: K2.5, {counted_as} of 36x36, {dtype}", device, without)
    say(case)
    count, grids = _counter(device, without), [Grid(1, 36, 36)] * images
    patches, normalised, theirs_grids = pair.inputs(grids)
    plan = make_plan(pair.ours.config, grids, dtype=dtype, machine=_planned_for(device, without))
    theirs: list[Sequence[torch.Tensor]] = []
    work = partial(rivals.transformers_features, pair.theirs, normalised, theirs_grids)
    counted = count(partial(_into, theirs, work))
    expected = theirs.pop() if dtype == "float32" else None
    theirs.clear()
    yield from _ours(case, pair.ours, patches, plan, count, expected, Positions(POSITION_CACHE))
    yield Row(case, "transformers", "peak", counted.peak)
    yield Row(case, "transformers", "kept", counted.kept)


# ---- d: the largest legal image -------------------------------------------------------------------------------------


def largest(extent: Extent, device: str = "cpu") -> Iterable[Row]:
    """The largest legal image of each family.

    On a CPU it is counted in bfloat16, with fake tensors and with products left out, and run whole where time allows.

    Args:
        extent: How much.
        device: Where.

    Yields:
        Rows.

    Raises:
        DivergenceError: Features differ in float32.
    """
    for family, size in LARGEST.items():
        config = family_config(family, num_layers=LAYERS)
        grid = resize_plan(config.rule, *size).grid
        named = f"d: {family}, {grid.patches:,} patches"
        say(_named(named, device))
        budgets = ["auto", *(["0.40GB"] if family == "kimi-k3" else [])]
        plans = {
            budget: make_plan(config, [grid], dtype="bfloat16", budget=Budget(budget), machine=UNSEEN)
            for budget in budgets
        }
        prove_whole_request(_named(named, device), config, {plan.groups for plan in plans.values()}, device)
        if device == "cpu":
            yield from _faked(f"{named}, bfloat16, fake tensors", plans["auto"], config)
            yield from _without_products(named, plans, config)
        if device != "cpu" or family in extent.whole:
            yield from _run_whole(_named(f"{named}, float32", device), config, grid, device)


def prove_whole_request(case: str, config: VisionConfig, groups: Iterable[int], device: str = "cpu") -> None:
    """Our features in float32 are those of the tower that takes a request at once.

    Args:
        case: What it is proved for.
        config: The model.
        groups: Parts that heads are cut into, each of which is tried.
        device: Where.

    Raises:
        DivergenceError: They are not.
    """
    model = VisionModel.empty(config, device=device).init_weights_(0)
    grids = [Grid(1, 12, 10), Grid(1, 8, 14)]
    patches = _pixels(grids).to(device)
    theirs = rivals.whole_request(model, patches, grids)
    for number in groups:
        prove_close(case, model(patches, model.prepare(grids, groups=number)), theirs)


def _faked(case: str, plan: Plan, config: VisionConfig) -> Iterable[Row]:
    """Ours and a whole-request tower, on tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    say(case)
    with FakeTensorMode():
        model = _fake_model(config)
        patches = torch.empty(plan.patches, 588, dtype=torch.uint8)
        rows = _ours(case, model, patches, plan, peak_of_fakes)
        theirs = peak_of_fakes(partial(rivals.whole_request, model, patches, plan.grids))
    return [*rows, Row(case, "whole request", "peak", theirs.peak)]


def _fake_model(config: VisionConfig) -> VisionModel:
    """A bfloat16 model made in that dtype at once: fake weights cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return VisionModel(config)
    finally:
        torch.set_default_dtype(before)


def _without_products(named: str, plans: dict[str, Plan], config: VisionConfig) -> Iterable[Row]:
    """Ours and a whole-request tower, in the CPU's allocator."""
    model = VisionModel.empty(config, torch.bfloat16).init_weights_(0)
    count = _counter("cpu", without=True)
    for budget, plan in plans.items():
        limit = "" if budget == "auto" else f", budget {budget}"
        case = _named(f"{named}, bfloat16{limit}", "cpu", without=True)
        say(case)
        patches = _pixels(plan.grids)
        yield from _ours(case, model, patches, plan, count)
        theirs = count(partial(rivals.whole_request, model, patches, plan.grids))
        yield Row(case, "whole request", "peak", theirs.peak)


def _run_whole(case: str, config: VisionConfig, grid: Grid, device: str) -> Iterable[Row]:
    """Ours and a whole-request tower for real; their features are held against each other."""
    say(case)
    count, patches = _counter(device), _pixels([grid]).to(device)
    model = VisionModel.empty(config, device=device).init_weights_(0)
    plan = make_plan(config, [grid], dtype="float32", machine=this_machine(device))
    theirs: list[Sequence[torch.Tensor]] = []
    counted = count(partial(_into, theirs, partial(rivals.whole_request, model, patches, [grid])))
    yield from _ours(case, model, patches, plan, count, theirs.pop())
    yield Row(case, "whole request", "peak", counted.peak)


# ---- e: many requests -----------------------------------------------------------------------------------------------


def requests(extent: Extent, device: str = "cpu") -> Iterable[Row]:
    """Requests of different sizes, one after the other: what the process holds later against what it held early.

    Live tensors show what our caches keep; resident memory of the whole process also what the allocator, the kernels'
    own caches and Python keep.

    Args:
        extent: How much.
        device: Where.

    Yields:
        Rows.

    Raises:
        DivergenceError: The first request gives other features when it comes again.
    """
    case = _named(f"e: {extent.requests:,} requests", device)
    say(case)
    encoder = VisionEncoder.from_config("demo", num_layers=2, device=device)
    rng = random.Random(0)
    pixels = _pixels([Grid(1, 40, 40)] * 3).to(device)

    def draw() -> list[Grid]:
        return [Grid(1, 2 * rng.randint(1, 20), 2 * rng.randint(1, 20)) for _ in range(rng.randint(1, 3))]

    def encode(grids: Sequence[Grid]) -> list[torch.Tensor]:
        return encoder.encode_patches(pixels[: sum(grid.patches for grid in grids)], grids)

    # Before memory is read, these go last, so that the cache of positions holds the same tables each time.
    last = [draw() for _ in range(20)]
    first = encode(last[0])
    seen: dict[int, dict[str, int]] = {}
    for number in range(1, extent.requests + 1):
        encode(draw())
        if number in (extent.early, extent.requests):
            for grids in last:
                encode(grids)
            gc.collect()
            seen[number] = {"live tensors": _live(), "resident": resident() or 0}
    prove(case, all(torch.equal(a, b) for a, b in zip(first, encode(last[0]), strict=True)))
    for metric in ("live tensors", "resident"):
        early, late = seen[extent.early][metric], seen[extent.requests][metric]
        yield Row(case, OURS, f"{metric} after {extent.early:,}", early)
        yield Row(case, OURS, f"{metric} after {extent.requests:,}", late)
        if early:
            yield Row(case, OURS, f"{metric}, growth", round(100 * (late / early - 1), 3), "%")


def _live() -> int:
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


# ---- all of it ------------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[..., Iterable[Row]]] = {
    "a": rotary,
    "b": projector,
    "c": towers,
    "d": largest,
    "e": requests,
}


def _libraries(case: str, device: str) -> Row:
    """What the libraries of a GPU take at their first product and keep, so that nobody is charged with it."""
    before = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.bfloat16):
        some = torch.ones(64, 64, dtype=dtype, device=device)
        F.linear(some, some, some[0]).mm(some)
    del some
    return Row(f"{case}: library workspaces, {device}", "torch", "kept", torch.cuda.memory_allocated(device) - before)


def _in_process(case: str, extent: Extent, device: str, threads: int) -> list[Row]:
    torch.set_num_threads(threads)
    # Proofs are for float32; by default a GPU's convolutions take fewer bits.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    rows = [_libraries(case, device)] if device != "cpu" else []
    return [*rows, *CASES[case](extent, device)]


def run(cases: Sequence[str] = tuple(CASES), extent: str = "usual") -> list[Row]:
    """Measure, each case in a process of its own, on the CPU and on a CUDA device where there is one.

    Args:
        cases: Letters of ``CASES``.
        extent: A name of ``EXTENTS``.

    Returns:
        Rows, in order.

    Raises:
        ConfigError: A case is unknown.
        MissingDependencyError: Case c without transformers.
        DivergenceError: Outputs that must be equal are not.
    """
    for case in cases:
        if case not in CASES:
            raise ConfigError(f"case {case!r} is unknown; known are {', '.join(CASES)}", param="cases")
    if "c" in cases and find_spec("transformers") is None:
        raise MissingDependencyError("case c needs transformers: pip install 'moonvit[serve]'")
    rows: list[Row] = []
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for case in cases:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                rows += pool.submit(_in_process, case, EXTENTS[extent], device, torch.get_num_threads()).result()
    return rows
