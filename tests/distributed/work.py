"""What ranks do in tests: functions that run in each of them."""

from __future__ import annotations

import io
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from moonvit import encoder as encoder_module
from moonvit import reference
from moonvit.bench.measure import peak
from moonvit.deploy import assign_images
from moonvit.encoder import VisionEncoder
from moonvit.parallel import Parallel, Ranks

DIVISIBLE = {"num_heads": 12, "hidden_size": 96, "intermediate_size": 96, "text_hidden_size": 40, "num_layers": 2}
"""A model that 2, 3 and 4 ranks divide."""
TABLE = {"pos_emb_height": 16, "pos_emb_width": 16}
SIZES = [(100, 60), (300, 200), (28, 28), (60, 100), (29, 400)]
CLIPS = [(2, 4, 4), (1, 2, 2), (4, 6, 4), (1, 10, 8)]


def make(family: str, **options: Any) -> VisionEncoder:
    """An encoder with random weights, the same on all ranks."""
    widths = {**DIVISIBLE, **TABLE, **({"qkv_size": 144} if family == "kimi-k3" else {})}
    return VisionEncoder.from_config(family, **{**widths, **options})


def pictures() -> list[Image.Image]:
    """Noise of several sizes."""
    values = (np.random.default_rng(seed).integers(0, 256, (h, w, 3), np.uint8) for seed, (w, h) in enumerate(SIZES))
    return [Image.fromarray(value) for value in values]


def patches_of(grids: list[tuple[int, int, int]], seed: int = 0) -> torch.Tensor:
    """Random pixels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (sum(t * h * w for t, h, w in grids), 588), generator=generator, dtype=torch.uint8)


def encoded(family: str, mode: str, receiver: int | None, dtype: str = "float32") -> list[Any]:
    """Features of pictures by all ranks together, and what one process gives for the same and for each share."""
    together = make(family, dtype=dtype, parallel=Parallel(mode, receiver=receiver))  # type: ignore[arg-type]
    alone = make(family, dtype=dtype)
    found = together.encode(pictures())
    whole = alone.encode(pictures())
    shares = assign_images(alone.config, [one.grid for one in whole], dist.get_world_size())
    by_share: dict[int, torch.Tensor] = {}
    for share in shares:
        if share:
            some = alone.encode([pictures()[index] for index in share])
            by_share.update(zip(share, (one.tensor for one in some), strict=True))
    if found:
        assert [one.source_size for one in found] == SIZES
        assert [one.grid for one in found] == [one.grid for one in whole]
        assert all(one.tensor.untyped_storage().nbytes() == one.tensor.nbytes for one in found)
        passes = [
            one
            for batch in together.plan(pictures()).batches
            for one in together.encode_batch(pictures(), together.plan(pictures()), batch)
        ]
        assert [one.source_size for one in passes] == SIZES
    else:
        for batch in together.plan(pictures()).batches:
            assert together.encode_batch(pictures(), together.plan(pictures()), batch) == []
    return [
        [one.tensor for one in found],
        [by_share[index] for index in range(len(whole))],
        [one.tensor for one in whole],
    ]


def halves(family: str, dtype: str) -> list[list[torch.Tensor]]:
    """Features in half precision over ranks, by plain PyTorch that adds up as many parts, and exact ones."""
    enc, grids = make(family, dtype=dtype, parallel=Parallel("tensor")), [(1, 10, 12), (1, 4, 4)]
    patches = patches_of(grids).float() / 127.5 - 1
    whole = make(family, dtype=dtype).model
    args = whole.state_dict(), whole.config, patches, grids
    exact = reference.features(*args, torch.float32)
    summed = {tensor.data_ptr() for name, tensor in args[0].items() if name.endswith(("wo.weight", "fc1.weight"))}
    real = reference.F.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.data_ptr() not in summed:
            return real(x, weight, bias)
        parts = zip(x.chunk(dist.get_world_size(), 1), weight.chunk(dist.get_world_size(), 1), strict=True)
        first, *others = (real(x_part, part) for x_part, part in parts)
        return sum(others, start=first if bias is None else first + bias)

    reference.F.linear = linear  # type: ignore[assignment]
    try:
        plain = reference.features(*args, whole.dtype)
    finally:
        reference.F.linear = real
    return [enc.encode_patches(patches, grids), plain, exact]


def patched(family: str, mode: str, grids: list[tuple[int, int, int]], receiver: int | None = None) -> list[Any]:
    """Features of patches by all ranks together, and by one process."""
    patches = patches_of(grids)
    together = make(family, parallel=Parallel(mode, receiver=receiver))  # type: ignore[arg-type]
    return [together.encode_patches(patches, grids), make(family).encode_patches(patches, grids)]


def errors_then_work(mode: str, folder: str) -> list[str]:
    """One rank after another has a file that is no picture; then all have a torn one, which who decodes it finds out."""
    rank, said = dist.get_rank(), []
    enc = make("kimi-k2.5", parallel=Parallel(mode))  # type: ignore[arg-type]
    good = pictures()[1]
    whole = io.BytesIO()
    good.save(whole, "PNG")
    for broken in range(dist.get_world_size()):
        for data, where in ((b"nonsense", [broken]), (whole.getvalue()[:-3000], range(dist.get_world_size()))):
            files = []
            for index in range(4):
                path = Path(folder) / f"{rank}-{index}.png"
                path.write_bytes(data if rank in where and index == 2 else whole.getvalue())
                files.append(path)
            try:
                enc.encode(files)
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__} {getattr(error, 'param', '')}")
    for call in (lambda: enc.encode([]), lambda: enc.encode_patches(torch.zeros(0, 588), [])):
        try:
            call()
        except Exception as error:
            said.append(type(error).__name__)
    try:
        enc.encode([good] * (1 + (rank == 1)))
    except Exception as error:
        said.append(str(error))
    assert len(enc.encode([good, good])) == 2
    return said


def nan_on_the_last_rank(mode: str) -> str:
    """One rank's weights hold NaN."""
    enc = make("kimi-k3", parallel=Parallel(mode))  # type: ignore[arg-type]
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            enc.model.vision_tower.encoder.final_layernorm.weight.fill_(float("nan"))
    try:
        enc.encode(pictures())
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'param', '')}"
    return "nothing"


