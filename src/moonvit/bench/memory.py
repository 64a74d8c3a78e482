"""``moonvit bench memory``: what the vision stack allocates, ours beside others, on the same inputs.

Five cases, each in a process of its own: a rotary tables, b the projector, c tower and projector of 1, 5 and 50 images
beside transformers, d the largest legal image of each family, e two thousand requests. Every case proves that outputs
are equal before it counts. Counts are bytes of torch's allocator beyond weights and inputs, so they do not depend on
how busy the machine is.

``peak`` is the most there was at once, features included as they come; ``workspace`` is the most there was beyond
features, for which room was made beforehand, and is what a plan promises; ``kept`` is what the result holds.
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
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moonvit.attention import make_rotary
from moonvit.bench import rivals
from moonvit.bench.measure import Bytes, Ledger, ProductsLeftOut, machine, outputs_ready, peak, resident
from moonvit.compare import GATE
from moonvit.encoder import VisionEncoder
from moonvit.errors import ConfigError, DivergenceError
from moonvit.families import VisionConfig, family_config
from moonvit.grids import Grid
from moonvit.model import VisionModel
from moonvit.plan import Budget, Plan, make_plan
from moonvit.preprocess import resize_plan
from moonvit.reference import max_relative_error

OURS = "moonvit"
PLAN = "moonvit's plan"
LARGEST = {"kimi-vl": (6732, 153), "kimi-k2.5": (489, 7083), "kimi-k3": (1861, 7041)}
"""Pixels of a picture that no other takes more patches than, by family: from a search over every size."""
LEFT_OUT = "products left out"


class Row(NamedTuple):
    """One number.

    Attributes:
        case: What was done.
        who: By whom.
        metric: What was counted.
        value: How much.
        unit: Of what.
    """

    case: str
    who: str
    metric: str
    value: float
    unit: str = "bytes"


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        layers: Blocks of the towers of released width; what is allocated does not depend on them.
        images: Images of a request in case c, with products left out where they take long.
        real: Images of a float32 request in case c that is run whole.
        real_half: The same in bfloat16, on one layer, where the CPU has no instructions for it.
        whole: Families whose largest image is run whole, in float32, on one layer.
        requests: Requests of case e.
        early: After which of them memory is read first.
    """

    layers: int = 2
    images: tuple[int, ...] = (1, 5, 50)
    real: tuple[int, ...] = (1, 5)
    real_half: tuple[int, ...] = ()
    whole: tuple[str, ...] = ("kimi-vl",)
    requests: int = 2000
    early: int = 100


