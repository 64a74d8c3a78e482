"""Print every parity figure: ``python -m tests.parity.report``. An oracle that is not installed is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from moonvit import reference
from moonvit.families import FAMILIES, VisionConfig
from tests.parity import oracles
from tests.parity.cases import CLIPS, random_model, random_patches, tiny, wide

IMAGES = [(1, 4, 6), (1, 16, 12), (1, 2, 2), (1, 18, 10)]
SIZES: dict[str, Callable[..., VisionConfig]] = {"tiny": tiny, "wide": wide}


def _ask(
    config: VisionConfig, state: dict[str, torch.Tensor], patches: torch.Tensor, grids: list[tuple[int, int, int]]
):
    if config.family == "kimi-vl":
        return "kornia", oracles.kornia_features(state, config, patches, grids)
    if config.family == "kimi-k3":
        return "mlx-vlm", oracles.mlx_features(state, config, patches, grids)
    with TemporaryDirectory() as directory:
        oracles.write_k25_checkpoint(state, config, Path(directory))
        model = oracles.load_transformers(Path(directory))
        return "transformers", oracles.transformers_features(model, patches, grids)


def main() -> None:
    """Print one line per family, size and dtype."""
    print("float32: largest difference over largest value")
    for size, make in SIZES.items():
        for family in FAMILIES:
            config = make(family, norm_eps=2**-7) if family == "kimi-k3" else make(family)
            grids = [*IMAGES, *([CLIPS[2][0], CLIPS[4][0]] if config.pos_emb_time > 1 else [])]
            model, patches = random_model(config), random_patches(grids)
            ours = model(patches, model.prepare(grids))
            exact = reference.features(model.state_dict(), config, patches, grids)
            line = f"  {size:5} {family:10} to float64 {reference.max_relative_error(ours, exact):.1e}"
            try:
                name, theirs = _ask(config, model.state_dict(), patches, grids)
            except ImportError as missing:
                print(f"{line}   ({missing})")
                continue
            print(f"{line}   to {name} {reference.max_relative_error(ours, theirs):.1e}")
    print("half precision: error against float32, root mean square, ours / plain PyTorch")
    for size, layers in (("tiny", 27), ("wide", 2)):
        for family in FAMILIES:
            for dtype in (torch.bfloat16, torch.float16):
                model = random_model(SIZES[size](family, num_layers=layers), dtype)
                patches, state = random_patches(IMAGES), model.state_dict()
                exact = torch.cat(reference.features(state, model.config, patches, IMAGES, torch.float32))
                plain = torch.cat(reference.features(state, model.config, patches, IMAGES, dtype))
                ours = torch.cat(model(patches, model.prepare(IMAGES)))
                mine, other = ((x - exact).norm() / exact.norm() for x in (ours, plain))
                name = str(dtype).removeprefix("torch.")
                print(f"  {size:5} {family:10} {name:8} {mine:.2e} / {other:.2e} = {mine / other:.2f}")


if __name__ == "__main__":
    main()
