"""Which layer of a tower diverges first from the plain reference: for new devices, kernels, dtypes and weights.

The model runs as it always does; hooks copy what stands after each stage. ``reference.py`` computes the same stages
in float64. In float32 the largest difference is held to 1e-5 of the largest value; in half precision the mean one
to 1.1 times that of plain PyTorch in the same dtype (docs/numerics.md).

Shape suffixes: L patches of one image, D tower width, M tokens, K = 4D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moonvit.errors import DivergenceError, GridError
from moonvit.families import VisionConfig
from moonvit.grids import Grid
from moonvit.images import open_picture
from moonvit.model import VisionModel
from moonvit.preprocess import NORMALISE, patches_from
from moonvit.quantised import Unpacked
from moonvit.reference import max_relative_error, stages

GATE = 1e-5
"""Largest difference in float32, relative to the largest value."""
HALF = 1.1
"""Mean difference in half precision, relative to that of plain PyTorch in the same dtype."""
MOST = 4096
"""Patches of an image at most: the reference holds the scores of all pairs."""
GRIDS = (Grid(1, 4, 6), Grid(1, 10, 16), Grid(1, 4, 6), Grid(1, 12, 2))
"""What is compared where no pictures are given."""
CLIP = (4, 2, 6)
"""What is compared as well where the tower takes clips, with as many frames as it takes."""
ROWS = 96
"""Rows of a chunk at most: ``GRIDS`` make several, with borders inside an image, so that borders are compared too."""


@dataclass(frozen=True)
class Stage:
    """One stage of the tower, over all images.

    Attributes:
        name: ``embed``, ``block 0`` and so on, ``merge``, ``projector``.
        error: Distance of the model to float64, relative.
        limit: What it may be; not finite where plain PyTorch overflows.
    """

    name: str
    error: float
    limit: float

    @property
    def diverges(self) -> bool:
        """Whether the error is over the limit, or not finite."""
        return not math.isfinite(self.error) or self.error > self.limit


@dataclass(frozen=True)
class Comparison:
    """A model held against the reference.

    Attributes:
        dtype: What the model computes in.
        device: Where.
        grids: The images.
        stages: In the order in which they run.
    """

    dtype: str
    device: str
    grids: tuple[Grid, ...]
    stages: tuple[Stage, ...]

    @property
    def first(self) -> Stage | None:
        """The first stage that diverges."""
        return next((stage for stage in self.stages if stage.diverges), None)

    def check(self) -> None:
        """Refuse a model that diverges.

        Raises:
            DivergenceError: Naming the first stage that does, its error and the limit.
        """
        if self.first is not None:
            raise DivergenceError(
                f"{self.first.name} is the first stage that diverges from the reference: error {self.first.error:.2e}, "
                f"allowed {self.first.limit:.2e} in {self.dtype} on {self.device}",
                param=self.first.name,
            )

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-able values; an error or limit that is not finite is null."""
        rows = [
            {
                "name": stage.name,
                "error": stage.error if math.isfinite(stage.error) else None,
                "limit": stage.limit if math.isfinite(stage.limit) else None,
                "diverges": stage.diverges,
            }
            for stage in self.stages
        ]
        return {
            "dtype": self.dtype,
            "device": self.device,
            "grids": [list(grid) for grid in self.grids],
            "stages": rows,
            "first": self.first.name if self.first else None,
        }


@torch.no_grad()
def compare(
    model: VisionModel, patches: torch.Tensor | None = None, grids: Sequence[Grid] | None = None, seed: int = 0
) -> Comparison:
    """Run a model and the reference on the same images.

    Args:
        model: In evaluation mode. Memory beyond its own: every stage of all images in its dtype, one stage of all
            images and one weight in float64.
        patches: uint8 (L, 588) of all images; None draws them.
        grids: The images; None is ``GRIDS``, and a clip where the model takes clips.
        seed: Of the patches that are drawn.

    Returns:
        Every stage with its error and limit.

    Raises:
        GridError: An image has more than ``MOST`` patches, or the patches are not those of the grids.
    """
    if grids is None:
        frames = min(CLIP[0], model.config.pos_emb_time)
        grids = GRIDS if frames == 1 else (*GRIDS, Grid(frames, *CLIP[1:]))
    for index, grid in enumerate(grids):
        if grid.patches > MOST:
            raise GridError(
                f"grid {index}: {grid.patches} patches, at most {MOST} are compared", param=f"grids[{index}]"
            )
    if patches is None:
        generator = torch.Generator().manual_seed(seed)
        total = sum(grid.patches for grid in grids)
        patches = torch.randint(0, 256, (total, 588), dtype=torch.uint8, generator=generator)
    with _captured(model) as found:
        found["projector"] = model(patches.to(model.device), model.prepare(grids, ROWS))
    rows = [grid.patches for grid in grids]
    normalised = torch.tensor(NORMALISE)[patches.int()]
    state = Unpacked({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    half = model.dtype in (torch.bfloat16, torch.float16)
    images = list(zip(torch.split(normalised, rows), grids, strict=True))
    exact = [stages(state, model.config, *image) for image in images]
    plain = [stages(state, model.config, *image, model.dtype) for image in images] if half else []
    held = []
    for step in zip(*exact, *plain, strict=True):  # all images stage by stage, so that one stage is held in float64
        name, values = step[0][0], [value for _, value in step]
        theirs, others = values[: len(images)], values[len(images) :]
        ours = torch.split(torch.cat(found.pop(name)).cpu(), [len(one) for one in theirs])
        if half:
            held.append(Stage(name, _distance(ours, theirs), HALF * _distance(others, theirs)))
        else:
            held.append(Stage(name, max_relative_error(ours, theirs), GATE))
    return Comparison(str(model.dtype).removeprefix("torch."), str(model.device), tuple(grids), tuple(held))


def cut(config: VisionConfig, pictures: Sequence[Any]) -> tuple[torch.Tensor, list[Grid]]:
    """Patches to compare on.

    Args:
        config: Whose picture rule holds.
        pictures: Anything ``open_picture`` reads.

    Returns:
        uint8 (L, 588) of all pictures, and their grids.

    Raises:
        ImageError: A picture cannot be read, or is not legal for the family.
    """
    made = [patches_from(open_picture(one, index=index), config.rule) for index, one in enumerate(pictures)]
    return torch.cat([torch.from_numpy(one.patches_LC) for one in made]), [one.grid for one in made]


@contextmanager
def _captured(model: VisionModel) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Copies of what stands after each stage while the model runs; blocks work in place, so copies they must be."""
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        found.setdefault(name, []).append(value.clone())

    def after(name: str) -> Any:
        return lambda block, inputs, output: keep(name, inputs[0])

    tower = model.vision_tower
    hooks = [
        tower.patch_embed.register_forward_hook(lambda part, inputs, output: keep("embed", output)),
        *(block.register_forward_hook(after(f"block {n}")) for n, block in enumerate(tower.encoder.blocks)),
        model.projector.register_forward_pre_hook(lambda part, inputs: keep("merge", inputs[0])),
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Root mean square difference over all images, relative to that of the values."""
    a, b = torch.cat(list(ours)).double(), torch.cat(list(theirs)).double()
    return float((a - b).norm() / b.norm())