def in_two_groups() -> list[int]:
    """Two groups of two; only one of them has pictures, then only the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    made = [make("kimi-k2.5", parallel=Parallel(mode, group=groups[mine])) for mode in ("data", "tensor")]
    rows = []
    for turn in (0, 1):
        if turn == mine:
            rows += [len(enc.encode(pictures())) for enc in made]
        dist.barrier()
    return rows


def received(family: str, grids: list[tuple[int, int, int]], receiver: int | None) -> dict[str, Any]:
    """Bytes that this rank takes from others in a request, by the calls it makes, and the bytes of all features."""
    counted = []
    real = {name: getattr(dist, name) for name in ("broadcast", "all_to_all_single")}

    def broadcast(tensor: torch.Tensor, group_src: int, **options: Any) -> Any:
        counted.append(tensor.nbytes if group_src != dist.get_rank() else 0)
        return real["broadcast"](tensor, group_src=group_src, **options)

    def all_to_all_single(out: torch.Tensor, *args: Any, **options: Any) -> Any:
        counted.append(out.nbytes)
        return real["all_to_all_single"](out, *args, **options)

    enc = make(family, parallel=Parallel("data", receiver=receiver))
    dist.broadcast, dist.all_to_all_single = broadcast, all_to_all_single  # type: ignore[assignment]
    try:
        enc.encode_patches(patches_of(grids), grids)
    finally:
        for name, call in real.items():
            setattr(dist, name, call)
    return {"received": sum(counted), "plan": enc.plan([list(grid) for grid in grids]).output_bytes}


@torch.no_grad()
def peaks(family: str, grids: list[tuple[int, int, int]], mode: str) -> int:
    """Most bytes that this rank allocates in a request."""
    patches = patches_of(grids)
    enc = make(family, position_cache=0, parallel=Parallel(mode))  # type: ignore[arg-type]
    return peak(partial(enc.encode_patches, patches, grids)).peak


def caches_that_differ() -> bool:
    """Ranks that go through each layer together, of which one has forgotten what the others keep."""
    enc = make("kimi-k2.5", feature_cache="16MiB", parallel=Parallel("tensor"))
    first = enc.encode(pictures())
    if dist.get_rank() == 1:
        enc.clear_caches()
    second = enc.encode(pictures()[:3])
    enc.encode(pictures())
    third = enc.encode(pictures()[::-1])[::-1]
    assert enc._features.bytes > 0
    pairs = [*zip(second, first[:3], strict=True), *zip(third, first, strict=True)]
    return all(torch.allclose(a.tensor, b.tensor, rtol=1e-4, atol=1e-5) for a, b in pairs)


def loaded(path: str, mode: str) -> list[torch.Tensor]:
    """Features of an encoder from a checkpoint."""
    enc = VisionEncoder.from_pretrained(path, dtype="float32", parallel=Parallel(mode))  # type: ignore[arg-type]
    return [one.tensor for one in enc.encode(pictures())]


def refused(mode: str, family: str, **changes: Any) -> str:
    """What making an encoder is refused with."""
    try:
        make(family, parallel=Parallel(mode), **changes)  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def made_differently() -> str:
    """Each rank asks for another model."""
    return refused("data", "kimi-vl", num_layers=1 + dist.get_rank())


def die_in_the_middle(mode: str, receiver: int | None, doomed: int) -> str:
    """One rank is killed while it encodes; what the others then say, and again when they try once more."""
    enc = make("kimi-k2.5", parallel=Parallel(mode, receiver=receiver))  # type: ignore[arg-type]
    enc.encode(pictures())
    if dist.get_rank() == doomed:
        real = encoder_module.VisionModel.forward

        def forward(*args: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        encoder_module.VisionModel.forward = forward  # type: ignore[method-assign]
    said = []
    for _ in range(2):
        try:
            enc.encode(pictures())
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    assert said[0] == said[1]
    return said[0]


def leave_in_the_middle() -> str:
    """One rank is interrupted between two layers, where the others wait for it, and lives on."""
    enc = make("kimi-k2.5", parallel=Parallel("tensor"))
    if dist.get_rank() == 1:

        def interrupted(*_: Any) -> None:
            raise MemoryError("no room")

        enc.model.vision_tower.encoder.blocks[1].register_forward_pre_hook(interrupted)
    try:
        enc.encode(pictures())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def gathered() -> list[bytes]:
    """Messages of different lengths."""
    return Ranks(dist.group.WORLD).gather(b"x" * (1000 * dist.get_rank()))


def no_room_on_one_rank() -> str:
    """One rank has no memory for what the others give it; the next request is well again."""
    enc = make("kimi-k2.5", parallel=Parallel("data"))
    if dist.get_rank() == 1:

        def room(grid: Any) -> torch.Tensor:
            del enc._room  # type: ignore[method-assign]
            raise MemoryError("no room for features")

        enc._room = room  # type: ignore[method-assign]
    try:
        enc.encode(pictures())
    except Exception as error:
        assert len(enc.encode(pictures())) == len(SIZES)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def different_batches() -> str:
    """Each rank asks for another pass of the same plan."""
    enc = make("kimi-k2.5", parallel=Parallel("data"))
    plan = enc.plan(pictures())
    try:
        enc.encode_batch(pictures(), plan, plan.batches[dist.get_rank()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def different_weights() -> str:
    """Each rank has weights of another seed."""
    return refused("tensor", "kimi-k2.5", seed=dist.get_rank())


def receiver_out_of_range() -> str:
    """One rank names a receiver that is none."""
    try:
        make("kimi-vl", parallel=Parallel("data", receiver=7 if dist.get_rank() == 1 else None))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@torch.no_grad()
def float_peak(grids: list[tuple[int, int, int]]) -> int:
    """Most bytes that this rank allocates for normalised patches, in float32."""
    patches = patches_of(grids).float() / 127.5 - 1
    enc = make("kimi-k2.5", position_cache=0, parallel=Parallel("data"))
    return peak(partial(enc.encode_patches, patches, grids)).peak