EXTENTS = {
    "quick": Extent(layers=1, images=(1, 5), real=(), whole=(), requests=200, early=100),
    "usual": Extent(),
    "full": Extent(real=(1, 5, 50), real_half=(1, 5), whole=("kimi-vl", "kimi-k2.5", "kimi-k3")),
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


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def _named(text: str, device: str) -> str:
    return text if device == "cpu" else f"{text}, {device}"


def _pixels(grids: Sequence[Grid]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    total = sum(grid.patches for grid in grids)
    return torch.randint(0, 256, (total, 588), generator=generator, dtype=torch.uint8)


def _slow(dtype: str, device: str) -> bool:
    """Whether products in this dtype take too long to be waited for."""
    return device == "cpu" and dtype == "bfloat16" and not machine().bfloat16


def _count(work: Callable[[], Any], device: str = "cpu", left_out: bool = False) -> Bytes:
    gc.collect()
    if not left_out:
        return peak(work, device)
    with ProductsLeftOut():  # type: ignore[no-untyped-call]
        return peak(work, device)


# ---- a: rotary tables -----------------------------------------------------------------------------------------------


def rotary(extent: Extent, device: str = "cpu") -> Iterable[Row]:
    """Building rotary factors at head dimension 128: the full grid, the request's grids, ours.

    Args:
        extent: How much.
        device: Where.

    Yields:
        Rows.
    """
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
        patches = sum(grid.patches for grid in grids)
        factors = kinds[OURS]().cis(0, patches)
        gathered, table = rivals.full_grid(grids, 128, device)
        for theirs in (rivals.request_sized(grids, 128, device), gathered):
            prove(case, torch.equal(torch.view_as_real(factors), torch.view_as_real(theirs)))
        for_ever = table.nbytes
        del factors, theirs, gathered, table
        for who, work in kinds.items():
            counted = _count(work, device)
            yield Row(case, who, "peak", counted.peak)
            yield Row(case, who, "kept", counted.kept)
        yield Row(case, OURS, "kept after the request", _count(partial(_and_drop, kinds[OURS]), device).kept)
        yield Row(case, "full grid", "kept after the request", for_ever)


def _into(results: list[Any], work: Callable[[], Any]) -> None:
    results.append(work())


def _and_drop(work: Callable[[], Any]) -> None:
    work()


# ---- b: the projector -----------------------------------------------------------------------------------------------


def projector(extent: Extent, device: str = "cpu", dtype: str = "bfloat16", rows: int = 1332) -> Iterable[Row]:
    """The projector of K3 on three features: all at once, one by one, ours; the first two also on one of 16 ranks.

    Args:
        extent: How much.
        device: Where.
        dtype: Of weights and features.
        rows: Of each feature.

    Yields:
        Rows.
    """
    left_out = _slow(dtype, device)
    note = f", {LEFT_OUT}" if left_out else ""
    case = _named(f"b: projector, three of {rows:,} rows, {dtype}{note}", device)
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
        model = model.to(getattr(torch, dtype))
        features = [torch.randn(rows, config.merged_size, device=device).to(model.dtype) for _ in range(3)]
        kinds: dict[str, Callable[[], Any]] = {
            OURS: lambda: [model.project(each) for each in features],
            "concatenated": lambda: rivals.concatenated(model.projector, features),
            "per image": lambda: rivals.per_image(model.projector, features),
            "concatenated, 1 of 16 ranks": lambda: rivals.concatenated(model.projector, features, ranks=16),
            "per image, 1 of 16 ranks": lambda: rivals.per_image(model.projector, features, ranks=16),
        }
        yield Row(case, OURS, "features", 3 * rows * config.text_hidden_size * model.dtype.itemsize)
        for who, work in kinds.items():
            counted = _count(work, device, left_out)
            yield Row(case, who, "peak", counted.peak)
            yield Row(case, who, "kept", counted.kept)


# ---- c: tower and projector -----------------------------------------------------------------------------------------


def _encoder_rows(
    case: str,
    encoder: VisionEncoder,
    patches: torch.Tensor,
    plan: Plan,
    theirs: Sequence[torch.Tensor],
    left_out: bool = False,
) -> list[Row]:
    """Peak, workspace and plan of one request of ours; its features are held against those of a rival in float32."""
    device = encoder.device.type
    ours: list[list[torch.Tensor]] = []
    loose = _count(lambda: ours.append(encoder.encode_patches(patches, plan.grids)), device, left_out)
    if encoder.dtype == torch.float32 and not left_out:
        prove_close(case, ours[0], theirs)
    ours.clear()
    with outputs_ready(encoder.model, [grid.tokens for grid in plan.grids]):
        tight = _count(lambda: encoder.encode_patches(patches, plan.grids), device, left_out)
    return [
        Row(case, OURS, "peak", loose.peak),
        Row(case, OURS, "kept", loose.kept),
        Row(case, OURS, "workspace", tight.peak),
        Row(case, PLAN, "workspace", plan.workspace_bytes),
        Row(case, OURS, "features", plan.output_bytes),
    ]


class _Towers:
    """The same K2.5 weights in our encoder and in transformers."""

    def __init__(self, dtype: str, layers: int, device: str) -> None:
        self.config = family_config("kimi-k2.5", num_layers=layers)
        self.device = device
        model = VisionModel.empty(self.config).init_weights_(0)
        with tempfile.TemporaryDirectory() as folder:
            rivals.write_k25_checkpoint(model.state_dict(), self.config, Path(folder))
            self.theirs = rivals.load_transformers(Path(folder), dtype).to(device)
        self.ours = VisionEncoder(model.to(getattr(torch, dtype)).to(device))

    def inputs(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pixels for us; normalised pixels and grids for transformers."""
        patches = _pixels(grids).to(self.device)
        normalised = (patches.to(self.ours.dtype) / 127.5 - 1).view(-1, 3, 14, 14)
        return patches, normalised, torch.tensor([tuple(grid) for grid in grids]).to(self.device)


def towers(extent: Extent, device: str = "cpu") -> Iterable[Row]:
    """Tower and projector of K2.5 on 1, 5 and 50 images of 36x36, beside transformers.

    Args:
        extent: How much.
        device: Where.

    Yields:
        Rows.
    """
    left_out = _slow("bfloat16", device)
    runs = [("bfloat16", extent.layers, count, left_out) for count in extent.images]
    runs += [("float32", extent.layers, count, False) for count in extent.real]
    runs += [("bfloat16", 1, count, False) for count in extent.real_half if left_out]
    held: tuple[Any, _Towers | None] = (None, None)
    for dtype, layers, count, without in runs:
        note = f", {LEFT_OUT}" if without else ""
        images = "1 image" if count == 1 else f"{count} images"
        case = _named(f"c: K2.5, {images} of 36x36, {dtype}, {layers} layer{'s' * (layers > 1)}{note}", device)
        say(case)
        if held[0] != (dtype, layers):
            held = (None, None)
            prove_towers(case, layers, device)
            held = ((dtype, layers), _Towers(dtype, layers, device))
        pair = held[1]
        assert pair is not None
        grids = [Grid(1, 36, 36)] * count
        patches, normalised, theirs_grids = pair.inputs(grids)
        plan = pair.ours.plan(grids)
        work = partial(rivals.transformers_features, pair.theirs, normalised, theirs_grids)
        theirs: list[Sequence[torch.Tensor]] = []
        counted = _count(partial(_into, theirs, work), device, without)
        yield from _encoder_rows(case, pair.ours, patches, plan, theirs.pop(), without)
        yield Row(case, "transformers", "peak", counted.peak)
        yield Row(case, "transformers", "kept", counted.kept)


def prove_towers(case: str, layers: int, device: str = "cpu") -> None:
    """Our features in float32 are those of transformers, at released width, for two images in one request.

    Args:
        case: What it is proved for.
        layers: Blocks.
        device: Where.

    Raises:
        DivergenceError: They are not.
    """
    pair = _Towers("float32", layers, device)
    grids = [Grid(1, 12, 10), Grid(1, 8, 14)]
    patches, normalised, theirs_grids = pair.inputs(grids)
    theirs = rivals.transformers_features(pair.theirs, normalised, theirs_grids)
    prove_close(case, pair.ours.encode_patches(patches, grids), theirs)


# ---- d: the largest legal image -------------------------------------------------------------------------------------


def largest(extent: Extent, device: str = "cpu") -> Iterable[Row]:
    """The largest legal image of each family: counted in bfloat16 with fake tensors, and run where time allows.

    Args:
        extent: How much.
        device: Where those run that are run.

    Yields:
        Rows.
    """
    for family, size in LARGEST.items():
        config = family_config(family, num_layers=1)
        grid = resize_plan(config.rule, *size).grid
        named = f"d: {family}, {grid.patches:,} patches"
        if device == "cpu":
            say(f"{named}, counted")
            prove_whole_request(named, config)
            budgets: list[int | str] = ["auto", *(["0.40GB"] if family == "kimi-k3" else [])]
            for budget in budgets:
                yield from _counted(named, config, grid, budget)
        if device != "cpu" or family in extent.whole:
            yield from _run_whole(_named(f"{named}, float32, 1 layer", device), family, grid, device)


def prove_whole_request(case: str, config: VisionConfig) -> None:
    """Our features in float32 are those of the tower that takes a request at once.

    Args:
        case: What it is proved for.
        config: The model.

    Raises:
        DivergenceError: They are not.
    """
    model = VisionModel.empty(config).init_weights_(0)
    grids = [Grid(1, 12, 10), Grid(1, 8, 14)]
    patches = _pixels(grids)
    prove_close(case, VisionEncoder(model).encode_patches(patches, grids), rivals.whole_request(model, patches, grids))


def _counted(named: str, config: VisionConfig, grid: Grid, budget: int | str) -> Iterable[Row]:
    """Ours and a whole-request tower, on tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    limit = "" if budget == "auto" else f", budget {budget}"
    case = f"{named}, bfloat16, 1 layer, fake tensors{limit}"
    plan = make_plan(config, [grid], dtype="bfloat16", budget=Budget(budget), machine=machine())
    with FakeTensorMode():
        model = _fake_model(config)
        patches = torch.empty(grid.patches, 588, dtype=torch.uint8)
        with outputs_ready(model, [grid.tokens]), Ledger() as ours:
            model(patches, model.prepare([grid], plan.rows, plan.groups))
        yield Row(case, OURS, "workspace", ours.peak)
        yield Row(case, PLAN, "workspace", plan.workspace_bytes)
        yield Row(case, OURS, "features", plan.output_bytes)
        with Ledger() as loose:
            model(patches, model.prepare([grid], plan.rows, plan.groups))
        yield Row(case, OURS, "peak", loose.peak)
        with Ledger() as theirs:
            rivals.whole_request(model, patches, [grid])
        yield Row(case, "whole request", "peak", theirs.peak)


def _fake_model(config: VisionConfig) -> VisionModel:
    """A bfloat16 model made in that dtype at once: fake weights cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return VisionModel(config)
    finally:
        torch.set_default_dtype(before)


def _run_whole(case: str, family: str, grid: Grid, device: str) -> Iterable[Row]:
    """Ours and a whole-request tower for real; their features are held against each other."""
    say(case)
    model = VisionModel.empty(family_config(family, num_layers=1), device=device).init_weights_(0)
    encoder, patches = VisionEncoder(model), _pixels([grid]).to(device)
    plan = encoder.plan([grid])
    theirs: list[Sequence[torch.Tensor]] = []
    counted = _count(partial(_into, theirs, partial(rivals.whole_request, model, patches, [grid])), device)
    yield from _encoder_rows(case, encoder, patches, plan, theirs.pop())
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
    """
    case = _named(f"e: {extent.requests:,} requests", device)
    say(case)
    encoder = VisionEncoder.from_config("demo", num_layers=2, device=device)
    rng = random.Random(0)
    first: list[torch.Tensor] = []
    grids: list[Grid] = []
    seen: dict[int, dict[str, int]] = {}
    pixels = _pixels([Grid(1, 40, 40)] * 3).to(device)

    def run() -> list[torch.Tensor]:
        return encoder.encode_patches(pixels[: sum(grid.patches for grid in grids)], grids)

    for number in range(1, extent.requests + 1):
        grids = [Grid(1, 2 * rng.randint(1, 20), 2 * rng.randint(1, 20)) for _ in range(rng.randint(1, 3))]
        if number == 1:
            start, first = list(grids), run()
        else:
            run()
        if number in (extent.early, extent.requests):
            gc.collect()
            seen[number] = {"live tensors": _live(), "resident": resident() or 0}
    grids = start
    prove(case, all(torch.equal(a, b) for a, b in zip(first, run(), strict=True)))
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


def _in_process(case: str, extent: Extent, device: str, threads: int) -> list[Row]:
    torch.set_num_threads(threads)
    return list(CASES[case](extent, device))


def run(cases: Sequence[str] = tuple(CASES), extent: str = "usual") -> list[Row]:
    """Measure, each case in a process of its own, on the CPU and on a CUDA device where there is one.

    Args:
        cases: Letters of ``CASES``.
        extent: A name of ``EXTENTS``.

    Returns:
        Rows, in order.

    Raises:
        ConfigError: A case is unknown.
        DivergenceError: Outputs that must be equal are not.
    """
    for case in cases:
        if case not in CASES:
            raise ConfigError(f"case {case!r} is unknown; known are {', '.join(CASES)}", param="cases")
    rows: list[Row] = []
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for case in cases:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                rows += pool.submit(_in_process, case, EXTENTS[extent], device, torch.get_num_threads()).result()
    return rows
